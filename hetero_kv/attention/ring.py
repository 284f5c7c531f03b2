"""Rings over positions: row `p % rows` holds position p. Nothing is ever cleared.

Arrays are stacked over layers, `[L, R, rows, ...]`, and updated in place at one `layer`, so that a
scan over layers carries them without a copy. Lengths and positions are absolute, in tokens. A ring
may be `Packed`: its rows are then bytes, which are read as floats and written from floats.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.packing import Packed

Ring = jax.Array | Packed


def size(ring: Ring) -> int:
    """Rows of a sequence."""
    return (ring.rows if isinstance(ring, Packed) else ring).shape[2]


def read(ring: Ring, layer: int | jax.Array) -> jax.Array:
    """One layer: [R, rows, ...]."""
    if isinstance(ring, Packed):
        return ring.packing.unpack(read(ring.rows, layer))
    return jax.lax.dynamic_index_in_dim(ring, layer, 0, keepdims=False)


def write_one(
    ring: Ring, layer: int | jax.Array, position: jax.Array, value: jax.Array, keep: jax.Array
) -> Ring:
    """Writes value [R, ...] at i32[R] positions; rows with keep = False write nothing."""
    if isinstance(ring, Packed):
        new = write_one(ring.rows, layer, position, ring.packing.pack(value), keep)
        return dataclasses.replace(ring, rows=new)
    rows = ring.shape[2]
    slot = jnp.where(keep, position % rows, rows)
    batch = jnp.arange(ring.shape[1])
    return ring.at[layer, batch, slot].set(value.astype(ring.dtype), mode="drop")


def held_positions(rows: int, length: jax.Array) -> jax.Array:
    """The position each row holds after i32[R] tokens: i32[R, rows], negative: none."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(rows, dtype=jnp.int32)) % rows


def ordered(ring_layer: jax.Array, length: jax.Array) -> jax.Array:
    """Rows [R, rows, ...] in the order of their positions `length - rows .. length - 1`.

    Rows of negative positions are whatever the ring holds; callers mask by position.
    """
    rows = ring_layer.shape[1]
    slots = (length[:, None] + jnp.arange(rows, dtype=jnp.int32)) % rows
    return _take(ring_layer, slots)


def advance(
    ring_layer: jax.Array, length: jax.Array, values: jax.Array, count: jax.Array
) -> jax.Array:
    """The ring after i32[R] `count` more tokens whose rows are values [R, S, ...]."""
    held = held_positions(ring_layer.shape[1], length + count)
    new = held >= length[:, None]
    source = jnp.clip(held - length[:, None], 0, values.shape[1] - 1)
    fresh = _take(values, source).astype(ring_layer.dtype)
    new = new.reshape(new.shape + (1,) * (ring_layer.ndim - 2))
    return jnp.where(new, fresh, ring_layer)


def move(
    ring: Ring, layer: int | jax.Array, length: jax.Array, values: jax.Array, count: jax.Array
) -> Ring:
    """The stack with one layer after i32[R] `count` more tokens; see `advance`."""
    if isinstance(ring, Packed):
        new = move(ring.rows, layer, length, ring.packing.pack(values), count)
        return dataclasses.replace(ring, rows=new)
    return store(ring, layer, advance(read(ring, layer), length, values, count))


def store(ring: jax.Array, layer: int | jax.Array, ring_layer: jax.Array) -> jax.Array:
    """Puts one layer [R, rows, ...] back into the stack."""
    return jax.lax.dynamic_update_index_in_dim(ring, ring_layer.astype(ring.dtype), layer, 0)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    index = index.reshape(index.shape + (1,) * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1)
