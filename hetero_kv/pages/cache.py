"""A cache whose History leaves are pools of pages: a row of the batch has pages in each component.

The arrays of History leaves are `[repeats, P, entries per page, *width]` here, and `cache.pages`
says whose they are. Everything else (windows, tails, recurrent state, evidence) stays in slots, as
in a contiguous cache. Operations concern one row and all components: either all succeed, or nothing
changes and the flags (see table.py) say why.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from hetero_kv import state
from hetero_kv.contract import CacheSpec, Evidence, History
from hetero_kv.kernels.page_copy import api as page_copy
from hetero_kv.pages import table
from hetero_kv.pages.layout import PageSpec, Paging, history_slots
from hetero_kv.pages.table import PageTable
from hetero_kv.state import Cache

Keys = dict[str, jax.Array]  # per component: u32[n, 2], an owner for each column


@partial(jax.tree_util.register_dataclass, data_fields=("tables", "owner"), meta_fields=("paging",))
@dataclasses.dataclass(frozen=True, eq=False)
class Pages:
    """The page tables of a cache.

    tables: per component. owner: u32[R, 2], the short digest under which each row writes (0, 0: it
    may not). paging: sizes (static).
    """

    tables: dict[str, PageTable]
    owner: jax.Array
    paging: Paging

    def replace(self, **changes) -> "Pages":
        """A copy with the named fields changed."""
        return dataclasses.replace(self, **changes)


def init(spec: CacheSpec, batch: int, paging: Paging, poison: bool = False) -> Cache:
    """An empty cache of `batch` rows without pages. `poison`: see `state.init`."""
    state.check_sizes(batch, paging.capacity)
    return _filled(spec, batch, paging, poison)


def abstract(spec: CacheSpec, batch: int, paging: Paging) -> Cache:
    """Shapes and dtypes of `init`."""
    return jax.eval_shape(lambda: init(spec, batch, paging))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # one program, not one per shape
def _filled(spec: CacheSpec, batch: int, paging: Paging, poison: bool) -> Cache:
    cache = state.init(spec, batch, 1, poison)
    names = list(history_slots(spec))
    if names != [x.component for x in paging.pages]:
        raise ValueError(f"the paging is of {[x.component for x in paging.pages]}, not of {names}")
    pools = {}
    for name, slots in history_slots(spec).items():
        page = paging.page(name)
        for slot in slots:
            fill = (slot.leaf.poison or 0) if poison else 0
            shape = (slot.repeats, page.count, page.entries, *slot.leaf.width)
            pools[slot] = jnp.full(shape, fill, jnp.dtype(slot.leaf.dtype))
    pages = Pages(
        tables={x.component: table.empty(x.count, batch, x.columns) for x in paging.pages},
        owner=jnp.zeros((batch, 2), jnp.uint32),
        paging=paging,
    )
    return cache.with_leaves(pools).replace(capacity=paging.capacity, pages=pages)


def pages_for(page: PageSpec, length: jax.Array | int) -> jax.Array:
    """As `PageSpec.pages_for`, for traced lengths."""
    return -(-page.contract.count(jnp.asarray(length, jnp.int32)) // page.entries)


# -- what a request does with its row ------------------------------------------------------------


def reserve(
    cache: Cache, row: jax.Array, tokens: jax.Array, owner: jax.Array
) -> tuple[Cache, jax.Array]:
    """Gives a row the pages that `tokens` tokens need in every component, beyond what it holds.

    Reserving all that a request can come to need makes sure that decoding never runs out.
    owner: u32[2], a digest of the request, not 0, and another one than that of any other row.
    Returns the cache and u32 flags.
    """
    pages = cache.pages
    flags = flag_owner(pages, row, owner)
    flags |= jnp.where((tokens < 0) | (tokens > cache.capacity), jnp.uint32(table.BAD_RANGE), 0)
    tokens = jnp.clip(tokens, 0, cache.capacity)

    def run(name: str, old: PageTable, enable: bool | jax.Array):
        ids = old.table.at[row].get(mode="fill", fill_value=old.size)
        held = jnp.sum(old.valid(ids), dtype=jnp.int32)
        more = jnp.maximum(pages_for(pages.paging.page(name), tokens) - held, 0)
        return table.alloc(old, row, held, more, owner, enable)

    tables, flags = all_or_nothing(pages, run, flags)
    return owned(cache, tables, row, owner, flags), flags


def release(
    spec: CacheSpec, cache: Cache, row: jax.Array, poison: bool = False
) -> tuple[Cache, jax.Array]:
    """A row gives up all its pages and starts over at length 0.

    With `poison` (static), rows of pages that become free are NaN. Releasing a row that has no
    owner is flagged NOT_HELD.
    """
    pages = cache.pages
    own = pages.owner.at[index_of(row, cache.batch)].get(mode="fill", fill_value=0)
    flags = jnp.where(jnp.any(own != 0), jnp.uint32(0), jnp.uint32(table.NOT_HELD))
    freed: dict[str, jax.Array] = {}

    def run(name: str, old: PageTable, enable: bool | jax.Array):
        new, found, freed[name] = table.release(old, row, 0, enable)
        ids = old.table.at[index_of(row, cache.batch)].get(mode="fill", fill_value=old.size)
        none = ~jnp.any(old.valid(ids))  # a component may need no page at this length
        return new, jnp.where(none, found & ~jnp.uint32(table.NOT_HELD), found)

    tables, flags = all_or_nothing(pages, run, flags)
    index = jnp.where(flags == 0, index_of(row, cache.batch), cache.batch)
    cache = state.reset_row(spec, cache, index).replace(
        pages=pages.replace(
            tables=tables, owner=pages.owner.at[index].set(jnp.uint32(0), mode="drop")
        )
    )
    return (poisoned(spec, cache, freed) if poison else cache), flags


def seal(
    spec: CacheSpec,
    cache: Cache,
    row: jax.Array,
    keys: Keys | None = None,
    tokens: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Completes the pages of a row that its length has filled, with checksums of their bytes.

    keys: new owners of pages, say the short keys of the prefixes they end; None: the request's.
    tokens: only the pages that so many have filled; None: the row's length.
    """
    pages = cache.pages
    index = index_of(row, cache.batch)
    own = pages.owner.at[index].get(mode="fill", fill_value=0)
    length = cache.length.at[index].get(mode="fill", fill_value=0)
    length = length if tokens is None else jnp.minimum(length, tokens)

    def run(name: str, old: PageTable, enable: bool | jax.Array):
        page = pages.paging.page(name)
        ids = old.table.at[index].get(mode="fill", fill_value=old.size)
        filled = page.contract.count(length) // page.entries
        open_ = old.column("form", ids) == table.WRITING
        first = jnp.where(jnp.any(open_), jnp.argmax(open_), filled)
        sums = some_checksums(spec, cache, name, ids, first, filled)
        some = None if keys is None else keys[name]
        return table.seal(old, row, own, filled, page.entries, sums, some, enable)

    tables, flags = all_or_nothing(pages, run, jnp.uint32(0))
    return cache.replace(pages=pages.replace(tables=tables)), flags


def share_prefix(
    spec: CacheSpec,
    cache: Cache,
    source: jax.Array,
    row: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    owner: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Row `row`, which has no pages, gets the History of the first `length` tokens of `source`.

    Whole pages, which must be sealed, are shared; the entries beyond the last whole page are copied
    into a page of the row's own. Reserves pages for `tokens` tokens. The row then stands at
    `length` with the evidence of its History; its windows and tails are not there yet and vouch for
    nothing until a checkpoint or a replay brings them. Returns the cache and u32 flags.
    """
    pages = cache.pages
    have = cache.length.at[index_of(source, cache.batch)].get(mode="fill", fill_value=0)
    flags = flag_owner(pages, row, owner)
    bad = (length < 0) | (length > tokens) | (length > have) | (tokens > cache.capacity)
    flags |= jnp.where(bad, jnp.uint32(table.BAD_RANGE), 0)
    flags |= jnp.where(source == row, jnp.uint32(table.BAD_ROW), 0)
    held = pages.owner.at[index_of(row, cache.batch)].get(mode="fill", fill_value=0)
    flags |= jnp.where(jnp.any(held != 0), jnp.uint32(table.OCCUPIED), 0)
    length, tokens = (jnp.clip(x, 0, cache.capacity) for x in (length, tokens))
    copies: dict[str, tuple[jax.Array, jax.Array]] = {}

    def run(name: str, old: PageTable, enable: bool | jax.Array):
        page = pages.paging.page(name)
        ids = old.table.at[index_of(source, cache.batch)].get(mode="fill", fill_value=old.size)
        entries = page.contract.count(length)
        whole, rest = entries // page.entries, entries % page.entries
        new, found = table.share(old, row, 0, ids, whole, old.column("generation", ids), enable)
        # Of a dry run the table is the old one, whose columns are free all the same.
        more = jnp.maximum(pages_for(page, tokens) - whole, 0)
        new, others = table.alloc(new, row, whole, more, owner, enable)
        mine = new.table.at[index_of(row, cache.batch), whole].get(mode="fill", fill_value=old.size)
        theirs = ids.at[whole].get(mode="fill", fill_value=old.size)
        form = old.column("form", theirs)
        fine = (form == table.WRITING) | (form == table.COMPLETE)
        fine &= old.column("count", theirs) >= rest
        found |= jnp.where((rest > 0) & ~fine, jnp.uint32(table.NOT_COMPLETE), 0)
        mine = jnp.where((rest > 0) & enable, mine, old.size)
        copies[name] = theirs, mine
        return new._replace(count=new.count.at[mine].set(rest, mode="drop")), found | others

    tables, flags = all_or_nothing(pages, run, flags)
    done = flags == 0
    index = jnp.where(done, index_of(row, cache.batch), cache.batch)
    cache = state.reset_row(spec, cache, index)
    changed = {}
    for slot in spec.slots():
        contract = slot.leaf.contract
        if isinstance(contract, History):
            theirs, mine = copies[slot.leaf.component]
            pool = cache.leaf(slot)
            values = pool.at[:, theirs].get(mode="fill", fill_value=0)
            changed[slot] = pool.at[:, mine].set(values, mode="drop")
        elif isinstance(contract, Evidence) and contract.kind == "count":
            of = dict(spec.segments[slot.segment].layers[slot.layer].leaves)[contract.of]
            counter = cache.leaf(slot)
            changed[slot] = counter.at[:, index].set(of.contract.count(length), mode="drop")
    cache = cache.with_leaves(changed).replace(
        length=cache.length.at[index].set(length, mode="drop")
    )
    return owned(cache, tables, row, owner, flags), flags


def ledgers(cache: Cache) -> dict[str, table.Ledger]:
    """The books of every component; with all `exact`, free + owned + shared == P in each."""
    return {name: table.ledger(x) for name, x in cache.pages.tables.items()}


# -- bytes -----------------------------------------------------------------------------------------


def checksums(spec: CacheSpec, cache: Cache, component: str, ids: jax.Array) -> jax.Array:
    """u32[k]: checksums of the pages i32[k] `ids` of a component, all its layers together."""
    total = jnp.zeros(ids.shape, jnp.uint32)
    for part, slot in enumerate(history_slots(spec)[component]):
        total += page_copy.verify(cache.leaf(slot), ids, salt=part << 16).sums
    return total


def some_checksums(
    spec: CacheSpec,
    cache: Cache,
    component: str,
    ids: jax.Array,
    first: int | jax.Array,
    stop: jax.Array,
) -> jax.Array:
    """u32[n]: `checksums` of the pages in columns `first .. stop - 1` of i32[n] `ids`, else 0.

    Reads only these pages; how many they are is not compiled in.
    """
    stop = jnp.clip(stop, 0, ids.size)

    def body(i: jax.Array, sums: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(ids, i, 1)
        return sums.at[i].set(checksums(spec, cache, component, one)[0])

    return jax.lax.fori_loop(first, stop, body, jnp.zeros(ids.shape, jnp.uint32))


def poisoned(spec: CacheSpec, cache: Cache, freed: dict[str, jax.Array]) -> Cache:
    """Rows of pages bool[P] that have become free are NaN (rule 6)."""
    changed = {}
    for name, slots in history_slots(spec).items():
        for slot in slots:
            pool = cache.leaf(slot)
            if (fill := slot.leaf.poison) is not None:
                gone = freed[name].reshape(1, -1, *[1] * (pool.ndim - 2))
                changed[slot] = jnp.where(gone, jnp.asarray(fill, pool.dtype), pool)
    return cache.with_leaves(changed)


# -- for other operations of rows ------------------------------------------------------------------


def index_of(row: jax.Array, batch: int) -> jax.Array:
    """The row, or one past the last: a negative index would wrap around."""
    return jnp.where((row >= 0) & (row < batch), row, batch)


def flag_owner(pages: Pages, row: jax.Array, owner: jax.Array) -> jax.Array:
    """The null owner, another than the row has, or one that another row has."""
    rows = pages.owner.shape[0]
    same = jnp.all(pages.owner == owner, axis=-1)
    here = jnp.arange(rows) == row
    bad = ~jnp.any(owner != 0) | jnp.any(same & ~here)
    bad |= jnp.any(here & ~same & jnp.any(pages.owner != 0, axis=-1))
    return jnp.where(bad, jnp.uint32(table.BAD_OWNER), jnp.uint32(0))


def all_or_nothing(pages: Pages, run, flags: jax.Array) -> tuple[dict[str, PageTable], jax.Array]:
    """Runs `run(component, table, enable) -> (table, flags)` for all components, or for none."""
    for name, old in pages.tables.items():
        flags = flags | run(name, old, False)[1]
    return {name: run(name, old, flags == 0)[0] for name, old in pages.tables.items()}, flags


def owned(
    cache: Cache, tables: dict[str, PageTable], row: jax.Array, owner: jax.Array, flags: jax.Array
) -> Cache:
    index = jnp.where(flags == 0, index_of(row, cache.batch), cache.batch)
    owners = cache.pages.owner.at[index].set(owner, mode="drop")
    return cache.replace(pages=cache.pages.replace(tables=tables, owner=owners))
