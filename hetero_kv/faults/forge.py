"""What the leaves of a component hold after a fault: pure functions on numpy arrays.

Leaves are [repeats, rows, *width] (rows: the entries of the prefix for a History leaf), or
[repeats, *width] where a leaf has no rows.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from hetero_kv import validate
from hetero_kv.contract import CacheSpec, Evidence, History, LeafSlot
from hetero_kv.faults import kinds
from hetero_kv.faults.kinds import Case
from hetero_kv.packing import Packing
from hetero_kv.prefix.transfer import transfer_for
from hetero_kv.state import Cache

Leaves = Mapping[str, np.ndarray]  # by LeafSlot.path
MOST = 8.0  # reinterpreted numbers are kept finite and within this: NaN would give them away


@dataclasses.dataclass(frozen=True)
class Held:
    """What one row holds at `length`: all entries, and the checkpoint in canonical form."""

    length: int
    leaves: Leaves

    @classmethod
    def of(cls, spec: CacheSpec, cache: Cache, row: int = 0) -> "Held":
        """A copy of a row."""
        length, leaves = int(cache.length[row]), {}
        transfer = transfer_for(spec)
        buffer = transfer.read_checkpoint(cache, np.int32(row))
        for section in transfer.checkpoint_layout.sections:
            leaves[section.slot.path] = section.view(buffer).copy()
        for slot in spec.slots():
            if isinstance(slot.leaf.contract, History):
                count = int(slot.leaf.contract.count(length))
                leaves[slot.path] = np.array(cache.leaf(slot))[:, row, :count]
            elif _counts(slot):
                leaves[slot.path] = np.array(cache.leaf(slot))[:, row]
        return cls(length, leaves)


@dataclasses.dataclass(frozen=True)
class Material:
    """What faults are made of, at the length that is resumed unless said otherwise."""

    target: Held
    before: Held  # of the target, one boundary earlier
    donor: Held  # another request
    donor_end: Held  # the same at the end of its prompt
    other: Held  # the target's tokens, computed with other weights


def forged(spec: CacheSpec, case: Case, material: Material) -> dict[str, np.ndarray]:
    """The leaves of the component, evidence included where the fault is in it too."""
    right, found = material.target.leaves, {}
    for slot in _slots(spec, case.component):
        evidence = isinstance(slot.leaf.contract, Evidence)
        if evidence:
            value = _evidence(spec, case.kind, slot, material)
        else:
            value = _value(spec, case.kind, slot, material)
        if value is not None:
            found[slot.path] = np.asarray(value, right[slot.path].dtype)
    return found


def _slots(spec: CacheSpec, component: str) -> Iterator[LeafSlot]:
    for slot in spec.slots():
        about = validate.owner(spec, slot).leaf
        if about.component == component and kinds.sort_of(about.contract):
            yield slot


def _counts(slot: LeafSlot) -> bool:
    return isinstance(slot.leaf.contract, Evidence) and slot.leaf.contract.kind == "count"


def _evidence(spec: CacheSpec, kind: str, slot: LeafSlot, of: Material) -> np.ndarray | None:
    """None: it is as it should be."""
    right = of.target.leaves[slot.path]
    if _counts(slot):
        return {kinds.DROP: np.zeros_like(right), kinds.COUNT: right - 1}.get(kind)
    if kind == kinds.DROP:
        return np.full_like(right, -1)
    if kind == kinds.POSITION:
        return np.roll(right, 1, axis=1)
    if kind == kinds.SHIFT_BLOCK:
        return of.before.leaves[slot.path]
    return of.donor_end.leaves[slot.path] if kind == kinds.REUSED else None


def _value(spec: CacheSpec, kind: str, slot: LeafSlot, of: Material) -> np.ndarray:
    right, path = of.target.leaves[slot.path], slot.path
    history = isinstance(slot.leaf.contract, History)
    if kind in (kinds.DROP, kinds.ZERO, kinds.RELEASED):
        return np.zeros_like(right)
    if kind in (kinds.STALE, kinds.GENERATION):
        return of.donor.leaves[path]
    if kind in (kinds.FOREIGN, kinds.OLD):
        return of.other.leaves[path]
    if kind == kinds.REUSED:
        return of.donor_end.leaves[path]
    if kind == kinds.SHIFT_BLOCK and not history:
        return of.before.leaves[path]
    if kind == kinds.SHIFT_BLOCK:
        first, stop = spec.entries_of_block(slot.leaf, 1)
        return np.roll(right, stop - first, axis=1)
    if kind in (kinds.SHIFT_ENTRY, kinds.POSITION):
        return np.roll(right, 1, axis=1)
    if kind == kinds.COUNT:
        less = right.copy()
        less[:, -1:] = 0
        return less
    change = {kinds.DTYPE: _reinterpreted, kinds.BIT: _flipped, kinds.TORN: _torn}[kind]
    if slot.leaf.packing is not None and kind != kinds.TORN:
        change = functools.partial(
            {kinds.DTYPE: _misread, kinds.BIT: _turned}[kind], slot.leaf.packing
        )
    if not history:
        live = slot.leaf.live_rows(of.target.length) if slot.leaf.rows else None
        return change(right, live)
    parts = [slice(*spec.entries_of_block(slot.leaf, x)) for x in _blocks(spec, of.target)]
    changed = right.copy()
    for part in parts:
        changed[:, part] = change(right[:, part], None)
    return changed


def _blocks(spec: CacheSpec, held: Held) -> range:
    return range(spec.blocks_in(held.length))


def _reinterpreted(value: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """The first half of the bytes, taken for numbers of half the width."""
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    half = raw[: raw.size // 2].view(np.float16 if value.itemsize == 4 else np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = np.nan_to_num(half.astype(np.float32), nan=0.0, posinf=MOST, neginf=-MOST)
    return np.clip(numbers, -MOST, MOST).astype(value.dtype).reshape(value.shape)


def _flipped(value: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """One bit: the sign of the largest number in a live row."""
    changed = np.ascontiguousarray(value).copy()
    if not changed.size:
        return changed
    size = np.abs(changed.astype(np.float32))
    if live is not None:
        size = np.where(live.reshape(1, -1, *[1] * (size.ndim - 2)), size, -1.0)
    bits = changed.reshape(-1).view(f"u{value.itemsize}")
    bits[int(size.argmax())] ^= bits.dtype.type(1 << (8 * value.itemsize - 1))
    return changed


def _misread(packing: Packing, rows: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """As `_reinterpreted`, of the numbers that packed rows are read as."""
    numbers = _reinterpreted(np.asarray(packing.unpack(rows)), live)
    return np.asarray(packing.pack(jnp.asarray(numbers)))


def _turned(packing: Packing, rows: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """As `_flipped`, of packed rows."""
    changed = np.ascontiguousarray(rows).copy()
    if not changed.size:
        return changed
    size = np.abs(np.asarray(packing.unpack(rows)).astype(np.float32))
    if live is not None:
        size = np.where(live.reshape(1, -1, 1), size, -1.0)
    *row, value = np.unravel_index(int(np.nanargmax(size)), size.shape)
    byte, bit = packing.sign(int(value))
    changed[(*row, byte)] ^= np.uint8(1 << bit)
    return changed


def _torn(value: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """The second half of each layer's bytes is missing."""
    flat = np.ascontiguousarray(value).copy().reshape(value.shape[0], -1)
    flat[:, flat.shape[1] // 2 :] = 0
    return flat.reshape(value.shape)
