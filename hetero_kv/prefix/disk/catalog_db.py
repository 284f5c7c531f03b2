"""The index on disk: where each record lies, in SQLite. A cache of what the segments say.

Whatever is wrong with it, it is thrown away and made anew from the segments, so it may be behind
them but must never be believed against them. Hence:

- journal_mode=WAL, synchronous=NORMAL: a commit survives the death of the process. After a power
  loss the last ones may be missing; a scan of the segments beyond the known ends finds those
  records. The segments are synced before the commit, never after.
- locking_mode=EXCLUSIVE keeps the index of the log in ordinary memory, mmap_size=0 does the same
  for the database: a truncated file cannot raise a signal. Other processes read segments instead.
- every row has a checksum, every segment the number of its rows and the xor of their checksums: a
  damaged database that SQLite takes for a good one is noticed, segment by segment.
"""

import contextlib
import dataclasses
import pathlib
import sqlite3
from collections.abc import Iterable, Mapping

import xxhash

NAME = "index.sqlite"
SCHEMA = 1
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, stop INTEGER NOT NULL, count INTEGER NOT NULL, sums BLOB NOT NULL
);
CREATE TABLE records (
    generation INTEGER PRIMARY KEY, segment INTEGER NOT NULL, start INTEGER NOT NULL,
    header_bytes INTEGER NOT NULL, payload_bytes INTEGER NOT NULL, kind TEXT NOT NULL,
    key BLOB NOT NULL, depth INTEGER NOT NULL, meta BLOB NOT NULL, sum BLOB NOT NULL
);
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One record."""

    generation: int
    segment: int
    start: int
    header_bytes: int
    payload_bytes: int
    kind: str
    key: bytes
    depth: int
    meta: bytes

    def values(self) -> tuple:
        """The columns before the checksum."""
        return tuple(getattr(self, x) for x in self.__slots__)

    @property
    def is_typed(self) -> bool:
        """Whether the columns have their types, which SQLite does not promise."""
        want = (int, int, int, int, int, str, bytes, int, bytes)
        return all(type(x) is y for x, y in zip(self.values(), want, strict=True))

    def sum(self) -> int:
        """Checksum of the columns."""
        kind = self.kind.encode()
        sizes = (len(kind), len(self.key), len(self.meta))
        numbers = (self.generation, self.segment, self.start, self.header_bytes)
        numbers += (self.payload_bytes, self.depth, *sizes)
        # Sizes before what they are the sizes of: no two rows share these bytes.
        body = b"".join((b"%d %d %d %d %d %d %d %d %d:" % numbers, kind, self.key, self.meta))
        return xxhash.xxh3_64_intdigest(body)


@dataclasses.dataclass(slots=True)
class Extent:
    """What is known of a segment: records up to `stop` are in the index, `count` of them alive."""

    stop: int
    count: int = 0
    sums: int = 0

    def toggle(self, row: Row, count: int) -> None:
        """Adds (count=1) or takes away (-1) a row."""
        self.count += count
        self.sums ^= row.sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """What the index says, of the segments whose rows are all there.

    last: the highest generation ever given out. clean: its writer ended in order, so no record
    was killed after the last commit. reason: why the index is not used.
    """

    rows: Mapping[int, list[Row]] = dataclasses.field(default_factory=dict)
    extents: Mapping[int, Extent] = dataclasses.field(default_factory=dict)
    last: int = 0
    clean: bool = False
    reason: str = ""


class CatalogDb:
    """Read once when the tier opens, written by its flushes. No method raises."""

    def __init__(self, directory: pathlib.Path, identity: bytes, log_limit: int = 1 << 15):
        self.path = directory / NAME
        self._log_limit = log_limit  # bytes of log after which it is moved into the database
        self._identity = identity
        self._db: sqlite3.Connection | None = None

    def load(self) -> Loaded:
        """Opens the index; an unusable one gives a reason and is replaced by the next `rewrite`."""
        if not self.path.exists():
            return Loaded(reason="missing")
        try:
            db = self._connect()
            about = dict(db.execute("SELECT name, value FROM about"))
            if about.get("schema") != SCHEMA:
                return self._refuse(f"other_format: schema {about.get('schema')}")
            if about.get("identity") != self._identity:
                return self._refuse("other_identity")
            extents, rows = {}, {}
            for number, stop, count, sums in db.execute("SELECT * FROM segments"):
                extents[int(number)] = Extent(int(stop), int(count), int.from_bytes(sums))
            for *values, total in db.execute("SELECT * FROM records"):
                row = Row(*values)
                if row.is_typed and row.sum() == int.from_bytes(total):
                    rows.setdefault(row.segment, []).append(row)
            last = int.from_bytes(about["last"])
            self._shorten()  # SQLite appends a page whenever it opens; no commit need follow
        except (
            sqlite3.Error,
            OSError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:
            return self._refuse(f"unreadable: {error}")
        for number, extent in list(extents.items()):
            check = Extent(extent.stop)
            for row in rows.get(number, []):
                check.toggle(row, 1)
            if check != extent:
                del extents[number]
        clean = about.get("clean") == 1
        return Loaded({x: rows.get(x, []) for x in extents}, extents, last, clean)

    def commit(
        self,
        added: Iterable[Row],
        removed: Iterable[int],
        extents: Mapping[int, Extent],
        gone: Iterable[int],
        last: int,
        clean: bool,
    ) -> str:
        """One transaction: rows, generations to forget, segments that changed or are gone.

        Returns "" or a reason; then only `rewrite` may follow.
        """
        if self._db is None:
            return "closed"
        try:
            with self._db as db:
                self._put(db, added, removed, extents, gone, last, clean)
            self._shorten()
        except (sqlite3.Error, OSError) as error:
            return self._refuse(str(error)).reason
        return ""

    def rewrite(
        self, rows: Iterable[Row], extents: Mapping[int, Extent], last: int, clean: bool
    ) -> str:
        """Makes the index anew. Returns "" or a reason."""
        self.discard()
        try:
            db = self._connect()
            db.executescript(_TABLES)
            with db:
                about = {"schema": SCHEMA, "identity": self._identity}
                db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
                self._put(db, rows, (), extents, (), last, clean)
            self._shorten()
        except (sqlite3.Error, OSError) as error:
            return self._refuse(str(error)).reason
        return ""

    def nbytes(self) -> int:
        """Bytes of the database and its log."""
        total = 0
        for path in self._paths():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def close(self) -> None:
        """May be called again."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def discard(self) -> None:
        """Removes the index."""
        self.close()
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink()

    def _paths(self) -> list[pathlib.Path]:
        return [self.path.with_name(NAME + x) for x in ("", "-wal", "-shm", "-journal")]

    def _refuse(self, reason: str) -> Loaded:
        self.close()
        return Loaded(reason=reason)

    def _connect(self) -> sqlite3.Connection:
        # The tier serialises all use by a lock of its own.
        db = sqlite3.connect(self.path, timeout=0, check_same_thread=False)
        self._db = db
        for pragma in (
            "locking_mode=EXCLUSIVE",
            "page_size=4096",
            "auto_vacuum=FULL",
            "mmap_size=0",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "wal_autocheckpoint=0",
            "cell_size_check=ON",
            "trusted_schema=OFF",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
        return db

    def _put(self, db, added, removed, extents, gone, last, clean) -> None:
        db.executemany("DELETE FROM records WHERE generation = ?", ((x,) for x in removed))
        db.executemany("DELETE FROM segments WHERE number = ?", ((x,) for x in gone))
        db.executemany(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((*row.values(), row.sum().to_bytes(8)) for row in added),
        )
        db.executemany(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)",
            ((n, x.stop, x.count, x.sums.to_bytes(8)) for n, x in extents.items()),
        )
        about = {"last": last.to_bytes(8), "clean": int(clean)}
        db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    def _shorten(self) -> None:
        log = self.path.with_name(NAME + "-wal")
        if self._db is not None and log.exists() and log.stat().st_size > self._log_limit:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
