"""Between contiguous caches and pages, in numpy, so that the tests of one serve the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state
from hetero_kv.contract import CacheSpec, History
from hetero_kv.pages import cache as paged
from hetero_kv.pages.layout import Paging
from hetero_kv.state import Cache


def owner(number: int) -> np.ndarray:
    """The digest of request `number` >= 1."""
    return np.array([number, ~number & 0xFFFF], np.uint32)


def contiguous(spec: CacheSpec, cache: Cache) -> Cache:
    """The same state without pages; entries of columns without a page are NaN, or 0."""
    leaves = {}
    blank = state.abstract(spec, cache.batch, cache.capacity)
    for slot in spec.slots():
        value = np.asarray(cache.leaf(slot))
        if isinstance(slot.leaf.contract, History):
            pages = cache.pages.tables[slot.leaf.component]
            none = np.full_like(value[:, :1], np.nan if value.dtype.kind in "fV" else 0)
            rows = np.concatenate([value, none], axis=1)[:, np.asarray(pages.safe(pages.table))]
            rows = rows.reshape(*rows.shape[:2], -1, *slot.leaf.width)
            value = rows[:, :, : slot.leaf.row_count(cache.capacity)]
        leaves[slot] = jnp.asarray(value)
    blank = blank.with_leaves(leaves)
    return blank.replace(length=cache.length, grid_length=cache.grid_length)


def into_pages(
    spec: CacheSpec, cache: Cache, paging: Paging, rows: tuple[int, ...], poison: bool = True
) -> Cache:
    """Pages with the state of a contiguous cache; rows get pages in this order, owners row + 1."""
    made = paged.init(spec, cache.batch, paging, poison)
    for row in rows:
        made, flags = reserve(made, row, cache.capacity, owner(row + 1))
        assert int(flags) == 0
    leaves, tables = {}, dict(made.pages.tables)
    for slot in spec.slots():
        value = np.asarray(cache.leaf(slot))
        if isinstance(slot.leaf.contract, History):
            page, pages = paging.page(slot.leaf.component), tables[slot.leaf.component]
            pool, table = np.array(made.leaf(slot)), np.asarray(pages.table)
            count = np.array(pages.count)
            for row in rows:
                written = int(page.contract.count(int(cache.length[row])))
                for i in range(written):
                    pool[:, table[row, i // page.entries], i % page.entries] = value[:, row, i]
                for column in range(page.pages_for(int(cache.length[row]))):
                    held = min(page.entries, written - column * page.entries)
                    count[table[row, column]] = held
            tables[slot.leaf.component] = pages._replace(count=jnp.asarray(count))
            value = pool
        leaves[slot] = jnp.asarray(value)
    made = made.with_leaves(leaves).replace(pages=made.pages.replace(tables=tables))
    return made.replace(length=cache.length, grid_length=cache.grid_length)


@functools.cache
def _reserve():
    return jax.jit(paged.reserve)


def reserve(cache: Cache, row: int, tokens: int, digest: np.ndarray) -> tuple[Cache, jax.Array]:
    """`pages.cache.reserve`, compiled."""
    return _reserve()(cache, np.int32(row), np.int32(tokens), digest)
