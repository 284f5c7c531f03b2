"""Exact top-k on a TPU, of order keys that lie in on-chip memory: thresholds, then compaction.

Keys are int32 in the order of the scores, [rows, 128]: entry i is at row i // 128, lane i % 128.
The k-th largest is found by bisection over its 32 bits, ties are cut at an index found the same
way. The chosen entries are then lined up by ranks, as matrix products with zeros and ones: each
factor is an integer up to 256 and each sum up to 2**24, so they are exact in any precision.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
BLOCK = 128  # rows lined up at a time
HIDDEN = -(2**31)  # order key of an entry that is not visible


def order_keys(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """f32 to i32 of the same order (-0 equals +0); HIDDEN where not visible."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(visible, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), HIDDEN)


def _index(first: jax.Array, rows: int) -> jax.Array:
    """i32[rows, 128]: entries of the rows from `first` on."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
    return (first + row) * LANES + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _count(keys: Any, steps: jax.Array, step: int, test) -> jax.Array:
    """How many keys of the first `steps` steps of `step` rows pass test(keys, index): f32[]."""

    def body(s: jax.Array, total: jax.Array) -> jax.Array:
        first = pl.multiple_of(s * step, step)
        part = keys[pl.ds(first, step), :]
        return total + jnp.where(test(part, _index(first, step)), 1.0, 0.0)

    total = jax.lax.fori_loop(0, steps, body, jnp.zeros((step, LANES), jnp.float32))
    return jnp.sum(total)


def thresholds(
    keys: Any, k: int, steps: jax.Array, step: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """The k-th largest key (HIDDEN: fewer than k are visible), and the index below which keys equal
    to it are chosen."""

    def raise_bit(b: jax.Array, low: jax.Array) -> jax.Array:
        trial = low | jax.lax.shift_left(jnp.int32(1), 31 - b)
        enough = _count(keys, steps, step, lambda x, _: x >= (trial ^ HIDDEN)) >= k
        return jnp.where(enough, trial, low)

    low = jax.lax.fori_loop(0, 32, raise_bit, jnp.int32(0)) ^ HIDDEN
    spare = k - _count(keys, steps, step, lambda x, _: x > low)
    equal = _count(keys, steps, step, lambda x, _: x == low)
    tied = (equal > spare) & (low != HIDDEN)
    bits = capacity.bit_length()

    def lower_cut(b: jax.Array, cut: jax.Array) -> jax.Array:
        trial = cut + jax.lax.shift_left(jnp.int32(1), bits - 1 - b)
        ties = _count(keys, steps, step, lambda x, i: (x == low) & (i < trial))
        return jnp.where(ties <= spare, trial, cut)

    start = jnp.where(tied, 0, 2**31 - 1).astype(jnp.int32)
    return low, jax.lax.fori_loop(0, jnp.where(tied, bits, 0), lower_cut, start)


def line_up(
    keys: Any, out: Any, low: jax.Array, cut: jax.Array, visible: jax.Array, blocks: jax.Array
) -> None:
    """Writes the chosen entries, ascending, to out i32[k / 128, 128]; -1 beyond them.

    keys: whole blocks; rows that were never written are beyond `visible`.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1).astype(jnp.float32)
    row = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0).astype(jnp.float32)
    before_lane = jnp.where(row < lane, 1.0, 0.0)  # [source lane, lane]
    before_row = jnp.where(lane < row, 1.0, 0.0)  # [row, source row]
    every = jnp.ones((LANES, LANES), jnp.float32)
    out[...] = jnp.full(out.shape, -1, jnp.int32)

    def body(b: jax.Array, base: jax.Array) -> jax.Array:
        first = pl.multiple_of(b * BLOCK, BLOCK)
        part, index = keys[pl.ds(first, BLOCK), :], _index(first, BLOCK)
        chosen = (part > low) | ((part == low) & (index < cut))
        chosen = jnp.where(chosen & (part != HIDDEN) & (index < visible), 1.0, 0.0)
        rank = jnp.where(chosen > 0, _dot(chosen, before_lane) + 1.0, 0.0)  # [row, lane], from 1
        counts = _dot(chosen, every)  # [row, any lane]
        start = _dot(before_row, counts) + base
        total = jnp.sum(chosen)
        for d in range(out.shape[0]):
            # Target j of this row of `out` (a lane) is in the row of keys that j falls into.
            @pl.when((base < (d + 1) * LANES) & (base + total > d * LANES))
            def _(d: int = d) -> None:
                target = lane + d * LANES
                holds = jnp.where((start <= target) & (target < start + counts), 1.0, 0.0)
                wanted = target - jnp.sum(holds * start, axis=0, keepdims=True) + 1.0
                hit = jnp.where(_dot(rank, holds, 0) == wanted, 1.0, 0.0)  # [lane of keys, target]
                at = jnp.sum(holds * row, axis=0, keepdims=True) * LANES
                at = at + jnp.sum(hit * row, axis=0, keepdims=True)
                found = jnp.sum(holds, axis=0, keepdims=True) > 0
                entry = at.astype(jnp.int32) + first * LANES
                out[d : d + 1, :] = jnp.where(found, entry, out[d : d + 1, :])

        return base + total

    jax.lax.fori_loop(0, blocks, body, jnp.float32(0))


def _dot(a: jax.Array, b: jax.Array, axis: int = 1) -> jax.Array:
    """Axis `axis` of a contracted with the first one of b."""
    return jax.lax.dot_general(
        a, b, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
