"""Checks and repairs a directory of the disk tier, without the model that filled it."""

import collections
import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator

from hetero_kv.prefix.disk.catalog_db import NAME as INDEX
from hetero_kv.prefix.disk.catalog_db import CatalogDb
from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.lock import DirectoryLock
from hetero_kv.prefix.disk.record import SEGMENT_HEADER, Header
from hetero_kv.prefix.disk.recover import QUARANTINE
from hetero_kv.prefix.disk.segment import UNREADABLE, Place, Segment, number_of, segment_files
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.host import STALE

WHOLE, DELETED = "whole", "deleted"


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A record, or a file without usable records (header None).

    state: WHOLE, DELETED, or what is wrong; `component`: where.
    """

    path: pathlib.Path
    state: str
    nbytes: int
    header: Header | None = None
    place: Place | None = None
    component: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether something is wrong with it that is not on purpose."""
        return self.state not in (WHOLE, DELETED, "other_format", "other_identity")

    def __str__(self) -> str:
        if self.header is None:
            return f"{self.path.name}: {self.state} ({self.nbytes} bytes) {self.component}".rstrip()
        head, at = self.header, f"{self.path.name}+{self.place.offset}"
        what = f"{head.kind} depth {head.depth} key {head.key.hex()[:16]}"
        return f"{at}: {self.state} {self.component} {what} ({self.nbytes} bytes)".replace(
            "  ", " "
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found. index: "" or why the index cannot be used."""

    items: tuple[Item, ...]
    index: str
    identities: tuple[bytes, ...]

    @property
    def damaged(self) -> list[Item]:
        """What is wrong, without what the index is."""
        return [x for x in self.items if x.is_damaged]

    @property
    def is_healthy(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.damaged and not self.index

    def counts(self) -> dict[str, tuple[int, int]]:
        """(number, bytes) of the items in each state."""
        found: dict[str, tuple[int, int]] = {}
        for item in self.items:
            number, nbytes = found.get(item.state, (0, 0))
            found[item.state] = (number + 1, nbytes + item.nbytes)
        return found


def check(directory: pathlib.Path, identity: bytes | None = None) -> Report:
    """Reads every byte that is alive. Changes nothing, and locks nobody out.

    Args:
        directory: that of a tier without a writer.
        identity: only segments of this one; None: all.
    """
    items: list[Item] = []
    identities: collections.Counter[bytes] = collections.Counter()
    for path in segment_files(directory):
        segment = Segment.open(Files(), path, identity, write=False)
        if isinstance(segment, str):
            items.append(Item(path, segment, _size(path)))
            continue
        identities[segment.head.identity] += segment.end
        try:
            items += _check_segment(segment)
        finally:
            segment.close()
    index = _check_index(directory, identities.most_common(1)[0][0], items) if identities else ""
    return Report(tuple(items), index, tuple(x for x, _ in identities.most_common()))


def quarantine(directory: pathlib.Path) -> list[Item]:
    """Takes what is damaged out of use; returns it.

    A damaged record is killed where it lies; its bytes stay until its segment is compacted. Where
    not even a record can be made out, the segment is compacted at once. A file of which nothing
    can be used is moved to the directory `quarantine`, where it still counts as dead bytes.
    """
    gaps = set()
    with _locked(directory):
        taken = check(directory).damaged
        for item in taken:
            _take_out(directory, item)
            if item.place is not None and item.header is None:
                gaps.add(number_of(item.path))
        if taken:
            _forget_index(directory)  # it names what was taken out
    if taken:
        _open_once(directory, compact=gaps)
    return taken


def _take_out(directory: pathlib.Path, item: Item) -> None:
    if item.place is None:
        target = directory / QUARANTINE
        target.mkdir(exist_ok=True)
        item.path.rename(target / item.path.name)
    elif item.header is not None:
        segment = Segment.open(Files(), item.path, None, write=True)
        if not isinstance(segment, str):
            segment.kill(item.place.offset)
            segment.sync()
            segment.close()


def prune(directory: pathlib.Path, capacity: int) -> str:
    """Deletes, deepest and oldest first, until all files fit. Returns "" or a reason.

    Other identities and formats go first, whatever they hold.
    """
    return _open_once(directory, capacity)


def rebuild(directory: pathlib.Path) -> str:
    """Makes the index anew from the segments. Returns "" or a reason."""
    with _locked(directory):
        _forget_index(directory)
    return _open_once(directory)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    lock = DirectoryLock(directory)
    try:
        yield
    finally:
        lock.release()


def _open_once(directory: pathlib.Path, capacity: int = 0, compact: Iterable[int] = ()) -> str:
    identities = identities_of(directory)
    if not identities:
        return ""
    total = sum(_size(x) for x in directory.rglob("*"))
    tier = DiskTier(
        directory, capacity or 4 * total + (1 << 30), identities[0], _no_layout, background=False
    )
    for number in compact:
        tier.compact(number)
    reason = tier.failure or "; ".join(tier.problems())
    flushed = tier.close()
    return reason or flushed.failure


def identities_of(directory: pathlib.Path) -> list[bytes]:
    """Identities of the segments, the one with most bytes first."""
    found: collections.Counter[bytes] = collections.Counter()
    for path in segment_files(directory):
        segment = Segment.open(Files(), path, None, write=False)
        if not isinstance(segment, str):
            found[segment.head.identity] += segment.end
            segment.close()
    return [x for x, _ in found.most_common()]


def _check_segment(segment: Segment) -> Iterator[Item]:
    try:
        found, end = segment.scan()
    except OSError:
        yield Item(segment.path, UNREADABLE, segment.end)
        return
    at = SEGMENT_HEADER
    for one in found:
        size = one.header.record_bytes
        if one.place.offset > at:
            yield _gap(segment, at, one.place.offset - at)
        at = one.place.offset + size
        if not one.alive:
            yield Item(segment.path, DELETED, size, one.header, one.place)
            continue
        got = segment.read(one.place)
        state = WHOLE if got.payload is not None else got.failure
        if state != STALE:
            yield Item(segment.path, state, size, one.header, one.place, got.component)
    if end < segment.end:
        yield _gap(segment, end, segment.end - end)


def _check_index(directory: pathlib.Path, identity: bytes, items: list[Item]) -> str:
    """Reads a copy, since opening the index may change its files."""
    with tempfile.TemporaryDirectory() as copy:
        for path in directory.glob(f"{INDEX}*"):
            if path.is_file():
                shutil.copy(path, copy)
        db = CatalogDb(pathlib.Path(copy), identity)
        loaded = db.load()
        db.close()
    if loaded.reason:
        return loaded.reason
    known = {(x.generation, x.segment, x.start) for rows in loaded.rows.values() for x in rows}
    mine = {
        (x.header.generation, number_of(x.path), x.place.offset) for x in items if x.state == WHOLE
    }
    return "" if mine <= known else f"behind: {len(mine - known)} records are not in it"


def _gap(segment: Segment, offset: int, nbytes: int) -> Item:
    place = Place(offset, 0, nbytes)
    return Item(segment.path, "no_record", nbytes, None, place, f"at {offset}")


def _forget_index(directory: pathlib.Path) -> None:
    CatalogDb(directory, bytes(32)).discard()


def _no_layout(kind: str, depth: int):
    raise ValueError("nothing is read here")


def _size(path: pathlib.Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:
        return 0
