"""Entries to and from the pages of one row, by copy; traceable.

They go only into pages that the row may write; sealed pages that it shares hold their entries
already and stay as they are.
"""

import jax
import jax.numpy as jnp

from hetero_kv.contract import LeafSlot
from hetero_kv.pages import table
from hetero_kv.pages.cache import pages_for
from hetero_kv.state import Cache


def takes(cache: Cache, row: jax.Array, length: jax.Array) -> jax.Array:
    """bool[]: whether the pages of a row can hold the History of `length` tokens.

    Each page must be the row's own to write, or sealed with the entries in it.
    """
    ok = (length >= 0) & (length <= cache.capacity)
    for name, pages in cache.pages.tables.items():
        page = cache.pages.paging.page(name)
        column = jnp.arange(page.columns, dtype=jnp.int32)
        held = jnp.clip(page.contract.count(length) - column * page.entries, 0, page.entries)
        ids = pages.table[row]
        full = pages.column("form", ids) == table.COMPLETE
        full &= pages.column("count", ids) >= held
        mine = table.writable(pages, cache.pages.owner, loads=True)[row] < pages.size
        ok &= jnp.all(full | mine | (column >= pages_for(page, length)))
    return ok


def read(
    cache: Cache,
    slot: LeafSlot,
    row: jax.Array,
    start: jax.Array | int,
    size: int,
    fill: float = 0,
) -> jax.Array:
    """Entries `start .. start + size - 1` of a row: [repeats, size, *width]; `fill`: no page."""
    pages = cache.pages.tables[slot.leaf.component]
    entries = cache.pages.paging.page(slot.leaf.component).entries
    index = start + jnp.arange(size, dtype=jnp.int32)
    ids = pages.safe(pages.table[row].at[index // entries].get(mode="fill", fill_value=-1))
    return cache.leaf(slot).at[:, ids, index % entries].get(mode="fill", fill_value=fill)


def write(
    cache: Cache, slot: LeafSlot, row: jax.Array, values: jax.Array, count: jax.Array
) -> jax.Array:
    """The leaf with the first `count` of entries [repeats, n, *width] in the row's pages."""
    pages = cache.pages.tables[slot.leaf.component]
    entries = cache.pages.paging.page(slot.leaf.component).entries
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    may = table.writable(pages, cache.pages.owner, loads=True)[row]
    ids = pages.safe(may.at[index // entries].get(mode="fill", fill_value=-1))
    ids = jnp.where(index < count, ids, pages.size)
    return cache.leaf(slot).at[:, ids, index % entries].set(values, mode="drop")


def counted(cache: Cache, row: jax.Array, length: jax.Array) -> Cache:
    """The row's own open pages hold what `length` tokens leave in them."""
    tables = {}
    for name, pages in cache.pages.tables.items():
        page = cache.pages.paging.page(name)
        column = jnp.arange(page.columns, dtype=jnp.int32)
        held = jnp.clip(page.contract.count(length) - column * page.entries, 0, page.entries)
        ids = table.writable(pages, cache.pages.owner, loads=True)[row]
        tables[name] = pages._replace(count=pages.count.at[ids].set(held, mode="drop"))
    return cache.replace(pages=cache.pages.replace(tables=tables))
