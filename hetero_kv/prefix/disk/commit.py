"""Group commit: segments first, then, now and then, the index.

The index may be behind the segments: a start reads a header per object that it does not know. So
it is committed once every `index_rows` objects, which bounds that scan, and where it would be wrong
rather than behind: it says that its writer ended in order, or names a segment that is gone.
"""

import threading
from collections.abc import Callable

from hetero_kv.metrics import Counters
from hetero_kv.prefix.disk.books import Books, Entry
from hetero_kv.prefix.disk.catalog_db import CatalogDb, Extent
from hetero_kv.prefix.disk.record import SEGMENT_HEADER
from hetero_kv.prefix.disk.segment import Segment
from hetero_kv.prefix.disk.writer import Writer, error_name


class Committer:
    """Makes what a Writer has written durable. Runs under the tier's lock for writers."""

    def __init__(
        self,
        writer: Writer,
        db: CatalogDb,
        books: Books,
        lock: threading.RLock,
        counters: Counters,
        lose: Callable[[Entry, str], None],
        index_rows: int,
    ):
        self._index_rows = index_rows
        self.last_generation = 0
        self.extents: dict[int, Extent] = {}  # what the index says of each segment
        self.index_reason = ""  # why the index has to be written anew, "" if it has not
        self.removed: list[Entry] = []  # since the last commit
        self.clean = False  # what the index says of its writer's end
        self._writer = writer
        self._db = db
        self._books = books
        self._lock = lock
        self._counters = counters
        self._lose = lose

    def commit(self, clean: bool = False) -> str:
        """Makes everything written durable, then the index. Returns "" or the first failure.

        clean: nothing will follow.

        What could not be made durable is lost, with a reason. A failing index fails nothing: it
        is written anew by the next commit, or found behind the segments by the next start.
        """
        writer = self._writer
        failures = self._kill_again()
        with self._lock:
            dirty, writer.dirty = writer.dirty, set()
        for segment in sorted(dirty, key=lambda x: x.number):
            with segment.used() as fd:
                if fd < 0:
                    continue  # it is gone
                try:
                    segment.sync()
                except OSError as error:
                    failures.append(error_name(error))
                    self._distrust(segment, failures[-1])
        writer.drop_empty()
        if writer.directory_dirty:
            try:
                writer.files.sync_directory(writer.directory)
                writer.directory_dirty = False
            except OSError as error:
                failures.append(error_name(error))
        if clean or self._must_commit_index():
            self._commit_index(clean and not failures)
        return failures[0] if failures else ""

    def _must_commit_index(self) -> bool:
        behind = len(self._writer.added) + len(self.removed)
        return bool(
            self.clean or self.index_reason or self._writer.gone or behind >= self._index_rows
        )

    def _kill_again(self) -> list[str]:
        with self._lock:
            again, self._writer.unkilled = self._writer.unkilled, []
        for segment, offset in again:
            self._writer.kill(segment, offset)
        return ["kill"] if self._writer.unkilled else []

    def _distrust(self, segment: Segment, reason: str) -> None:
        """After a failed sync nobody knows what the disk holds of what was not yet durable."""
        writer = self._writer
        if writer.head is segment:
            writer.head = None
        with self._lock:
            writer.dirty.add(segment)
            members = self._books.members[segment.number].values()
            lost = [x for x in members if x.row is None or x.row.segment != segment.number]
        for entry in lost:
            self._lose(entry, reason)
            writer.kill(segment, entry.place.offset)

    def _commit_index(self, clean: bool) -> None:
        with self._lock:
            removed, self.removed = self.removed, []
            alive = self._books.entries
            added = [x for x in self._writer.added.values() if alive.get(x.generation) is x]
            if self.index_reason:
                added = [x for x in alive.values() if x.segment is not None]
            index_bytes = self._books.index_bytes
        gone, self._writer.gone, self._writer.added = self._writer.gone, set(), {}
        if self.index_reason:
            self.extents = {}
            removed = []
            for entry in added:
                entry.row = None
        removed = [x for x in removed if x.row is not None]
        touched = self._take_rows(removed + [x for x in added if x.row is not None])
        for number in gone:
            self.extents.pop(number, None)
        for entry in added:
            entry.row = entry.make_row()
            self.extents.setdefault(entry.row.segment, Extent(SEGMENT_HEADER)).toggle(entry.row, 1)
            touched.add(entry.row.segment)
        for number, extent in self.extents.items():
            if extent.stop != self._books.segments[number].end:
                extent.stop = self._books.segments[number].end
                touched.add(number)
        rows = [x.row for x in added]
        if self.index_reason:
            reason = self._db.rewrite(rows, self.extents, self.last_generation, clean)
        elif touched or removed or gone or clean != self.clean:
            changed = {x: self.extents[x] for x in touched if x in self.extents}
            forget = [x.generation for x in removed]
            last = self.last_generation
            reason = self._db.commit(rows, forget, changed, gone, last, clean)
        else:
            return
        self.index_reason, self.clean = reason, clean
        if reason:
            self._counters.add("disk_index_errors_total")
            return
        with self._lock:
            self._books.index_bytes_written = index_bytes

    def _take_rows(self, entries: list[Entry]) -> set[int]:
        for entry in entries:
            if entry.row.segment in self.extents:
                self.extents[entry.row.segment].toggle(entry.row, -1)
        return {x.row.segment for x in entries}
