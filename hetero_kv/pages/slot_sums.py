"""Checksums of slots: what pages have when they are sealed, for the state that is never sealed.

Windows, tails and recurrent state change with every token, so their checksum is taken after a call
and compared before the next one that goes on with the row. Rows that nobody reads any more count as
0: they may hold anything.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hetero_kv import validate
from hetero_kv.contract import CacheSpec, Evidence, LeafSlot
from hetero_kv.kernels.page_copy import checksum
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict

GROUP = "checkpoint"  # whose leaves are in slots


def sums(spec: CacheSpec, cache: Cache) -> jax.Array:
    """u32[R, C] of the checkpoint groups of all rows; components as in `validate.components`."""
    leaves = {x: cache.leaf(x) for x in spec.slots() if spec.group_of(x) == GROUP}
    return of_leaves(spec, leaves, jnp.clip(cache.length, 0, cache.capacity))


def of_leaves(
    spec: CacheSpec, leaves: Mapping[LeafSlot, jax.Array], length: jax.Array
) -> jax.Array:
    """u32[R, C] of leaves [repeats, R, ...] at i32[R] `length`; those not given count as 0."""
    names = validate.components(spec)
    found = {name: jnp.zeros(length.shape, jnp.uint32) for name in names}
    for part, slot in enumerate(x for x in spec.slots() if spec.group_of(x) == GROUP):
        if slot not in leaves:
            continue
        name = validate.owner(spec, slot).leaf.component
        value = _live(spec, slot, leaves[slot], length)
        for repeat in range(slot.repeats):
            found[name] = checksum.add(found[name], value[repeat], part << 16 | repeat)
    return jnp.stack([found[name] for name in names], axis=-1)


def changed(
    spec: CacheSpec, cache: Cache, before: jax.Array, rows: jax.Array | None = None
) -> Verdict:
    """Which components of which rows are not what `sums` told before: bits CHECKSUM.

    rows: bool[R], rows to check; None: all. A verdict reads all slots: about what a decode step
    reads of them.
    """
    bits = validate.bit(sums(spec, cache) != before, validate.CHECKSUM)
    if rows is not None:
        bits = jnp.where(rows[:, None], bits, jnp.uint32(0))
    return Verdict(bits, jnp.all(bits == 0, axis=-1))


def _live(spec: CacheSpec, slot: LeafSlot, value: jax.Array, length: jax.Array) -> jax.Array:
    """[repeats, R, ...] with dead rows 0, or -1 where they are positions."""
    leaf = validate.owner(spec, slot).leaf
    if not leaf.rows:
        return value
    live = leaf.live_rows(length)  # [R, rows]
    live = live.reshape(1, *live.shape, *[1] * (value.ndim - 3))
    fill = -1 if isinstance(slot.leaf.contract, Evidence) else 0
    return jnp.where(live, value, jnp.asarray(fill, value.dtype))
