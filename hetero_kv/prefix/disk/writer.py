"""The writing side: appending, and giving dead bytes back.

Everything here but `kill` runs under the tier's lock for writers; `lock` guards the books against
readers and is never held over a slow operation.
"""

import errno
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np

from hetero_kv.metrics import LATENCY_BOUNDS, Counters
from hetero_kv.prefix.disk.books import Books, Entry
from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.record import SEGMENT_HEADER, Header
from hetero_kv.prefix.disk.segment import UNREADABLE, Got, Place, Segment

NO_ROOM = "no_room"


class Writer:
    """Appends objects to segments and compacts segments; notes what the next commit must do."""

    def __init__(
        self,
        directory: pathlib.Path,
        identity: bytes,
        segment_bytes: int,
        files: Files,
        books: Books,
        lock: threading.RLock,
        counters: Counters,
        lose: Callable[[Entry, str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.next_number = 1
        self.head: Segment | None = None
        self.dirty: set[Segment] = set()
        self.unkilled: list[tuple[Segment, int]] = []
        self.added: dict[int, Entry] = {}  # written or moved since the last commit
        self.gone: set[int] = set()  # segments, since the last commit
        self.directory_dirty = True
        self.directory = directory
        self._identity = identity
        self._segment_bytes = segment_bytes
        self.files = files
        self._books = books
        self._lock = lock
        self._counters = counters
        self._lose = lose
        self._clock = clock
        self._writing = counters.histogram("disk_write_seconds", LATENCY_BOUNDS)

    # -- appending ---------------------------------------------------------------------------

    def write(self, entry: Entry) -> None:
        """Appends a waiting object. On failure it is lost, with a reason."""
        with self._lock:
            header, payload = entry.header, entry.payload
            if self._books.entries.get(entry.generation) is not entry or payload is None:
                return  # deleted while it waited
        started = self._clock()
        segment, reason = self._head_for(header.record_bytes, entry.index_bytes)
        if segment is not None:
            try:
                place = self._append(segment, header, payload.buffer)
            except OSError as error:
                segment, reason = None, error_name(error)
        if segment is None:
            self._lose(entry, reason)
            return
        self.dirty.add(segment)
        with self._lock:
            alive = self._books.entries.get(entry.generation) is entry
            if alive:
                self._books.place(entry, segment, place)
                self.added[entry.generation] = entry
            self._books.note_peak()
        if not alive:
            self.kill(segment, place.offset)
        self._counters.add("disk_written_bytes_total", header.record_bytes)
        self._writing.observe(self._clock() - started)

    def _append(self, segment: Segment, header: Header, payload: np.ndarray) -> Place:
        """Raises OSError. What is left of the record then, as it could not be cut, is dead, and
        the last in its file: if its header is whole, it would hide the beginning of the next."""
        start = segment.end
        try:
            return segment.append(header, [payload])
        except OSError:
            if segment.end != start:
                self.kill(segment, start)
                if self.head is segment:
                    self.head = None
            raise

    def kill(self, segment: Segment, offset: int) -> None:
        """Marks a record dead; if that fails, `commit` tries again and tells."""
        with segment.used() as fd:
            if fd < 0 or offset >= segment.end:
                return  # the whole file is gone, or emptied
            try:
                segment.kill(offset)
            except OSError as error:
                self._counters.add("disk_errors_total", reason=error_name(error), operation="kill")
                with self._lock:
                    self.unkilled.append((segment, offset))
                return
        with self._lock:
            self.dirty.add(segment)

    def _head_for(
        self, size: int, index_bytes: int = 0, compacting: bool = False
    ) -> tuple[Segment | None, str]:
        """A segment to append `size` bytes to, or None and the reason."""
        spare = 0 if compacting else self._books.reserve + index_bytes
        for _ in range(4 * len(self._books.segments) + 8):
            head = self.head
            if head is not None and SEGMENT_HEADER < head.end > self._segment_bytes - size:
                head = self.head = None
            with self._lock:
                enough = self._books.free - spare >= size + (0 if head else SEGMENT_HEADER)
            if enough:
                return (head, "") if head else self._create()
            if compacting or not self.reclaim():
                break
        return None, NO_ROOM

    def _create(self) -> tuple[Segment | None, str]:
        number, self.next_number = self.next_number, self.next_number + 1
        try:
            segment = Segment.create(self.files, self.directory, number, self._identity)
        except OSError as error:
            return None, error_name(error)
        with self._lock:
            self._books.add_segment(segment)
        self.dirty.add(segment)
        self.directory_dirty = True
        self.head = segment
        return segment, ""

    # -- giving bytes back -------------------------------------------------------------------

    def reclaim(self, force: bool = False) -> bool:
        """Gives some dead bytes back; False if there are none worth it.

        force: also where the copies would not fit (a limit was lowered: it is exceeded anyway).
        """
        with self._lock:
            ignored = list(self._books.ignored)
        for one in ignored:
            if self._remove_ignored(one):
                return True
        with self._lock:
            books, best = self._books, None
            for segment in books.segments.values():
                dead, live = books.dead(segment), books.live[segment.number]
                if not live:
                    worth, dead = segment is not self.head or dead > 0, segment.end
                else:
                    fits = live + 2 * SEGMENT_HEADER <= books.free
                    worth = books.worth_compacting(segment) and (fits or force)
                if worth and (best is None or dead > best[0]):
                    best = (dead, segment)
        return best is not None and self.compact(best[1], force)

    def compact(self, victim: Segment, force: bool = False) -> bool:
        """Copies what is alive to other segments, durably, and removes the file.

        On failure everything is as it was, except that damaged records are gone.
        """
        if self.head is victim:
            self.head = None
        with self._lock:
            members = list(self._books.members[victim.number].values())
        moves: list[tuple[Entry, Segment, Place]] = []
        for entry in members:
            got = victim.read(entry.place)
            if got.header is None:
                if got.failure == UNREADABLE:
                    return self._abort(moves)
                self._lose(entry, got.failure)  # the copy would be damaged too
                continue
            if not self._copy(entry, got, moves, force):
                return self._abort(moves)
        try:
            for segment in {segment.number: segment for _, segment, _ in moves}.values():
                segment.sync()
            if moves:
                self.files.sync_directory(self.directory)
        except OSError as error:
            self._counters.add("disk_errors_total", reason=error_name(error), operation="compact")
            return self._abort(moves)
        killed, old = [], [(victim, entry.place.offset) for entry, _, _ in moves]
        with self._lock:
            for entry, segment, place in moves:
                if self._books.entries.get(entry.generation) is entry:
                    self._books.place(entry, segment, place)
                    self.added[entry.generation] = entry
                else:
                    killed.append((segment, place.offset))  # deleted meanwhile
        self._counters.add("disk_compacted_segments_total")
        removed = self.remove_segment(victim)
        for segment, offset in killed + ([] if removed else old):
            self.kill(segment, offset)
        return removed

    def _copy(self, entry: Entry, got: Got, moves: list, force: bool) -> bool:
        segment, _ = self._head_for(entry.record_bytes, compacting=True)
        if segment is None and force:
            segment, _ = self._create() if self.head is None else (self.head, "")
        if segment is None:
            return False
        try:
            moves.append((entry, segment, self._append(segment, got.header, got.payload)))
        except OSError as error:
            self._counters.add("disk_errors_total", reason=error_name(error), operation="compact")
            return False
        self.dirty.add(segment)
        return True

    def _abort(self, moves: list[tuple[Entry, Segment, Place]]) -> bool:
        for _, segment, place in moves:
            self.kill(segment, place.offset)
        return False

    def remove_segment(self, segment: Segment) -> bool:
        """Removes the file of a segment without live objects."""
        if self.head is segment:
            self.head = None
        try:
            segment.remove()
        except OSError as error:
            self._counters.add("disk_errors_total", reason=error_name(error), operation="remove")
            return False
        with self._lock:
            self._books.remove_segment(segment)
        self.gone.add(segment.number)
        self.dirty.discard(segment)
        self.directory_dirty = True
        return True

    def drop_empty(self) -> None:
        """Removes segments in which nothing is alive."""
        with self._lock:
            empty = [
                x
                for x in self._books.segments.values()
                if not self._books.members[x.number] and x is not self.head
            ]
        for segment in empty:
            self.remove_segment(segment)

    def _remove_ignored(self, one) -> bool:
        try:
            self.files.remove(one.path)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        with self._lock:
            self._books.ignored.remove(one)
        self._counters.add("disk_ignored_removed_total", reason=one.reason)
        self.directory_dirty = True
        return one.nbytes > 0


def error_name(error: OSError) -> str:
    """ENOSPC and the like."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
