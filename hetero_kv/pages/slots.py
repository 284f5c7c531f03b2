"""One row of a cache, contiguous or in pages, as a cache of batch 1; traceable."""

import jax

from hetero_kv import state
from hetero_kv.contract import CacheSpec, History, LeafSlot
from hetero_kv.pages import entries
from hetero_kv.state import Cache


def cut(spec: CacheSpec, cache: Cache, row: jax.Array) -> Cache:
    """The row for a call of batch 1: its slot by copy, its pages where they are.

    The pools of a paged cache are those of all rows, so that `paste` moves no History.
    """
    if cache.pages is None:
        return state.take_row(cache, row)
    pools = _pools(spec, cache)
    one = state.take_row(_without(cache, pools), row).with_leaves(pools)
    pages = cache.pages
    tables = {
        name: x._replace(table=jax.lax.dynamic_slice_in_dim(x.table, row, 1))
        for name, x in pages.tables.items()
    }
    owner = jax.lax.dynamic_slice_in_dim(pages.owner, row, 1)
    return one.replace(pages=pages.replace(tables=tables, owner=owner))


def paste(spec: CacheSpec, cache: Cache, row: jax.Array, one: Cache) -> Cache:
    """The cache after a call on what `cut` gave."""
    if cache.pages is None:
        return state.put_row(cache, row, one)
    pools = _pools(spec, one)
    base = state.put_row(_without(cache, pools), row, _without(one, pools))
    tables = {
        # A call writes entries and counts; the block tables stay as they are.
        name: x._replace(table=cache.pages.tables[name].table)
        for name, x in one.pages.tables.items()
    }
    return base.with_leaves(pools).replace(pages=cache.pages.replace(tables=tables))


def take(spec: CacheSpec, cache: Cache, row: jax.Array) -> Cache:
    """A contiguous copy of the row; entries that have no page are NaN."""
    one = cut(spec, cache, row)
    if cache.pages is None:
        return one
    found = {}
    for slot in _pools(spec, cache):
        fill = slot.leaf.poison or 0
        size = slot.leaf.row_count(cache.capacity)
        found[slot] = entries.read(cache, slot, row, 0, size, fill)[:, None]
    return one.with_leaves(found).replace(pages=None)


def put(spec: CacheSpec, cache: Cache, row: jax.Array, one: Cache) -> Cache:
    """The cache with what `take` gave in a row, as far as the row's own open pages go.

    Sealed pages that it shares have their entries already.
    """
    if cache.pages is None:
        return state.put_row(cache, row, one)
    length, pools = one.length[0], _pools(spec, cache)
    changed = {
        slot: entries.write(
            cache, slot, row, one.leaf(slot)[:, 0], slot.leaf.contract.count(length)
        )
        for slot in pools
    }
    base = state.put_row(_without(cache, pools), row, _without(one, pools))
    pages = entries.counted(cache, row, length).pages
    return base.with_leaves(changed).replace(pages=pages)


def poison(spec: CacheSpec, cache: Cache, row: jax.Array) -> Cache:
    """The row as it was at the start, with NaN in it; its pages are left alone."""
    one = state.init(spec, 1, cache.capacity, True)
    if cache.pages is None:
        return state.put_row(cache, row, one)
    pools = _pools(spec, cache)
    base = state.put_row(_without(cache, pools), row, _without(one, pools))
    return base.with_leaves(pools).replace(pages=cache.pages)


def _pools(spec: CacheSpec, cache: Cache) -> dict[LeafSlot, jax.Array]:
    return {x: cache.leaf(x) for x in spec.slots() if isinstance(x.leaf.contract, History)}


def _without(cache: Cache, pools: dict[LeafSlot, jax.Array]) -> Cache:
    """The cache with nothing in place of its History, so that what concerns slots can be mapped."""
    layers = [[dict(layer) for layer in segment] for segment in cache.layers]
    for slot in pools:
        layers[slot.segment][slot.layer][slot.name] = None
    return cache.replace(layers=tuple(tuple(x) for x in layers), pages=None)
