"""One segment: a file that records are appended to, read from by position, and killed in."""

import contextlib
import dataclasses
import pathlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hetero_kv.prefix.disk import record
from hetero_kv.prefix.disk.files import Bytes, Files
from hetero_kv.prefix.disk.record import ALIGN, DEAD, LIVE, SEGMENT_HEADER, Header
from hetero_kv.prefix.host import CORRUPT, STALE

UNREADABLE = "unreadable"  # the operating system refused
START_BYTES = 2 << 20  # appended, after which the system is told to begin writing
SUFFIX = ".seg"
_WINDOW = 1 << 20  # bytes read at once where a scan looks for the next record
_PEEK = 1024  # bytes that hold most headers


class Place(NamedTuple):
    """Where a record lies in its segment."""

    offset: int
    header_bytes: int
    payload_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a scan found: a header at a place, and whether the record is alive."""

    header: Header
    place: Place
    alive: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Got:
    """A record read by copy, or both None and a failure (STALE, CORRUPT, UNREADABLE, and where)."""

    header: Header | None
    payload: np.ndarray | None
    failure: str = ""
    component: str = ""


class Segment:
    """An open segment. `end`: where the next record goes, which is the size of the file.

    The file stays open while anyone reads it, so its number is never reused under a reader.
    """

    def __init__(self, files: Files, path: pathlib.Path, fd: int, head: record.SegmentHeader):
        self.path = path
        self.head = head
        self.end = SEGMENT_HEADER
        self._started = 0  # up to here the system was told to begin writing
        self._files = files
        self._fd = fd
        self._users = 1
        self._guard = threading.Lock()

    @property
    def number(self) -> int:
        """Its number, which is also in its name."""
        return self.head.number

    @classmethod
    def create(cls, files: Files, directory: pathlib.Path, number: int, identity: bytes):
        """A new, empty segment. Raises OSError, and leaves nothing behind then."""
        head = record.SegmentHeader(number, secrets.token_bytes(16), identity)
        path = directory / name(number)
        fd = files.create(path)
        try:
            files.write(fd, [head.pack()], 0)
        except OSError:
            files.close(fd)
            with contextlib.suppress(OSError):
                files.remove(path)
            raise
        return cls(files, path, fd, head)

    @classmethod
    def open(cls, files: Files, path: pathlib.Path, identity: bytes | None, write: bool):
        """An existing segment (identity None: anyone's), or the reason (a string) why not."""
        try:
            fd = files.open(path, write)
        except OSError:
            return UNREADABLE
        try:
            head = record.parse_segment(
                files.read(fd, SEGMENT_HEADER, 0), number_of(path), identity
            )
            if isinstance(head, str):
                files.close(fd)
                return head
            segment = cls(files, path, fd, head)
            segment.end = files.size(fd)
        except OSError:
            files.close(fd)
            return UNREADABLE
        return segment

    # -- use ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def used(self) -> Iterator[int]:
        """Keeps the file open inside; yields its descriptor, or -1 if it is closed already."""
        with self._guard:
            alive = self._users > 0
            self._users += alive
        try:
            yield self._fd if alive else -1
        finally:
            if alive:
                self.close()

    def close(self) -> None:
        """Ends the owner's use; the last user closes the file."""
        with self._guard:
            self._users -= 1
            last = self._users == 0
        if last:
            with contextlib.suppress(OSError):
                self._files.close(self._fd)

    # -- writing -----------------------------------------------------------------------------

    def append(self, header: Header, payload: Sequence[Bytes]) -> Place:
        """Adds a record. Raises OSError; the file is then as long as before, if it can be cut."""
        packed = record.pack(header, self.head, self.end)
        place = Place(self.end, len(packed), header.payload_bytes)
        padding = bytes(header.record_bytes - len(packed) - header.payload_bytes)
        try:
            self._files.write(self._fd, [packed, *payload, padding], self.end)
        except OSError:
            self.cut(self.end)
            raise
        self.end += header.record_bytes
        if self.end - self._started >= START_BYTES:
            self._files.start_sync(self._fd, self._started, self.end - self._started)
            self._started = self.end
        return place

    def cut(self, size: int) -> None:
        """Shortens the file, or at least learns how long it is."""
        try:
            self._files.truncate(self._fd, size)
            self.end = size
            self._started = min(self._started, size)
        except OSError:
            with contextlib.suppress(OSError):
                self.end = record.aligned(self._files.size(self._fd))

    def kill(self, offset: int) -> None:
        """Marks a record as dead, for good. Raises OSError."""
        self._files.write(self._fd, [DEAD], offset)

    def sync(self) -> None:
        """Returns when everything written is on the disk. Raises OSError."""
        self._files.sync(self._fd)

    def remove(self) -> None:
        """Frees its bytes at once, whoever still has it open, and takes its name away."""
        self._files.truncate(self._fd, 0)
        self.end = 0
        self._files.remove(self.path)
        self.close()

    # -- reading -----------------------------------------------------------------------------

    def size(self) -> int:
        """Bytes of the file as it is now. Raises OSError."""
        with self.used() as fd:
            return self._files.size(fd) if fd >= 0 else 0

    def is_alive(self, place: Place) -> bool:
        """Whether a record has not been killed, as far as can be read."""
        with self.used() as fd:
            try:
                return fd >= 0 and self._files.read(fd, len(LIVE), place.offset) == LIVE
            except OSError:
                return False

    def read(self, place: Place, label: bytes | None = None, shared: bool = False) -> Got:
        """Copies a record out and checks that the copy is the group that `label` names.

        label: None: whatever group it says it is.
        shared: the writer is another process, which can tell of a deletion by the state word only:
            it is read after the copy. (The writer itself knows better, and a read that goes back
            would end the read-ahead of the operating system.)
        """
        head = np.empty(place.header_bytes, np.uint8)
        payload = np.empty(place.payload_bytes, np.uint8)
        with self.used() as fd:
            if fd < 0:
                return Got(None, None, STALE)
            try:
                count = self._files.read_into(fd, [head, payload], place.offset)
                state = head[: len(LIVE)].tobytes() if count else b""
                if shared:
                    state = self._files.read(fd, len(LIVE), place.offset)
                removed = not state and self._files.size(fd) == 0
            except OSError:
                return Got(None, None, UNREADABLE)
        if state == DEAD or removed:
            return Got(None, None, STALE)
        if count < head.nbytes + payload.nbytes or state != LIVE:
            return Got(None, None, CORRUPT, "record")
        header = record.parse(head.tobytes(), self.head, place.offset)
        if header is None or header.payload_bytes != payload.nbytes:
            return Got(None, None, CORRUPT, "header")
        component = header.damaged(payload, label)
        return Got(None, None, CORRUPT, component) if component else Got(header, payload)

    def scan(self, start: int = SEGMENT_HEADER) -> tuple[list[Found], int]:
        """All records from `start` on, by their headers only, and where the last one ends.

        Bounded: a read per record. Where no record begins, the next one is looked for on the
        grid. Raises OSError.
        """
        found, offset, end = [], start, start
        with self.used() as fd:
            size = self._files.size(fd) if fd >= 0 else 0
            while offset < size:
                one = self._found(fd, offset, size)
                if one is None:
                    offset = self._next(fd, offset + ALIGN, size)
                    continue
                found.append(one)
                offset = end = offset + one.header.record_bytes
        return found, end

    def _found(self, fd: int, offset: int, size: int) -> Found | None:
        data = self._files.read(fd, _PEEK, offset)
        state, nbytes = data[: len(LIVE)], record.header_size(data)
        if state not in (LIVE, DEAD) or not nbytes:
            return None
        if nbytes > len(data):
            data += self._files.read(fd, nbytes - len(data), offset + len(data))
        header = record.parse(data[:nbytes], self.head, offset)
        if header is None or offset + header.record_bytes > size:
            return None
        return Found(header, Place(offset, nbytes, header.payload_bytes), state == LIVE)

    def _next(self, fd: int, offset: int, size: int) -> int:
        while offset < size:
            window = self._files.read(fd, _WINDOW, offset)
            for i in range(0, len(window), ALIGN):
                if window[i : i + len(LIVE)] in (LIVE, DEAD):
                    return offset + i
            if not window:
                break
            offset += _WINDOW
        return size


def name(number: int) -> str:
    """A segment's file name."""
    return f"{number:08d}{SUFFIX}"


def number_of(path: pathlib.Path) -> int:
    """The number in a file name, -1 if it is none of ours."""
    stem = path.name.removesuffix(SUFFIX)
    return int(stem) if stem.isdecimal() and path.name == name(int(stem)) else -1


def segment_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Files that may be segments, oldest first."""
    return sorted((x for x in directory.glob(f"*{SUFFIX}") if number_of(x) >= 0), key=number_of)
