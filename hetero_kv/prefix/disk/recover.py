"""Opening a directory: what is stored, from the index where it agrees with the segments."""

import pathlib
from collections.abc import Callable, Iterator

from hetero_kv.prefix.disk.books import Books, Entry, Ignored
from hetero_kv.prefix.disk.catalog_db import Extent, Loaded, Row
from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.record import SEGMENT_HEADER, aligned
from hetero_kv.prefix.disk.segment import UNREADABLE, Found, Place, Segment, segment_files

QUARANTINE = "quarantine"  # directory for files that fsck took out of use

Note = Callable[..., None]  # counts an event: note(name, reason=…)


def recover(
    directory: pathlib.Path,
    identity: bytes,
    files: Files,
    loaded: Loaded,
    books: Books,
    note: Note,
) -> tuple[dict[int, Extent], list[Entry]]:
    """Fills the books. Returns what the index is right about, and objects stored twice.

    Costs a read per record that the index does not know, and after an end without `close` one of
    8 bytes per record, which may have been killed since the last commit. Files of another format
    or identity, and damaged or unreadable ones, are ignored with a reason and count as dead.
    """
    extents: dict[int, Extent] = {}
    doubles: list[Entry] = []
    for path in segment_files(directory):
        segment = Segment.open(files, path, identity, write=True)
        if isinstance(segment, str):
            _ignore(books, path, segment, note)
            continue
        extent = loaded.extents.get(segment.number)
        rows = loaded.rows.get(segment.number, [])
        if extent is None or extent.stop > segment.end:
            if not loaded.reason:
                note("disk_rescanned_total", reason="unknown" if extent is None else "truncated")
            extent, rows = Extent(SEGMENT_HEADER), []
        size = segment.end
        try:
            found, end = segment.scan(extent.stop)
        except OSError:
            segment.close()
            _ignore(books, path, UNREADABLE, note)
            continue
        if end < size:
            note("disk_torn_bytes_total", size - end)
            segment.cut(end)
        books.add_segment(segment)
        if extent.stop > SEGMENT_HEADER or rows:
            extents[segment.number] = extent
        for entry in (*_from_rows(segment, rows), *_from_scan(segment, found)):
            if entry.row is None or loaded.clean or segment.is_alive(entry.place):
                doubles += _add(books, entry)
    for path in sorted((directory / QUARANTINE).glob("*")):
        _ignore(books, path, "quarantined", note)
    return extents, doubles


def _from_rows(segment: Segment, rows: list[Row]) -> Iterator[Entry]:
    for row in rows:
        place = Place(row.start, row.header_bytes, row.payload_bytes)
        size = aligned(row.header_bytes + row.payload_bytes)
        yield Entry(
            row.kind, row.key, row.depth, row.generation, row.meta, size, segment, place, row=row
        )


def _from_scan(segment: Segment, found: list[Found]) -> Iterator[Entry]:
    for one in found:
        if one.alive:
            head = one.header
            yield Entry(
                head.kind,
                head.key,
                head.depth,
                head.generation,
                head.meta,
                head.record_bytes,
                segment,
                one.place,
            )


def _add(books: Books, entry: Entry) -> list[Entry]:
    """Of two records of one group, or two copies of one record, the later one counts."""
    rivals = {
        id(x): x
        for x in (books.by_key.get((entry.kind, entry.key)), books.entries.get(entry.generation))
        if x is not None
    }
    if any(x.generation > entry.generation for x in rivals.values()):
        return [entry]
    for rival in rivals.values():
        books.remove(rival)
    books.add(entry)
    return list(rivals.values())


def _ignore(books: Books, path: pathlib.Path, reason: str, note: Note) -> None:
    try:
        size = path.lstat().st_size
    except OSError:
        size = 0
    books.ignored.append(Ignored(path, size, reason))
    note("disk_ignored_files_total", reason=reason)
