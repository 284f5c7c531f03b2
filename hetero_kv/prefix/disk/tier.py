"""The disk tier: payloads in one directory within a number of bytes, durable once flushed.

The interface is that of the host tier: tickets with a generation, reads by copy that are checked
after the copy. Whatever goes wrong with the disk is a value, a counter and a reason, never an
exception and never wrong bytes.
"""

import collections
import pathlib
import threading
import time
from collections.abc import Callable

from hetero_kv.metrics import LATENCY_BOUNDS, Counters
from hetero_kv.prefix.disk.books import INDEX_LEAST, Books, Entry
from hetero_kv.prefix.disk.catalog_db import CatalogDb
from hetero_kv.prefix.disk.commit import Committer
from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.ledger import Ledger
from hetero_kv.prefix.disk.lock import DirectoryLock
from hetero_kv.prefix.disk.opening import start
from hetero_kv.prefix.disk.reading import LayoutOf, fetched
from hetero_kv.prefix.disk.record import HEADER_LIMIT, SEGMENT_HEADER
from hetero_kv.prefix.disk.results import LOST, Flushed, Order, Stored, leaf_first
from hetero_kv.prefix.disk.write_back import WriteBack
from hetero_kv.prefix.disk.writer import NO_ROOM, Writer, error_name
from hetero_kv.prefix.host import CORRUPT, STALE, Fetched, Ticket
from hetero_kv.prefix.payload import ArrayPayload

SMALLEST = INDEX_LEAST + 4 * SEGMENT_HEADER  # bytes of the smallest budget
_SEGMENT_LIMIT = 1 << 30  # bytes
_TRIES = 3  # reads of an object that compaction moves meanwhile


class DiskTier:
    """Objects of one identity in a directory of which this is the only writer.

    Args:
        directory: made if need be. Files that are not ours are left alone.
        capacity: bytes of all its files together, the index and headers included.
        identity: digest (32 bytes) of everything that must be equal for bytes to mean the same.
        layout_of: (kind, depth) → layout of such a group's payload.
        segment_bytes: size of a segment, and of the room that is kept for compaction.
        queue_bytes: of objects that wait to be written.
        index_rows: objects written or dropped after which a flush commits the index too; so many
            headers are read at a start after a crash.
        background: write in a thread; else `put` writes when the queue is full, and `flush`.
        order: which objects go first if the directory holds more than `capacity`.
        clock: seconds, for latencies.
        files: operations on files, for tests.

    Raises:
        LockedError: the directory has a writer already.
        ValueError: the capacity is too small for anything.
    """

    def __init__(
        self,
        directory: pathlib.Path | str,
        capacity: int,
        identity: bytes,
        layout_of: LayoutOf,
        *,
        segment_bytes: int = 0,
        queue_bytes: int = 64 << 20,
        index_rows: int = 512,
        background: bool = True,
        order: Order = leaf_first,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        files: Files | None = None,
    ):
        if capacity < SMALLEST:
            raise ValueError(f"a disk tier needs {capacity=} of at least {SMALLEST} bytes")
        if len(identity) != 32:
            raise ValueError(f"the identity is a digest of 32 bytes, got {len(identity)}")
        self.directory = pathlib.Path(directory)
        self.capacity = capacity
        self.counters = Counters() if counters is None else counters
        self.failure = ""  # why the tier is out of use, "" if it is not; a short code
        self.failure_detail = ""  # the same in words, with the path
        self._layout_of = layout_of
        self._queue_bytes = queue_bytes
        self._lost: collections.deque[Ticket] = collections.deque(maxlen=1 << 16)
        self._generation = 0
        self._io = threading.RLock()  # for writers, taken before _lock
        self._lock = threading.RLock()  # for the books and the queue
        self._guard: DirectoryLock | None = None
        size = segment_bytes or min(_SEGMENT_LIMIT, max(1 << 14, (capacity - INDEX_LEAST) // 32))
        size = min(size, (capacity - SMALLEST) // 2)
        self._books = Books(capacity, size + SEGMENT_HEADER)
        files = files or Files()
        self._db = CatalogDb(self.directory, identity, self._books.index_base // 2)
        self._clock = clock
        self._reading = self.counters.histogram("disk_read_seconds", LATENCY_BOUNDS)
        shared = (self._books, self._lock, self.counters, self._lose)
        self._writer = Writer(self.directory, identity, size, files, *shared, clock)
        self._committer = Committer(self._writer, self._db, *shared, index_rows)
        self._waiting = WriteBack(self._writer.write, self._io, self._lock)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._guard = DirectoryLock(self.directory)
            parts = (self._db, self._books, self._writer, self._committer)
            self._generation = start(identity, order, *parts, self.drop, self.counters.add)
        except OSError as error:
            self._fail("open", error)
            return
        if background:
            self._waiting.start()

    # -- objects -------------------------------------------------------------------------------

    def put(
        self, kind: str, key: bytes, depth: int, payload: ArrayPayload, meta: bytes = b""
    ) -> Ticket | None:
        """Takes over a payload that the caller will not touch again; None if it is refused.

        It can be read at once, and is durable when a later `flush` has returned. A group that is
        stored already is not stored again. meta: a few bytes that `stored` gives back.
        """
        with self._lock:
            known = self._books.by_key.get((kind, key))
            if known is not None:
                return known.ticket
            entry = Entry.waiting(kind, key, depth, self._generation + 1, payload, meta)
            reason = self._refusal(entry)
            if reason:
                self.counters.add("disk_refused_total", kind=kind, reason=reason)
                return None
            self._generation = self._committer.last_generation = entry.generation
            self._books.add(entry)
            self._waiting.add(entry)
            full = self._books.queued > self._queue_bytes
        if full and not self._waiting.is_threaded:
            self.write_back()
        return entry.ticket

    def read(self, ticket: Ticket, label: bytes) -> Fetched:
        """Copies an object out, then checks that the copy is the group that `label` names.

        A damaged or unreadable object is dropped.
        """
        started = self._clock()
        for _ in range(_TRIES):
            with self._lock:
                entry = self._books.entries.get(ticket.generation)
                if entry is None or ticket.slot != ticket.generation:
                    return Fetched(None, STALE)
                payload, segment, place = entry.payload, entry.segment, entry.place
            if payload is not None:
                copy = payload.copy()
                component = copy.damaged(label)
                result = Fetched(None, CORRUPT, component) if component else Fetched(copy)
            else:
                got = segment.read(place, label)
                layout = self._layout_of(entry.kind, entry.depth)
                result = fetched(got, layout, ticket.generation)
            with self._lock:
                if self._books.entries.get(ticket.generation) is not entry:
                    return Fetched(None, STALE)
                moved = entry.segment is not segment or entry.place != place
            if result.payload is not None or not moved:
                break
        if result.payload is None:
            self.counters.add("disk_read_failures_total", kind=entry.kind, reason=result.failure)
            self.drop(ticket)
        else:
            self.counters.add("disk_read_bytes_total", result.payload.nbytes)
            self._reading.observe(self._clock() - started)
        return result

    def drop(self, ticket: Ticket) -> bool:
        """Deletes an object; False if it was not there. Durable like a put."""
        with self._lock:
            entry = self._books.entries.get(ticket.generation)
            if entry is None or ticket.slot != ticket.generation:
                return False
            segment, place = entry.segment, entry.place
            self._books.remove(entry)
            self._committer.removed.append(entry)
        if segment is not None:
            self._writer.kill(segment, place.offset)
        return True

    def find(self, kind: str, key: bytes) -> Ticket | None:
        """The ticket of a group, None if it is not stored."""
        with self._lock:
            entry = self._books.by_key.get((kind, key))
            return None if entry is None else entry.ticket

    def is_current(self, ticket: Ticket) -> bool:
        """Whether the ticket's object is still there."""
        with self._lock:
            return ticket.slot == ticket.generation and ticket.generation in self._books.entries

    def stored(self) -> list[Stored]:
        """All objects, in the order in which they were put."""
        with self._lock:
            return [Stored.of(x) for _, x in sorted(self._books.entries.items())]

    # -- durability ----------------------------------------------------------------------------

    def write_back(self, most: int = 1 << 30) -> int:
        """Writes up to `most` of what waits, without making it durable. Returns how many."""
        return self._waiting.run(most)

    def flush(self, last: bool = False) -> Flushed:
        """Returns when everything put or dropped before is durable, or is known to be lost.

        last: nothing will follow; for `close`.
        """
        with self._io:
            if self.failure:
                return Flushed(False, self.failure, self._take_lost())
            self.write_back()
            failure = self._committer.commit(clean=last)
            lost = self._take_lost()
        if failure:
            self.counters.add("disk_flush_failures_total", reason=failure)
        return Flushed(not failure and not lost, failure or (LOST if lost else ""), lost)

    def compact(self, number: int) -> bool:
        """Rewrites one segment without its dead bytes; True if its file is gone then."""
        with self._io:
            segment = self._books.segments.get(number)
            return segment is not None and self._writer.compact(segment)

    def scrub(self) -> Flushed:
        """Takes the bytes of everything that was deleted out of the files.

        Segments with dead bytes are rewritten without them and their files are emptied and
        removed; the index, which keeps tokens, is written anew. What the file system and the
        device do with blocks that were given back is up to them, and files of other identities
        or formats are left alone. On failure some of it is left: "room" where a copy does not fit.
        """
        with self._io:
            flushed = self.flush()
            if self.failure or flushed.failure not in ("", LOST):
                return flushed
            with self._lock:
                dirty = [x for x in self._books.segments.values() if self._books.dead(x)]
            left = [x for x in dirty if not self._writer.compact(x)]
            self._committer.index_reason = "scrubbed"
            again = self.flush()
            failure = again.failure or ("room" if left else flushed.failure)
            return Flushed(not failure, failure, flushed.lost + again.lost)

    def clear(self) -> Flushed:
        """Deletes everything, durably."""
        for one in self.stored():
            self.drop(one.ticket)
        with self._io:
            self._writer.head = None
            return self.flush()

    def close(self) -> Flushed:
        """Flushes and lets another writer in. Any later call does nothing. May be called again."""
        with self._io:
            flushed = self.flush(last=True)
            with self._lock:
                if self.failure == "closed":
                    return flushed
                self.failure = self.failure or "closed"
            self._let_go()
        self._waiting.join()
        return flushed

    # -- books ---------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes for further records once dead ones are compacted away."""
        with self._lock:
            return self._books.room

    def ledger(self) -> Ledger:
        """What the capacity is spent on."""
        with self._lock:
            return self._books.ledger()

    def problems(self) -> list[str]:
        """What breaks the ledger, counted anew from files; empty if healthy."""
        with self._io, self._lock:
            return [] if self.failure else self._books.problems()

    def metrics(self) -> dict[str, int]:
        """Gauges by name; the counters are in `counters`."""
        with self._lock:
            self._books.note_peak()
            peak = {"disk_peak_bytes": self._books.peak}
            return {"disk_queue_depth": len(self._waiting), **peak, **self._books.gauges()}

    # -- inside --------------------------------------------------------------------------------

    def _refusal(self, entry: Entry) -> str:
        if self.failure:
            return self.failure
        if entry.header.header_bytes > HEADER_LIMIT:
            return "header_too_large"
        waiting = self._books.queued
        full = waiting and waiting + entry.record_bytes > self._queue_bytes
        if full and self._waiting.is_threaded:
            return "queue_full"
        need = entry.record_bytes + entry.index_bytes
        return "" if self._books.fits(need) else NO_ROOM

    def _lose(self, entry: Entry, reason: str) -> None:
        with self._lock:
            if self._books.remove(entry):
                self._committer.removed.append(entry)
                self._lost.append(entry.ticket)
                self.counters.add("disk_lost_total", kind=entry.kind, reason=reason)

    def _take_lost(self) -> tuple[Ticket, ...]:
        with self._lock:
            lost = tuple(self._lost)
            self._lost.clear()
            return lost

    def _fail(self, reason: str, error: OSError) -> None:
        self.failure = f"{reason}: {error_name(error)}"
        path = error.filename or self.directory
        self.failure_detail = f"{path}: {reason}: {error.strerror or error} ({error_name(error)})"
        self.counters.add("disk_errors_total", reason=error_name(error), operation=reason)
        self._let_go()

    def _let_go(self) -> None:
        with self._io, self._lock:
            for segment in self._books.segments.values():
                segment.close()
            self._db.close()
            self._books = Books(self.capacity, self._books.reserve)
            self._waiting.stop()
            if self._guard is not None:
                self._guard.release()
