"""The page table of one component, and the pure functions that change it.

All of them trace without a branch on a value and fail closed: an operation whose flags are not 0
has changed nothing. Ids are compared with the number of pages, never clamped: a negative id does
not wrap around, and `P` (one past the last page) is the sentinel for "no page", at which reads give
NaN and writes are dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Forms of a page.
ABSENT = 0  # free
WRITING = 1  # its owner may append entries
COMPLETE = 2  # sealed: never written again, may be shared
LOADING = 3  # a copy into it has not ended: only that copy may write, and nothing may read
CORRUPT = 4  # its bytes turned out wrong: neither read nor shared, freed with its last reference

# Flags of an operation, one bit each.
BAD_ROW = 1  # a row that the table does not have
BAD_RANGE = 2  # more pages, or another place in the row, than a row has
NO_ROOM = 4  # too few free pages
OCCUPIED = 8  # the row has pages there already
NOT_HELD = 16  # nothing to release: released twice, or never held
NOT_COMPLETE = 32  # a page that is not sealed cannot be shared
BAD_ID = 64  # an id that is no page
STALE = 128  # the page was recycled since: its generation is another one
BAD_OWNER = 256  # the null owner, or a page that belongs to somebody else
FLAGS = {
    "bad_row": BAD_ROW,
    "bad_range": BAD_RANGE,
    "no_room": NO_ROOM,
    "occupied": OCCUPIED,
    "not_held": NOT_HELD,
    "not_complete": NOT_COMPLETE,
    "bad_id": BAD_ID,
    "stale": STALE,
    "bad_owner": BAD_OWNER,
}


class PageTable(NamedTuple):
    """Pages of one component: P of them, n columns for each of R rows of the batch."""

    form: jax.Array  # i32[P]
    generation: jax.Array  # i32[P], bumped whenever a page is freed
    owner: jax.Array  # u32[P, 2], short digest of whose page it is; 0, 0: nobody's
    count: jax.Array  # i32[P], entries written
    shares: jax.Array  # i32[P], references from rows and pins
    pins: jax.Array  # i32[P], references from outside the batch (a device tier of the store)
    checksum: jax.Array  # u32[P], of the bytes of a sealed page
    table: jax.Array  # i32[R, n], page of each column; P: none

    @property
    def size(self) -> int:
        """P, which is also the sentinel."""
        return self.form.shape[0]

    def valid(self, ids: jax.Array) -> jax.Array:
        """Which ids are pages."""
        return (ids >= 0) & (ids < self.size)

    def safe(self, ids: jax.Array) -> jax.Array:
        """Ids with everything that is no page replaced by the sentinel."""
        return jnp.where(self.valid(ids), ids, self.size)

    def column(self, field: str, ids: jax.Array, fill: int = 0) -> jax.Array:
        """A field at ids of any shape; `fill` where there is no page."""
        value = getattr(self, field)
        return value.at[self.safe(ids)].get(mode="fill", fill_value=fill)


def empty(pages: int, rows: int, columns: int) -> PageTable:
    """All pages free, all rows without pages."""

    def zeros(*shape: int, dtype: str = "int32") -> jax.Array:
        return jnp.zeros(shape, dtype)

    return PageTable(
        form=zeros(pages),
        generation=zeros(pages),
        owner=zeros(pages, 2, dtype="uint32"),
        count=zeros(pages),
        shares=zeros(pages),
        pins=zeros(pages),
        checksum=zeros(pages, dtype="uint32"),
        table=jnp.full((rows, columns), pages, jnp.int32),
    )


def alloc(
    pages: PageTable,
    row: jax.Array,
    first: jax.Array,
    count: jax.Array,
    owner: jax.Array,
    enable: bool | jax.Array = True,
    load: int | jax.Array = 0,
) -> tuple[PageTable, jax.Array]:
    """Gives a row `count` free pages, the lowest ids first, from column `first` on.

    They are in form WRITING, or LOADING in columns before `load`, and owned by u32[2] `owner`.
    Returns the table and u32 flags; with enable = False nothing changes and the flags say what
    would have happened.
    """
    columns = jnp.arange(pages.table.shape[1], dtype=jnp.int32)
    wanted = (columns >= first) & (columns < first + count)
    flags = _row_flags(pages, row) | _range_flags(pages, first, count)
    flags |= _flag(jnp.any(wanted & pages.valid(_row(pages, row))), OCCUPIED)
    free = (pages.form == ABSENT) & (pages.shares == 0)
    flags |= _flag(count > jnp.sum(free, dtype=jnp.int32), NO_ROOM)
    flags |= _flag(~jnp.any(owner != 0), BAD_OWNER)
    (ids,) = jnp.nonzero(free, size=columns.size, fill_value=pages.size)
    ids = jnp.roll(ids.astype(jnp.int32), first)  # the first free one into column `first`
    ids = jnp.where(wanted & (flags == 0) & enable, ids, pages.size)
    return pages._replace(
        form=_set(pages.form, ids, jnp.where(columns < load, LOADING, WRITING)),
        owner=_set(pages.owner, ids, owner),
        count=_set(pages.count, ids, 0),
        shares=_set(pages.shares, ids, 1),
        table=_place(pages, row, ids),
    ), flags


def share(
    pages: PageTable,
    row: jax.Array,
    first: jax.Array,
    ids: jax.Array,
    count: jax.Array,
    generation: jax.Array,
    enable: bool | jax.Array = True,
) -> tuple[PageTable, jax.Array]:
    """Puts the first `count` of sealed pages i32[n] `ids` into a row, from column `first` on.

    generation: i32[n], what the ids meant when they were learnt (check at use).
    """
    columns = jnp.arange(pages.table.shape[1], dtype=jnp.int32)
    used = columns < count
    flags = _row_flags(pages, row) | _range_flags(pages, first, count)
    flags |= _shareable(pages, ids, used, generation)
    places = (columns >= first) & (columns < first + count)
    flags |= _flag(jnp.any(places & pages.valid(_row(pages, row))), OCCUPIED)
    ids = jnp.where(used & (flags == 0) & enable, ids, pages.size)
    return pages._replace(
        shares=pages.shares.at[ids].add(1, mode="drop"),
        table=_place(pages, row, jnp.roll(ids, first)),
    ), flags


def pin(
    pages: PageTable, ids: jax.Array, count: jax.Array, generation: jax.Array
) -> tuple[PageTable, jax.Array]:
    """References to the first `count` of sealed pages i32[k] `ids` from outside the batch."""
    used = jnp.arange(ids.size, dtype=jnp.int32) < count
    flags = _flag((count < 0) | (count > ids.size), BAD_RANGE)
    flags |= _shareable(pages, ids, used, generation)
    ids = jnp.where(used & (flags == 0), ids, pages.size)
    return pages._replace(
        shares=pages.shares.at[ids].add(1, mode="drop"),
        pins=pages.pins.at[ids].add(1, mode="drop"),
    ), flags


def unpin(
    pages: PageTable, ids: jax.Array, count: jax.Array, generation: jax.Array
) -> tuple[PageTable, jax.Array, jax.Array]:
    """Takes back `pin`. Returns the table, flags, and which pages bool[P] became free."""
    used = jnp.arange(ids.size, dtype=jnp.int32) < count
    known = pages.valid(ids)
    times = jnp.zeros_like(pages.pins).at[jnp.where(used, pages.safe(ids), pages.size)]
    times = times.add(1, mode="drop")
    flags = _flag((count < 0) | (count > ids.size), BAD_RANGE)
    flags |= _flag(jnp.any(used & ~known), BAD_ID)
    flags |= _flag(jnp.any(used & known & (pages.column("generation", ids) != generation)), STALE)
    flags |= _flag(jnp.any(times > pages.pins), NOT_HELD)
    times = jnp.where(flags == 0, times, 0)
    pages, freed = _drop(pages._replace(pins=pages.pins - times), times)
    return pages, flags, freed


def release(
    pages: PageTable, row: jax.Array, first: int | jax.Array = 0, enable: bool | jax.Array = True
) -> tuple[PageTable, jax.Array, jax.Array]:
    """A row gives up its pages from column `first` on; those nobody else refers to become free.

    Returns the table, flags, and which pages bool[P] became free: their generation is bumped, so
    that whoever still holds an id holds a stale one.
    """
    columns = jnp.arange(pages.table.shape[1], dtype=jnp.int32)
    ids = _row(pages, row)
    held = pages.valid(ids) & (columns >= first)
    flags = _row_flags(pages, row) | _range_flags(pages, first, 0)
    flags |= _flag(~jnp.any(held), NOT_HELD)
    times = jnp.zeros_like(pages.shares).at[jnp.where(held, ids, pages.size)].add(1, mode="drop")
    flags |= _flag(jnp.any(times > pages.shares - pages.pins), NOT_HELD)
    done = (flags == 0) & enable
    pages = pages._replace(table=_place(pages, row, pages.size, held & done))
    pages, freed = _drop(pages, jnp.where(done, times, 0))
    return pages, flags, freed


def revoke(
    pages: PageTable, row: jax.Array, ids: jax.Array, left: jax.Array
) -> tuple[PageTable, jax.Array]:
    """Takes pages i32[n] `ids` from a row by the books of whoever gave them, and its columns.

    What the block table says is not asked: where it is damaged, `release` would give up pages of
    somebody else. left: i32[n], references of other rows to each page by the same books; without
    any, and without a pin, a page becomes free as in `release`. Returns the table, and which pages
    bool[P] became free.
    """
    ids = pages.safe(ids)
    held = jnp.zeros(pages.size, bool).at[ids].set(True, mode="drop")
    shares = pages.shares.at[ids].set(left, mode="drop") + jnp.where(held, pages.pins, 0)
    pages = pages._replace(table=_place(pages, row, pages.size, jnp.ones(ids.shape, bool)))
    return _free(pages._replace(shares=shares), held & (shares == 0))


def unkeep(pages: PageTable, ids: jax.Array) -> tuple[PageTable, jax.Array]:
    """Pages i32[k] `ids` that no row holds become free, by the books of whoever pinned them.

    As in `revoke`, the table is not asked: it may be damaged. Returns the table, and which pages
    bool[P] became free.
    """
    held = jnp.zeros(pages.size, bool).at[pages.safe(ids)].set(True, mode="drop")
    none = jnp.int32(0)
    shares, pins = (jnp.where(held, none, x) for x in (pages.shares, pages.pins))
    return _free(pages._replace(shares=shares, pins=pins), held)


def end_load(
    pages: PageTable, row: jax.Array, owner: jax.Array, ok: jax.Array | bool = True
) -> PageTable:
    """The copy into a row's LOADING pages has ended, or (ok = False) failed: CORRUPT.

    What has arrived may be sealed, and what is not full yet is WRITING like any other page. Only
    pages of u32[2] `owner` change.
    """
    ids = _row(pages, row)
    mine = (pages.column("form", ids) == LOADING) & jnp.any(owner != 0)
    mine &= jnp.all(pages.column("owner", ids) == owner, axis=-1)
    ids = jnp.where(mine, ids, pages.size)
    return pages._replace(form=_set(pages.form, ids, jnp.where(ok, WRITING, CORRUPT)))


def condemn(pages: PageTable, ids: jax.Array, wrong: jax.Array) -> PageTable:
    """Sealed pages i32[k] `ids` are CORRUPT where bool[k] `wrong`: whoever reads one is refused."""
    wrong &= pages.column("form", ids) == COMPLETE
    ids = jnp.where(wrong, pages.safe(ids), pages.size)
    return pages._replace(form=_set(pages.form, ids, CORRUPT))


def seal(
    pages: PageTable,
    row: jax.Array,
    owner: jax.Array,
    filled: jax.Array,
    entries: int,
    checksum: jax.Array,
    keys: jax.Array | None = None,
    enable: bool | jax.Array = True,
) -> tuple[PageTable, jax.Array]:
    """Completes a row's first `filled` pages, which hold `entries` entries each.

    Pages that are sealed already stay as they are.

    Args:
        owner: u32[2], the owner of the row: nobody else's pages are sealed.
        checksum: u32[n], of the bytes of each column's page.
        keys: u32[n, 2], new owners of the pages (say, keys of the prefix); None: they stay.
    """
    columns = jnp.arange(pages.table.shape[1], dtype=jnp.int32)
    ids = _row(pages, row)
    used, form = columns < filled, pages.column("form", ids)
    flags = _row_flags(pages, row) | _range_flags(pages, 0, filled)
    flags |= _flag(jnp.any(used & ~pages.valid(ids)), BAD_ID)
    new = used & (form == WRITING)
    short = new & (pages.column("count", ids) != entries)
    flags |= _flag(jnp.any(short | (used & (form != WRITING) & (form != COMPLETE))), NOT_COMPLETE)
    theirs = jnp.any(pages.column("owner", ids) != owner, axis=-1)
    theirs |= pages.column("shares", ids) != 1
    flags |= _flag(jnp.any(new & theirs), BAD_OWNER)
    if keys is not None:
        flags |= _flag(jnp.any(new & ~jnp.any(keys != 0, axis=-1)), BAD_OWNER)
    ids = jnp.where(new & (flags == 0) & enable, ids, pages.size)
    return pages._replace(
        form=_set(pages.form, ids, COMPLETE),
        checksum=_set(pages.checksum, ids, checksum),
        owner=pages.owner if keys is None else _set(pages.owner, ids, keys),
    ), flags


class Ledger(NamedTuple):
    """What the pages are doing: free + owned + shared == P, and whether the books agree."""

    free: jax.Array  # i32[], pages that nobody refers to
    owned: jax.Array  # i32[], pages with one reference
    shared: jax.Array  # i32[], pages with more
    exact: jax.Array  # bool[], every share count is the number of references, and so on


def ledger(pages: PageTable) -> Ledger:
    """Counts references anew and compares them with the books (DESIGN rule 7)."""
    found = pages.pins.at[pages.safe(pages.table).reshape(-1)].add(1, mode="drop")
    absent, unowned = pages.form == ABSENT, ~jnp.any(pages.owner != 0, axis=-1)
    exact = (found == pages.shares) & (pages.pins >= 0) & (absent == (pages.shares == 0))
    exact &= absent == unowned
    exact &= ~absent | (pages.count == 0)
    exact &= (pages.shares <= 1) | (pages.form == COMPLETE) | (pages.form == CORRUPT)
    strays = jnp.any((pages.table != pages.size) & ~pages.valid(pages.table))

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x, dtype=jnp.int32)

    return Ledger(
        free=total(pages.shares <= 0),
        owned=total(pages.shares == 1),
        shared=total(pages.shares > 1),
        exact=jnp.all(exact) & ~strays,
    )


def writable(pages: PageTable, owners: jax.Array, loads: bool = False) -> jax.Array:
    """i32[R, n]: the pages that each row, owned by u32[R, 2], may append to; P elsewhere.

    A page in form WRITING that the row owns and nobody shares. loads: for a copy from elsewhere,
    which may also write to LOADING ones.
    """
    ids = pages.table
    same = pages.column("owner", ids) == owners[:, None]
    own = same[..., 0] & same[..., 1]  # a reduction would not fuse
    own &= jnp.any(owners != 0, axis=-1)[:, None]
    form = pages.column("form", ids)
    open_ = (form == WRITING) | (form == LOADING) if loads else form == WRITING
    may = own & open_ & (pages.column("shares", ids) == 1)
    return jnp.where(may, ids, pages.size)  # without a page the form is 0, which is not WRITING


def _drop(pages: PageTable, times: jax.Array) -> tuple[PageTable, jax.Array]:
    """i32[P] `times` fewer references to each page."""
    shares = pages.shares - times
    return _free(pages._replace(shares=shares), (times > 0) & (shares == 0))


def _free(pages: PageTable, freed: jax.Array) -> tuple[PageTable, jax.Array]:
    """Pages bool[P] belong to nobody from now on."""
    return pages._replace(
        form=jnp.where(freed, ABSENT, pages.form),
        generation=pages.generation + freed.astype(jnp.int32),
        owner=jnp.where(freed[:, None], jnp.uint32(0), pages.owner),
        count=jnp.where(freed, 0, pages.count),
        checksum=jnp.where(freed, jnp.uint32(0), pages.checksum),
    ), freed


def _shareable(
    pages: PageTable, ids: jax.Array, used: jax.Array, generation: jax.Array
) -> jax.Array:
    known = pages.valid(ids)
    flags = _flag(jnp.any(used & ~known), BAD_ID)
    used = used & known
    flags |= _flag(jnp.any(used & (pages.column("form", ids) != COMPLETE)), NOT_COMPLETE)
    return flags | _flag(jnp.any(used & (pages.column("generation", ids) != generation)), STALE)


def _row(pages: PageTable, row: jax.Array) -> jax.Array:
    """i32[n]; of a row that is not there: no pages."""
    rows = pages.table.shape[0]
    index = jnp.where((row >= 0) & (row < rows), row, rows)
    return pages.table.at[index].get(mode="fill", fill_value=pages.size)


def _place(pages: PageTable, row: jax.Array, ids: jax.Array, where: jax.Array | None = None):
    """The block tables with ids put into a row, where they are pages, or `where` says so."""
    if where is None:
        where = ids != pages.size
    rows, columns = pages.table.shape
    index = jnp.where(where, jnp.arange(columns, dtype=jnp.int32), columns)
    row = jnp.where((row >= 0) & (row < rows), row, rows)
    return pages.table.at[row, index].set(ids, mode="drop")


def _set(field: jax.Array, ids: jax.Array, value: jax.Array | int) -> jax.Array:
    return field.at[ids].set(jnp.asarray(value, field.dtype), mode="drop")


def _row_flags(pages: PageTable, row: jax.Array) -> jax.Array:
    return _flag((row < 0) | (row >= pages.table.shape[0]), BAD_ROW)


def _range_flags(pages: PageTable, first: jax.Array, count: jax.Array) -> jax.Array:
    columns = pages.table.shape[1]
    # Each alone first: their sum could overflow.
    bad = (first < 0) | (count < 0) | (first > columns) | (count > columns)
    return _flag(bad | (first + count > columns), BAD_RANGE)


def _flag(wrong: jax.Array | bool, bit: int) -> jax.Array:
    return jnp.where(wrong, jnp.uint32(bit), jnp.uint32(0))
