"""Where two rows of equal length differ, leaf by leaf: what audits compare."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv import validate
from hetero_kv.contract import CacheSpec, LeafSlot
from hetero_kv.state import Cache


class Difference(NamedTuple):
    """Per stacked leaf, between two rows of equal length."""

    error: jax.Array  # f32[], the largest; inf where one is not a number
    row: jax.Array  # i32[], the first that differs by more than the floor, or -1
    repeat: jax.Array  # i32[], in which layer of the stack


def differ(
    spec: CacheSpec, slots: list[LeafSlot], one: Cache, two: Cache, floor: jax.Array
) -> list[Difference]:
    """Where two contiguous caches of batch 1 differ on live rows, per leaf; traceable.

    An error above f32[] `floor` counts; with 0 the comparison is bitwise.
    """
    found = []
    for slot in slots:
        error = _error(slot, one.leaf(slot)[:, 0], two.leaf(slot)[:, 0])  # [repeats, rows, *width]
        about = validate.owner(spec, slot).leaf
        if slot.leaf.row_count(one.capacity):
            live = about.live_rows(one.length[0], one.capacity)
            live = live.reshape(1, -1, *[1] * (error.ndim - 2))
            error = jnp.where(live, error, 0.0)
            error = jnp.max(error, axis=tuple(range(2, error.ndim)))
        else:
            error = jnp.max(error.reshape(error.shape[0], 1, -1), axis=-1)
        above = jnp.any(error > floor, axis=0)
        row = jnp.where(jnp.any(above), jnp.argmax(above), -1).astype(jnp.int32)
        repeat = jnp.argmax(error[:, row] > floor).astype(jnp.int32)
        found.append(Difference(jnp.max(error), row, repeat))
    return found


def _error(slot: LeafSlot, a: jax.Array, b: jax.Array) -> jax.Array:
    """f32, 0 only where the bits are equal; inf where one is not a number."""
    if slot.leaf.packing is None:
        return _of_numbers(a, b)
    # Of rows as they are read; that of a row whose bytes alone differ is the least there is.
    least = jnp.where(jnp.any(a != b, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny, 0.0)
    return jnp.maximum(_of_numbers(slot.leaf.numbers(a), slot.leaf.numbers(b)), least)


def _of_numbers(a: jax.Array, b: jax.Array) -> jax.Array:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)) + (a != b)
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    same = jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)
    error = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    least = jnp.finfo(jnp.float32).tiny  # 0.0 and -0.0 differ too
    return jnp.where(same & finite, 0.0, jnp.where(same, jnp.inf, jnp.maximum(error, least)))
