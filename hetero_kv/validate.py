"""Pure validators: does the evidence in a cache agree with its lengths (DESIGN rule 1)?

Everything here is traceable: no Python branch depends on a value, and no shape on validity.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.contract import CacheSpec, Evidence, History, LeafSlot, Scratch
from hetero_kv.state import Cache

# Reasons, one bit each.
COUNT = 1  # the counter of a pool differs from the contract's count at this length
POSITIONS = 2  # a live ring row holds another position than the expected one
LENGTH = 4  # a length is negative, beyond the capacity, or the grid length is beyond the length
NONFINITE = 8  # a live row has a NaN or an infinity
MISSING = 16  # a page that is read is not there, or not in a form that may be read
GENERATION = 32  # a page was recycled since its lease: it has another generation
OWNER = 64  # a page belongs to somebody else than the lease says
VALID = 128  # a page's count of valid entries is not that of the length
WRITE = 256  # a page that is to be written is not the row's own, or sealed, or not there
CHECKSUM = 512  # the bytes of a sealed page are not those that were sealed
JOINT = 1024  # (of the lengths) some components are fine and others are not

BITS = {
    "count": COUNT,
    "positions": POSITIONS,
    "length": LENGTH,
    "nonfinite": NONFINITE,
    "missing": MISSING,
    "generation": GENERATION,
    "owner": OWNER,
    "valid": VALID,
    "write": WRITE,
    "checksum": CHECKSUM,
    "joint": JOINT,
}
LENGTHS = "lengths"  # the component that stands for the lengths themselves


class Verdict(NamedTuple):
    """What is wrong, per row of the batch and component."""

    bits: jax.Array  # u32[R, components(spec)]: 0 is fine
    ok: jax.Array  # bool[R]


def components(spec: CacheSpec) -> tuple[str, ...]:
    """Components in the order of `Verdict.bits`; the last one stands for the lengths."""
    kept = (x for x in spec.slots() if not isinstance(x.leaf.contract, Evidence | Scratch))
    return (*dict.fromkeys(x.leaf.component for x in kept), LENGTHS)


def owner(spec: CacheSpec, slot: LeafSlot) -> LeafSlot:
    """The leaf that an Evidence leaf vouches for; any other leaf itself."""
    if not isinstance(slot.leaf.contract, Evidence):
        return slot
    name = slot.leaf.contract.of
    leaf = dict(spec.segments[slot.segment].layers[slot.layer].leaves)[name]
    return dataclasses.replace(slot, name=name, leaf=leaf)


def evidence(
    spec: CacheSpec, cache: Cache, rows: jax.Array | None = None, finite: bool = False
) -> Verdict:
    """Checks every row of the batch against the contracts at its length.

    Args:
        spec: the cache's spec.
        cache: any cache of that spec.
        rows: bool[R], rows to check; others get the verdict ok. None: all.
        finite: also require that live rows hold finite numbers (reads all of the cache; pools of
            pages are left to `pages.validate`).
    """
    names = components(spec)
    # A length beyond the capacity must not wrap the checks below; it has a bit of its own.
    length = jnp.clip(cache.length, 0, cache.capacity)
    wrong_length = (cache.length != length) | (cache.grid_length < 0)
    wrong_length |= cache.grid_length > cache.length
    bits = {name: jnp.zeros(cache.length.shape, jnp.uint32) for name in names}
    bits[LENGTHS] = bit(wrong_length, LENGTH)
    for slot in spec.slots():
        if isinstance(slot.leaf.contract, Scratch):
            continue
        name = owner(spec, slot).leaf.component
        if isinstance(slot.leaf.contract, Evidence):
            bits[name] |= _disagrees(spec, slot, cache, length)
        elif cache.pages is not None and isinstance(slot.leaf.contract, History):
            continue
        elif finite and slot.leaf.poison is not None:
            bits[name] |= _not_finite(slot, cache, length)
    table = jnp.stack([bits[name] for name in names], axis=-1)
    if rows is not None:
        table = jnp.where(rows[:, None], table, jnp.uint32(0))
    return Verdict(table, jnp.all(table == 0, axis=-1))


def describe(spec: CacheSpec, verdict: Verdict, row: int) -> list[str]:
    """What is wrong with one row, for humans (host side)."""
    table = np.asarray(verdict.bits)[row]
    return [
        f"{name}: {text}"
        for name, bits in zip(components(spec), table, strict=True)
        for text, bit in BITS.items()
        if int(bits) & bit
    ]


def positions_agree(spec: CacheSpec, slot: LeafSlot, held: jax.Array, length: jax.Array):
    """Whether ring positions i32[..., rows] are as expected on live rows: bool[...].

    length: i32, a scalar or of as many axes as `held` has before its rows.
    """
    leaf = owner(spec, slot).leaf
    expected, live = leaf.ring_positions(length), leaf.live_rows(length)
    return ((held == expected) | ~live).all(axis=-1)


def bit(wrong: jax.Array, reason: int) -> jax.Array:
    """u32, of one reason where it applies; `wrong` is bool of any shape."""
    return jnp.where(wrong, jnp.uint32(reason), jnp.uint32(0))


def _disagrees(spec: CacheSpec, slot: LeafSlot, cache: Cache, length: jax.Array) -> jax.Array:
    held = cache.leaf(slot)  # [repeats, R] or [repeats, R, rows]
    if slot.leaf.contract.kind == "count":
        expected = owner(spec, slot).leaf.contract.count(length)
        return bit(jnp.any(held != expected[None], axis=0), COUNT)
    return bit(~jnp.all(positions_agree(spec, slot, held, length[None]), axis=0), POSITIONS)


def _not_finite(slot: LeafSlot, cache: Cache, length: jax.Array) -> jax.Array:
    value = cache.leaf(slot)  # [repeats, R, rows, *width], or without rows
    live = slot.leaf.live_rows(length, cache.capacity)  # [R, rows or 1]
    has_rows = slot.leaf.row_count(cache.capacity) > 0
    width = value.ndim - (3 if has_rows else 2)
    live = live.reshape((1, *live.shape[: 2 if has_rows else 1], *[1] * width))
    bad = ~jnp.isfinite(slot.leaf.numbers(value)) & live
    return bit(jnp.any(bad, axis=(0, *range(2, value.ndim))), NONFINITE)
