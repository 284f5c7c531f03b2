"""Which page and which place every entry of a call goes to, for kernels that store entries.

Entries are handled in tiles: `tile` neighbouring entries of one page, on a grid of tiles from entry
0, so that a tile never spans two pages. Everything here is a few integers per tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.attention.rope import table
from hetero_kv.kernels.compressor.reference import Pooling


class Plan(NamedTuple):
    """Of R rows with n tiles each."""

    first: jax.Array  # i32[R, n], the first entry of the tile
    low: jax.Array  # i32[R, n], the first place in the tile that is written
    high: jax.Array  # i32[R, n], one past the last; low = high: nothing
    page: jax.Array  # i32[R, n], P: nothing
    place: jax.Array  # i32[R, n], of the tile in its page, in entries


def pages(pool: Pool) -> jax.Array:
    """The pool's array as pages [L, P, e, w]; a contiguous pool has a page per row."""
    return pool.pages if isinstance(pool, Paged) else pool


def plan(
    how: Pooling, pool: Pool, start: jax.Array, count: jax.Array, size: int, tile: int
) -> Plan:
    """The tiles that a call of `size` tokens at most touches, from i32[R] `start` on.

    tile: entries, a divisor of the entries of a page.
    """
    rows, entries = start.shape[0], pages(pool).shape[2]
    many = pages(pool).shape[1]
    write = pool.write if isinstance(pool, Paged) else jnp.arange(rows, dtype=jnp.int32)[:, None]
    begin, end = start // how.ratio, (start + count) // how.ratio
    tiles = -(-(how.most(size) - 1) // tile) + 1
    first = (begin // tile * tile)[:, None] + tile * jnp.arange(tiles, dtype=jnp.int32)
    page = jnp.take_along_axis(write, first // entries, axis=1, mode="fill", fill_value=many)
    page = jnp.where((page >= 0) & (page < many), page, many)
    low = jnp.clip(begin[:, None] - first, 0, tile)
    high = jnp.clip(end[:, None] - first, 0, tile)
    high = jnp.where(page < many, jnp.maximum(high, low), low)
    return Plan(first, low, high, page, first % entries)


def turns(how: Pooling, first: jax.Array, tile: int, lanes: int) -> tuple[jax.Array, jax.Array]:
    """cos and signed sin of every entry of a tile, f32[R, n, tile, lanes].

    They are for the last `lanes` channels of an entry: those before the rotated ones stay as they
    are (cos 1, sin 0).
    """
    index = first[..., None] + jnp.arange(tile, dtype=jnp.int32)
    cos, sin = table(how.rope, index * how.ratio, jnp.dtype(how.dtype))
    front = ((0, 0),) * 3 + ((lanes - how.rope.dim, 0),)
    return jnp.pad(cos, front, constant_values=1.0), jnp.pad(sin, front)
