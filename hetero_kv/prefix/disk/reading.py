"""From a record to the payload that was asked for, and reading in another process."""

import pathlib
import threading
from collections.abc import Callable

from hetero_kv.metrics import Counters
from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.record import SEGMENT_HEADER
from hetero_kv.prefix.disk.segment import UNREADABLE, Got, Place, Segment, number_of, segment_files
from hetero_kv.prefix.host import CORRUPT, STALE, Fetched
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, label

LayoutOf = Callable[[str, int], GroupLayout]
ABSENT = "absent"


def fetched(got: Got, layout: GroupLayout, generation: int) -> Fetched:
    """The payload, if the record is the one that was asked for, in the layout of this process."""
    if got.header is None:
        return Fetched(None, got.failure, got.component)
    if got.header.generation != generation:
        return Fetched(None, CORRUPT, "generation")
    for have, (name, start, stop) in zip(got.header.components, layout.components, strict=False):
        if have.name != name or have.nbytes != stop - start:
            return Fetched(None, CORRUPT, "layout")
    if len(got.header.components) != len(layout.components):
        return Fetched(None, CORRUPT, "layout")
    checksums = tuple(x.checksum for x in got.header.components)
    return Fetched(ArrayPayload(layout, got.payload, checksums))


class DiskReader:
    """Reads what another process writes, without its index and without locking it out.

    It knows records by scanning headers, and looks again for what it does not find. A record that
    was deleted or moved meanwhile is noticed by its state word, which is read after the copy.
    """

    def __init__(
        self,
        directory: pathlib.Path | str,
        identity: bytes,
        layout_of: LayoutOf,
        *,
        counters: Counters | None = None,
        files: Files | None = None,
    ):
        self.directory = pathlib.Path(directory)
        self.counters = Counters() if counters is None else counters
        self._identity = identity
        self._layout_of = layout_of
        self._files = files or Files()
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[Segment, int]] = {}  # and where the scan stands
        self._places: dict[tuple[str, bytes], tuple[Segment, Place, int]] = {}
        self.refresh()

    def __len__(self) -> int:
        """Groups known; some may be gone by now."""
        return len(self._places)

    def refresh(self) -> None:
        """Looks for new segments and records, and forgets removed segments."""
        with self._lock:
            paths = {number_of(x): x for x in segment_files(self.directory)}
            for number in [x for x in self._segments if x not in paths]:
                self._forget(number)
            for number, path in paths.items():
                self._look(number, path)

    def read(self, kind: str, key: bytes, depth: int) -> Fetched:
        """A copy of a group, or a failure (ABSENT, CORRUPT, STALE, UNREADABLE)."""
        result = Fetched(None, ABSENT)
        for _ in range(2):
            with self._lock:
                found = self._places.get((kind, key))
            if found is not None:
                segment, place, generation = found
                layout = self._layout_of(kind, depth)
                got = segment.read(place, label(kind, key, depth), shared=True)
                result = fetched(got, layout, generation)
                if result.payload is not None:
                    return result
                with self._lock:
                    if self._places.get((kind, key)) == found:
                        del self._places[kind, key]
            self.refresh()
        reason = ABSENT if result.failure == STALE else result.failure
        self.counters.add("disk_read_failures_total", kind=kind, reason=reason)
        return Fetched(None, reason, result.component)

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            for number in list(self._segments):
                self._forget(number)

    def _look(self, number: int, path: pathlib.Path) -> None:
        known = self._segments.get(number)
        if known is None:
            segment = Segment.open(self._files, path, self._identity, write=False)
            if isinstance(segment, str):
                self.counters.add("disk_ignored_files_total", reason=segment)
                return
            known = (segment, SEGMENT_HEADER)
        segment, start = known
        try:
            found, end = segment.scan(start)
            if segment.size() < start:
                self._forget(number)  # removed; a later look finds what has taken its name
                return
        except OSError:
            self.counters.add("disk_ignored_files_total", reason=UNREADABLE)
            found, end = [], start
        self._segments[number] = (segment, end)
        for one in found:
            key = (one.header.kind, one.header.key)
            rival = self._places.get(key)
            if one.alive and (rival is None or rival[2] <= one.header.generation):
                self._places[key] = (segment, one.place, one.header.generation)

    def _forget(self, number: int) -> None:
        segment, _ = self._segments.pop(number)
        segment.close()
        self._places = {k: x for k, x in self._places.items() if x[0] is not segment}
