"""Append-only pools of entries, stacked over layers like the rings: the only access to them.

A pool is an array `[L, R, N, w]`, or `Paged`: pages `[L, P, e, w]` that block tables give to rows.
Both give the same bits: the same tiles in the same order, of which callers mask the same entries.
Either may be `Packed`: rows are then bytes, which are read as floats and written from floats.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv.packing import POISON, Packed


class Paged(NamedTuple):
    """Pages of one component's leaf, and the block tables of the rows.

    Ids outside `0 .. P - 1` are no pages: reading one gives NaN, writing to one is dropped.
    """

    pages: jax.Array  # [L, P, e, w]
    read: jax.Array  # i32[R, n], the page of each row's entries `i * e ..`
    write: jax.Array  # i32[R, n], the same where the row may write


Pool = jax.Array | Paged | Packed


def rows(pool: Pool) -> int:
    """Entries that one row can have."""
    if isinstance(pool, Packed):
        return rows(pool.rows)
    if isinstance(pool, Paged):
        return pool.read.shape[1] * pool.pages.shape[2]
    return pool.shape[2]


def paged(pool: Pool) -> bool:
    """Whether rows lie in pages."""
    return isinstance(pool.rows if isinstance(pool, Packed) else pool, Paged)


def append(
    pool: Pool, layer: int | jax.Array, start: jax.Array, values: jax.Array, count: jax.Array
) -> Pool:
    """Writes the first i32[R] `count` of values [R, n, w] from entry i32[R] `start` on.

    Anything beyond the pool, or beyond `count`, or into a page that the row may not write, is
    dropped at the write index (rule 5).
    """
    if isinstance(pool, Packed):
        new = append(pool.rows, layer, start, pool.packing.pack(values), count)
        return dataclasses.replace(pool, rows=new)
    if isinstance(pool, Paged):
        page, place = _targets(pool, start, values.shape[1], count)
        new = pool.pages.at[layer, page, place].set(values.astype(pool.pages.dtype), mode="drop")
        return pool._replace(pages=new)
    offset = jnp.arange(values.shape[1], dtype=jnp.int32)
    index = jnp.where(offset < count[:, None], start[:, None] + offset, pool.shape[2])
    batch = jnp.arange(pool.shape[1])[:, None]
    return pool.at[layer, batch, index].set(values.astype(pool.dtype), mode="drop")


def landed(pool: Pool, start: jax.Array, size: int, count: jax.Array) -> jax.Array:
    """How many of the i32[R] `count` entries (of `size` at most) `append` really writes."""
    pool = pool.rows if isinstance(pool, Packed) else pool
    if not isinstance(pool, Paged):
        return count
    page, _ = _targets(pool, start, size, count)
    return jnp.sum(page < pool.pages.shape[1], axis=1, dtype=jnp.int32)


def bump(counter: jax.Array, layer: int | jax.Array, count: jax.Array) -> jax.Array:
    """Evidence [L, R]: adds the entries that were really written."""
    return counter.at[layer].add(count)


def tile(pool: Pool, layer: int | jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Tile `index` of one layer: [R, size, w]. The pool holds a whole number of tiles."""
    if isinstance(pool, Packed):
        return pool.packing.unpack(tile(pool.rows, layer, index, size))
    # A pool of one tile is the same whatever the index. XLA would read it in front of a loop over
    # tiles, and there, where the new entry is written as well, copy the pools of all layers.
    index, pool = jax.lax.optimization_barrier((index, pool))
    if isinstance(pool, Paged):
        return _paged_tile(pool, layer, index, size)
    start = (layer, 0, index * size, 0)
    sizes = (1, pool.shape[1], size, pool.shape[3])
    return jax.lax.dynamic_slice(pool, start, sizes)[0]


def gather(pool: Pool, layer: int | jax.Array, index: jax.Array) -> jax.Array:
    """Rows i32[R, k] of one layer: [R, k, w]. Indices must be within the pool."""
    if isinstance(pool, Packed):
        return pool.packing.unpack(gather(pool.rows, layer, index))
    if isinstance(pool, Paged):
        size = pool.pages.shape[2]
        page = jnp.take_along_axis(pool.read, index // size, axis=1, mode="fill", fill_value=-1)
        return pool.pages.at[layer, _safe(pool, page), index % size].get(
            mode="fill", fill_value=_nothing(pool)
        )
    batch = jnp.arange(pool.shape[1])[:, None]
    return pool.at[layer, batch, index].get(mode="promise_in_bounds")


def _targets(
    pool: Paged, start: jax.Array, size: int, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Page and place, i32[R, size] each, of the entries to write; page P: none."""
    offset = jnp.arange(size, dtype=jnp.int32)
    index = start[:, None] + offset
    entries = pool.pages.shape[2]
    column = jnp.where(offset < count[:, None], index // entries, pool.write.shape[1])
    page = jnp.take_along_axis(pool.write, column, axis=1, mode="fill", fill_value=-1)
    return _safe(pool, page), index % entries


def _paged_tile(pool: Paged, layer: int | jax.Array, index: jax.Array, size: int) -> jax.Array:
    """A tile is some pages, or a part of one; with other sizes it is gathered row by row."""
    entries, batch = pool.pages.shape[2], pool.read.shape[0]
    if size % entries and entries % size:
        place = index * size + jnp.arange(size, dtype=jnp.int32)
        return gather(pool, layer, jnp.broadcast_to(place, (batch, size)))
    many, step = max(1, size // entries), min(size, entries)
    ids = jax.lax.dynamic_slice_in_dim(pool.read, index * size // entries, many, axis=1)
    ids, offset = _safe(pool, ids), index * size % entries
    if step == entries:
        found = pool.pages.at[layer, ids].get(mode="fill", fill_value=_nothing(pool))
    else:
        place = offset + jnp.arange(step, dtype=jnp.int32)
        found = pool.pages.at[layer, ids, place].get(mode="fill", fill_value=_nothing(pool))
    return found.reshape(batch, size, -1)


def _safe(pool: Paged, ids: jax.Array) -> jax.Array:
    """Ids, with everything that is no page replaced by P: negative ones would wrap around."""
    size = pool.pages.shape[1]
    return jnp.where((ids >= 0) & (ids < size), ids, size)


def _nothing(pool: Paged) -> float:
    """What is read of a page that is not there."""
    if pool.pages.dtype == jnp.uint8:
        return POISON
    return math.nan if jnp.issubdtype(pool.pages.dtype, jnp.floating) else 0
