"""What the tier knows in memory: objects, where they lie, and what the bytes are spent on."""

import dataclasses
import pathlib
from collections.abc import Iterable

from hetero_kv.metrics import series
from hetero_kv.prefix.disk.catalog_db import Row
from hetero_kv.prefix.disk.ledger import Ledger
from hetero_kv.prefix.disk.record import SEGMENT_HEADER, Component, Header, aligned
from hetero_kv.prefix.disk.segment import Place, Segment
from hetero_kv.prefix.host import Ticket
from hetero_kv.prefix.payload import ArrayPayload

INDEX_LEAST, INDEX_MOST = 1 << 16, 1 << 22  # bytes of the index before it holds anything
_DEAD_PART = 16  # compaction copies at most so many bytes for one that it gains
_ROW = 320  # bytes that the index may take for an object, without key and meta


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One object: waiting to be written (`header` and `payload` set), or in a segment."""

    kind: str
    key: bytes
    depth: int
    generation: int
    meta: bytes
    record_bytes: int
    segment: Segment | None = None
    place: Place | None = None
    header: Header | None = None
    payload: ArrayPayload | None = None
    row: Row | None = None  # as it is in the index

    @classmethod
    def waiting(
        cls,
        kind: str,
        key: bytes,
        depth: int,
        generation: int,
        payload: ArrayPayload,
        meta: bytes,
    ) -> "Entry":
        """An object to be written."""
        sizes = zip(payload.layout.components, payload.checksums, strict=True)
        parts = tuple(Component(name, stop - start, x) for (name, start, stop), x in sizes)
        header = Header(kind, key, depth, generation, parts, meta)
        entry = cls(kind, key, depth, generation, meta, header.record_bytes)
        entry.header, entry.payload = header, payload
        return entry

    @property
    def ticket(self) -> Ticket:
        """Its ticket: its number is its slot, for no number is given out twice."""
        return Ticket(self.generation, self.generation)

    @property
    def index_bytes(self) -> int:
        """What the index may take for it."""
        return _ROW + 2 * (len(self.key) + len(self.meta))

    def make_row(self) -> Row:
        """What the index should say."""
        return Row(
            self.generation,
            self.segment.number,
            *self.place,
            self.kind,
            self.key,
            self.depth,
            self.meta,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Ignored:
    """A file that is not used but takes room: another format or identity, or damaged."""

    path: pathlib.Path
    nbytes: int
    reason: str


class Books:
    """Objects by generation and by key, segments and their objects. Holds no locks."""

    def __init__(self, capacity: int, reserve: int):
        self.capacity = capacity
        self.index_base = min(max(INDEX_LEAST, capacity >> 8), INDEX_MOST)
        self.reserve = reserve  # bytes for compaction only
        self.entries: dict[int, Entry] = {}
        self.by_key: dict[tuple[str, bytes], Entry] = {}
        self.segments: dict[int, Segment] = {}
        self.members: dict[int, dict[int, Entry]] = {}  # per segment
        self.live: dict[int, int] = {}  # bytes per segment
        self.ignored: list[Ignored] = []
        self.queued = 0  # bytes
        self.queued_index = 0  # bytes that the index may take for what waits
        self.index_bytes = 0  # and for what is placed
        self.index_bytes_written = 0  # as of the last commit: until the next it may be as large
        self.peak = 0  # the most bytes that were ever not free

    # -- objects -----------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """A new object, waiting or placed."""
        self.entries[entry.generation] = entry
        self.by_key[entry.kind, entry.key] = entry
        if entry.segment is None:
            self._queue(entry, 1)
        else:
            self._join(entry)

    def place(self, entry: Entry, segment: Segment, place: Place) -> None:
        """The object was written, or moved."""
        if entry.segment is None:
            self._queue(entry, -1)
            entry.header = entry.payload = None
        else:
            self._leave(entry)
        entry.segment, entry.place = segment, place
        self._join(entry)

    def remove(self, entry: Entry) -> bool:
        """Forgets an object; False if it was not known (any more)."""
        if self.entries.get(entry.generation) is not entry:
            return False
        del self.entries[entry.generation]
        if self.by_key.get((entry.kind, entry.key)) is entry:
            del self.by_key[entry.kind, entry.key]
        if entry.segment is None:
            self._queue(entry, -1)
        else:
            self._leave(entry)
        return True

    def _queue(self, entry: Entry, sign: int) -> None:
        self.queued += sign * entry.record_bytes
        self.queued_index += sign * entry.index_bytes

    def _join(self, entry: Entry) -> None:
        number = entry.segment.number
        self.index_bytes += entry.index_bytes
        self.members[number][entry.generation] = entry
        self.live[number] += entry.record_bytes

    def _leave(self, entry: Entry) -> None:
        number = entry.segment.number
        self.index_bytes -= entry.index_bytes
        del self.members[number][entry.generation]
        self.live[number] -= entry.record_bytes

    # -- segments ----------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> None:
        """A segment without objects yet."""
        self.segments[segment.number] = segment
        self.members[segment.number] = {}
        self.live[segment.number] = 0

    def remove_segment(self, segment: Segment) -> None:
        """A segment whose file is gone. Its objects were moved or removed."""
        for table in (self.segments, self.members, self.live):
            del table[segment.number]

    def dead(self, segment: Segment) -> int:
        """Bytes of a segment that compaction gives back, without its header."""
        return segment.end - _header(segment) - self.live[segment.number]

    def worth_compacting(self, segment: Segment) -> bool:
        """Whether enough of a segment is dead: an object is not copied for a few bytes' sake."""
        if not self.live[segment.number]:
            return True
        headers = SEGMENT_HEADER * (segment.end // self.reserve)  # of smaller segments, for copies
        return self.dead(segment) > max(headers, segment.end // _DEAD_PART)

    # -- bytes -------------------------------------------------------------------------------

    @property
    def index_charge(self) -> int:
        """What the index may take."""
        return self.index_base + max(self.index_bytes, self.index_bytes_written)

    @property
    def free(self) -> int:
        """Bytes nobody owns."""
        files = sum(x.end for x in self.segments.values()) + sum(x.nbytes for x in self.ignored)
        return self.capacity - files - self.index_charge

    @property
    def room(self) -> int:
        """Bytes for further records, when all dead bytes that are worth it are given back."""
        ahead = 4 + 2 * self.queued // self.reserve  # segments that will be begun, at most
        overhead = SEGMENT_HEADER * (len(self.segments) + ahead) + self.index_charge
        stuck = sum(self.dead(x) for x in self.segments.values() if not self.worth_compacting(x))
        taken = overhead + stuck + sum(self.live.values()) + self.queued + self.queued_index
        return self.capacity - self.reserve - taken

    def note_peak(self) -> None:
        """Takes notice of how many bytes are taken now."""
        self.peak = max(self.peak, self.capacity - self.free)

    def fits(self, nbytes: int) -> bool:
        """Whether further records of so many bytes will find room."""
        ahead = SEGMENT_HEADER * (4 + 2 * self.queued // self.reserve)
        if nbytes + self.queued + self.queued_index + ahead + self.reserve <= self.free:
            return True  # without giving anything back
        return nbytes <= self.room

    def ledger(self) -> Ledger:
        """See Ledger."""
        live, free = sum(self.live.values()), self.free
        overhead = sum(map(_header, self.segments.values())) + self.index_charge
        dead = sum(map(self.dead, self.segments.values())) + sum(x.nbytes for x in self.ignored)
        return Ledger(self.capacity, live, dead, overhead, free, self.queued)

    def gauges(self) -> dict[str, int]:
        """Gauges by name."""
        found = {f"disk_{x}_bytes": y for x, y in dataclasses.asdict(self.ledger()).items()}
        found["disk_segments"] = len(self.segments)
        for one in self.ignored:
            name = series("disk_ignored_files", reason=one.reason)
            found[name] = found.get(name, 0) + 1
        return found

    def problems(self) -> list[str]:
        """What breaks the ledger, counted anew from files and objects; empty if healthy."""
        found, ledger = [], self.ledger()
        if not ledger.exact:
            found.append(f"the sum is not the capacity: {ledger}")
        if ledger.free < 0:
            found.append(f"over the budget by {-ledger.free} bytes")
        for number, segment in self.segments.items():
            size = _size(segment.path)
            # After a failed write that could not be cut off, the file ends anywhere.
            if aligned(size) != segment.end:
                found.append(f"segment {number}: {size} bytes, booked {segment.end}")
            found += self._overlaps(number)
        for ignored in self.ignored:
            if _size(ignored.path) != ignored.nbytes:
                found.append(f"{ignored.path.name}: {ignored.nbytes} bytes booked")
        placed = [x for x in self.entries.values() if x.segment is not None]
        waiting = [x for x in self.entries.values() if x.segment is None]
        for name, want, have in (
            ("live", sum(x.record_bytes for x in placed), ledger.live),
            ("queued", sum(x.record_bytes for x in waiting), ledger.queued),
            ("index", sum(x.index_bytes for x in placed), self.index_bytes),
            ("members", len(placed), sum(map(len, self.members.values()))),
            ("keys", len(self.entries), len(self.by_key)),
        ):
            if want != have:
                found.append(f"{name}: counted {want}, booked {have}")
        return found

    def _overlaps(self, number: int) -> Iterable[str]:
        stop = SEGMENT_HEADER
        for entry in sorted(self.members[number].values(), key=lambda x: x.place.offset):
            if entry.place.offset < stop:
                yield f"segment {number}: records overlap at {entry.place.offset}"
            stop = entry.place.offset + entry.record_bytes
            if entry.record_bytes != aligned(entry.place.header_bytes + entry.place.payload_bytes):
                yield f"segment {number}: wrong size at {entry.place.offset}"
        if self.members[number] and stop > self.segments[number].end:
            yield f"segment {number}: records end at {stop}, behind its end"


def _header(segment: Segment) -> int:
    return min(segment.end, SEGMENT_HEADER)  # 0: it is emptied, but still has its name


def _size(path: pathlib.Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
