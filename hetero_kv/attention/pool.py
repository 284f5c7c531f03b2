"""Append-only pools of entries, `[L, R, N, w]`, stacked over layers like the rings."""

import jax
import jax.numpy as jnp


def append(
    pool: jax.Array, layer: int | jax.Array, start: jax.Array, values: jax.Array, count: jax.Array
) -> jax.Array:
    """Writes the first i32[R] `count` of values [R, n, w] from entry i32[R] `start` on.

    Anything beyond the pool, or beyond `count`, is dropped at the write index (rule 5).
    """
    offset = jnp.arange(values.shape[1], dtype=jnp.int32)
    index = jnp.where(offset < count[:, None], start[:, None] + offset, pool.shape[2])
    batch = jnp.arange(pool.shape[1])[:, None]
    return pool.at[layer, batch, index].set(values.astype(pool.dtype), mode="drop")


def bump(counter: jax.Array, layer: int | jax.Array, count: jax.Array) -> jax.Array:
    """Evidence [L, R]: adds the entries that were really written."""
    return counter.at[layer].add(count)


def tile(pool: jax.Array, layer: int | jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Tile `index` of one layer: [R, size, w]. The pool holds a whole number of tiles."""
    start = (layer, 0, index * size, 0)
    sizes = (1, pool.shape[1], size, pool.shape[3])
    return jax.lax.dynamic_slice(pool, start, sizes)[0]


def gather(pool: jax.Array, layer: int | jax.Array, index: jax.Array) -> jax.Array:
    """Rows i32[R, k] of one layer: [R, k, w]. Indices must be within the pool."""
    batch = jnp.arange(pool.shape[1])[:, None]
    return pool.at[layer, batch, index].get(mode="promise_in_bounds")
