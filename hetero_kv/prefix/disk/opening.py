"""The start of a tier: takes stock, settles what was left half done, keeps to the limit."""

from collections.abc import Callable

from hetero_kv.prefix.disk.books import Books
from hetero_kv.prefix.disk.catalog_db import CatalogDb
from hetero_kv.prefix.disk.commit import Committer
from hetero_kv.prefix.disk.recover import Note, recover
from hetero_kv.prefix.disk.results import Order, Stored
from hetero_kv.prefix.disk.segment import number_of
from hetero_kv.prefix.disk.writer import Writer
from hetero_kv.prefix.host import Ticket


def start(
    identity: bytes,
    order: Order,
    db: CatalogDb,
    books: Books,
    writer: Writer,
    committer: Committer,
    drop: Callable[[Ticket], bool],
    note: Note,
) -> int:
    """Fills empty books from the directory. Returns the highest generation ever given out."""
    loaded = db.load()
    if loaded.reason:
        note("disk_index_ignored_total", reason=loaded.reason.partition(":")[0])
    extents, doubles = recover(writer.directory, identity, writer.files, loaded, books, note)
    fresh = [x for x in books.entries.values() if x.row is None]
    placed = sum(x.row is not None for x in books.entries.values())
    behind = fresh or doubles or placed < sum(map(len, loaded.rows.values()))
    behind = behind or extents.keys() != loaded.extents.keys()
    committer.extents, committer.clean = extents, loaded.clean
    committer.index_reason = loaded.reason or ("behind" if behind else "")
    books.index_bytes_written = books.index_bytes
    # Their writer died before it could make them durable, and may not have told anyone.
    writer.dirty = {x.segment for x in fresh}
    for double in doubles:
        writer.kill(double.segment, double.place.offset)
    taken = [number_of(x.path) for x in books.ignored]
    writer.next_number = 1 + max([*books.segments, *taken], default=0)
    if books.segments:
        writer.head = books.segments[max(books.segments)]
    last = max([loaded.last, *books.entries], default=0)
    committer.last_generation = last
    _shrink(order, books, writer, drop, note)
    committer.commit()
    return last


def _shrink(
    order: Order, books: Books, writer: Writer, drop: Callable[[Ticket], bool], note: Note
) -> None:
    """Keeps to a limit that is lower than what is stored, and leaves room for compaction then."""
    if books.free >= books.reserve:
        return
    least_wanted = sorted(map(Stored.of, books.entries.values()), key=order, reverse=True)

    def drop_one() -> None:
        one = least_wanted.pop()
        note("disk_shrunk_bytes_total", one.nbytes)
        drop(one.ticket)
        books.index_bytes_written = books.index_bytes  # it shrinks with the first commit

    if books.free < 0:
        while least_wanted and books.room < 0:
            drop_one()
    while books.free < books.reserve:
        if writer.reclaim(force=books.free < 0):
            continue
        if not least_wanted:
            break
        drop_one()
