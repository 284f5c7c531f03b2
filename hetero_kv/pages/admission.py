"""A row's pages from its admission to its end, for a host that keeps books of them (an engine).

`admit` gives them, `settle` ends a copy into them and seals what others may share, `revoke` takes
them back. Each is one compiled call, whatever it finds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state
from hetero_kv.contract import CacheSpec
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages.table import PageTable
from hetero_kv.state import Cache

Array = jax.Array | np.ndarray


class Want(NamedTuple):
    """What a row shall be given; C components in the order of the paging, n columns at most."""

    ids: Array  # i32[C, n], sealed pages to share, by column
    generation: Array  # i32[C, n], theirs as the host knows it
    whole: Array  # i32[C], how many of them
    tokens: Array  # i32[], pages for so many tokens in all
    load: Array  # i32[], the first so many tokens come by a copy: their other pages are LOADING
    owner: Array  # u32[2], a digest of the request


class Given(NamedTuple):
    """What a row was given."""

    flags: jax.Array  # u32[], see table.py; unless 0 nothing was given
    changed: jax.Array  # bool[C, n], pages to share whose bytes are not what was sealed
    ids: jax.Array  # i32[C, n], the size of the pool where there is no page
    generation: jax.Array  # i32[C, n]
    owner: jax.Array  # u32[C, n, 2]


class Settled(NamedTuple):
    """What `settle` did."""

    flags: jax.Array  # u32[]; unless 0 nothing was sealed
    filled: jax.Array  # i32[C], how many leading pages of the row are sealed now
    exact: jax.Array  # i32[], tokens up to which the row's History is exact


def admit(spec: CacheSpec, cache: Cache, row: jax.Array, want: Want) -> tuple[Cache, Given]:
    """Gives a row that has none all its pages, and starts it over at length 0.

    Pages to share are read once and compared with their checksums. One that has changed becomes
    CORRUPT: nothing is given then, and whoever else reads it is refused from now on.
    """
    cache, changed = _verified(spec, cache, want)
    pages = cache.pages
    flags = paged.flag_owner(pages, row, want.owner)
    held = pages.owner.at[paged.index_of(row, cache.batch)].get(mode="fill", fill_value=0)
    flags |= jnp.where(jnp.any(held != 0), jnp.uint32(table.OCCUPIED), 0)
    bad = (want.tokens < 0) | (want.tokens > cache.capacity) | (want.load > want.tokens)
    flags |= jnp.where(bad, jnp.uint32(table.BAD_RANGE), 0)
    tokens, load = (jnp.clip(x, 0, cache.capacity) for x in (want.tokens, want.load))
    numbers = {x.component: c for c, x in enumerate(pages.paging.pages)}

    def run(name: str, old: PageTable, enable: bool | jax.Array):
        c, page = numbers[name], pages.paging.page(name)
        whole, n = want.whole[c], old.table.shape[1]
        new, found = table.share(
            old, row, 0, want.ids[c, :n], whole, want.generation[c, :n], enable
        )
        more = jnp.maximum(paged.pages_for(page, tokens) - whole, 0)
        loading = paged.pages_for(page, load)
        new, others = table.alloc(new, row, whole, more, want.owner, enable, loading)
        return new, found | others

    tables, flags = paged.all_or_nothing(pages, run, flags)
    index = jnp.where(flags == 0, paged.index_of(row, cache.batch), cache.batch)
    cache = state.reset_row(spec, cache, index)
    cache = paged.owned(cache, tables, row, want.owner, flags)
    return cache, _given(cache, row, flags, changed)


def settle(
    spec: CacheSpec,
    cache: Cache,
    row: jax.Array,
    keys: jax.Array,
    restored: jax.Array,
    tokens: jax.Array,
) -> tuple[Cache, Settled]:
    """Ends the copy into a row's pages, if there was one, and seals those that are exact.

    Exact is what was restored, and what prefill calls on the chunk grid have computed after it.

    Args:
        keys: u32[C, n, 2], the owner that each page has once it is sealed.
        restored: i32[], tokens whose History was copied into the row.
        tokens: i32[], seal nothing beyond them (they have no keys).
    """
    pages, names = cache.pages, [x.component for x in cache.pages.paging.pages]
    index = paged.index_of(row, cache.batch)
    own = pages.owner.at[index].get(mode="fill", fill_value=0)
    tables = {name: table.end_load(x, row, own) for name, x in pages.tables.items()}
    cache = cache.replace(pages=pages.replace(tables=tables))
    length, grid = (
        x.at[index].get(mode="fill", fill_value=0) for x in (cache.length, cache.grid_length)
    )
    exact = jnp.minimum(length, jnp.maximum(restored, grid))
    upto = jnp.minimum(exact, tokens)
    columns = [cache.pages.tables[name].table.shape[1] for name in names]
    owners = {name: keys[c, : columns[c]] for c, name in enumerate(names)}
    cache, flags = paged.seal(spec, cache, row, owners, upto)
    filled = [
        cache.pages.paging.page(name).contract.count(upto) // cache.pages.paging.page(name).entries
        for name in names
    ]
    filled = jnp.stack(filled) if filled else jnp.zeros(0, jnp.int32)
    return cache, Settled(flags, jnp.where(flags == 0, filled, 0), exact)


def fail_load(cache: Cache, row: jax.Array) -> Cache:
    """The copy into a row's pages has failed: they are CORRUPT until they are revoked."""
    pages = cache.pages
    own = pages.owner.at[paged.index_of(row, cache.batch)].get(mode="fill", fill_value=0)
    tables = {name: table.end_load(x, row, own, False) for name, x in pages.tables.items()}
    return cache.replace(pages=pages.replace(tables=tables))


def revoke(
    spec: CacheSpec,
    cache: Cache,
    row: jax.Array,
    ids: jax.Array,
    left: jax.Array,
    poison: bool = False,
) -> Cache:
    """Takes all pages from a row by the host's books, see `table.revoke`; it starts over.

    ids, left: i32[C, n]. With `poison` (static), rows of pages that become free are NaN.
    """
    pages, tables, freed = cache.pages, {}, {}
    for c, page in enumerate(pages.paging.pages):
        old, n = pages.tables[page.component], page.columns
        tables[page.component], freed[page.component] = table.revoke(
            old, row, ids[c, :n], left[c, :n]
        )
    index = paged.index_of(row, cache.batch)
    owner = pages.owner.at[index].set(jnp.uint32(0), mode="drop")
    cache = state.reset_row(spec, cache, index)
    cache = cache.replace(pages=pages.replace(tables=tables, owner=owner))
    return paged.poisoned(spec, cache, freed) if poison else cache


class Some(NamedTuple):
    """Some pages of each component; C components in the order of the paging, n at most."""

    ids: Array  # i32[C, n]
    generation: Array  # i32[C, n], theirs as the host knows it
    count: Array  # i32[C], how many of them


def keep(cache: Cache, some: Some) -> tuple[Cache, jax.Array]:
    """Pins sealed pages, so that they outlive the rows that hold them; u32[C] flags."""
    tables, flags = {}, []
    for c, page in enumerate(cache.pages.paging.pages):
        old = cache.pages.tables[page.component]
        about = some.ids[c], some.count[c], some.generation[c]
        tables[page.component], found = table.pin(old, *about)
        flags.append(found)
    flags = jnp.stack(flags) if flags else jnp.zeros(0, jnp.uint32)
    return cache.replace(pages=cache.pages.replace(tables=tables)), flags


def drop(spec: CacheSpec, cache: Cache, ids: jax.Array, poison: bool = False) -> Cache:
    """Kept pages i32[C, n] that no row holds become free, see `table.unkeep`."""
    tables, freed = {}, {}
    for c, page in enumerate(cache.pages.paging.pages):
        name = page.component
        tables[name], freed[name] = table.unkeep(cache.pages.tables[name], ids[c])
    cache = cache.replace(pages=cache.pages.replace(tables=tables))
    return paged.poisoned(spec, cache, freed) if poison else cache


def most_columns(cache: Cache) -> int:
    """n: the block tables of all components are given as wide as the widest."""
    return max((x.columns for x in cache.pages.paging.pages), default=0)


def _verified(spec: CacheSpec, cache: Cache, want: Want) -> tuple[Cache, jax.Array]:
    tables, changed = {}, []
    for c, page in enumerate(cache.pages.paging.pages):
        pages, n = cache.pages.tables[page.component], page.columns
        ids = want.ids[c, :n]
        sums = paged.some_checksums(spec, cache, page.component, ids, 0, want.whole[c])
        wrong = jnp.arange(n, dtype=jnp.int32) < want.whole[c]
        wrong &= pages.valid(ids) & (pages.column("form", ids) == table.COMPLETE)
        wrong &= pages.column("generation", ids) == want.generation[c, :n]
        wrong &= pages.column("checksum", ids) != sums
        tables[page.component] = table.condemn(pages, ids, wrong)
        changed.append(_padded(wrong, most_columns(cache)))
    cache = cache.replace(pages=cache.pages.replace(tables=tables))
    return cache, jnp.stack(changed) if changed else jnp.zeros((0, 0), bool)


def _given(cache: Cache, row: jax.Array, flags: jax.Array, changed: jax.Array) -> Given:
    found: list[tuple] = []
    most = most_columns(cache)
    for page in cache.pages.paging.pages:
        pages = cache.pages.tables[page.component]
        ids = pages.table.at[paged.index_of(row, cache.batch)].get(
            mode="fill", fill_value=pages.size
        )
        fields = ids, pages.column("generation", ids), pages.column("owner", ids)
        fills = pages.size, 0, 0
        found.append(tuple(_padded(x, most, f) for x, f in zip(fields, fills, strict=True)))
    if not found:
        none = jnp.zeros((0, 0), jnp.int32)
        return Given(flags, changed, none, none, jnp.zeros((0, 0, 2), jnp.uint32))
    return Given(flags, changed, *(jnp.stack(x) for x in zip(*found, strict=True)))


def _padded(value: jax.Array, columns: int, fill: int = 0) -> jax.Array:
    widths = ((0, columns - value.shape[0]), *((0, 0),) * (value.ndim - 1))
    return jnp.pad(value, widths, constant_values=fill)
