"""What a restore has brought into a row, for the first call that reads it to compare (rule 11).

A restore adds up what it was given to write, before it writes. The call adds up what the row holds
where that should be: whatever happens in between, or went to another place, is noticed in the call
and not a token later. Pages that the row shares have checksums of their own, and are read again.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import validate
from hetero_kv.contract import CacheSpec, History, LeafSlot
from hetero_kv.kernels.page_copy import checksum
from hetero_kv.pages import cache as paged
from hetero_kv.pages import entries, slot_sums, table
from hetero_kv.state import Cache

Array = jax.Array | np.ndarray
Read = Callable[[LeafSlot, jax.Array, int], jax.Array]  # (leaf, first, n) -> [repeats, n, *width]


class Brought(NamedTuple):
    """Sums of what a row was given; C components as in `validate.components`."""

    sums: Array  # u32[C]
    first: Array  # i32[], blocks before those whose History came by the copy
    tokens: Array  # i32[], the length it stands for; 0: nothing is to be compared
    state: Array  # bool[], whether windows, tails and recurrent state came too, not by a replay
    shared: Array  # i32[components in pages], leading pages that the row shares


def nothing(spec: CacheSpec, components: int = 0) -> Brought:
    """Of a row that nothing was brought into; with so many components in pages."""
    sums, shared = np.zeros(len(validate.components(spec)), np.uint32), np.zeros(components)
    return Brought(sums, np.int32(0), np.int32(0), np.bool_(False), shared.astype(np.int32))


def given(
    spec: CacheSpec, leaves: dict[str, Array], first: jax.Array, tokens: jax.Array
) -> jax.Array:
    """u32[C] of leaves by LeafSlot.path, [repeats, rows, *width], before they are written.

    Of History the entries of blocks `first` to the length; leaves that are not there count as 0.
    """

    def read(slot: LeafSlot, start: jax.Array, size: int) -> jax.Array:
        value = jnp.asarray(leaves[slot.path])
        return value.at[:, start + jnp.arange(size)].get(mode="fill", fill_value=0)

    sums = _of_history(spec, [x for x in _history(spec) if x.path in leaves], read, first, tokens)
    some = {x: jnp.asarray(leaves[x.path])[:, None] for x in spec.slots() if x.path in leaves}
    return sums + slot_sums.of_leaves(spec, some, tokens[None])[0]


def changed(spec: CacheSpec, one: Cache, brought: Brought) -> tuple[jax.Array, Cache]:
    """u32[C], bits CHECKSUM: components of a row (batch 1) that are not as they were brought.

    Costs one more reading of what was brought; nothing where nothing was. Shared pages that have
    changed are CORRUPT in the cache returned, so that whoever else holds them is refused too.
    """
    here = brought.tokens > 0

    def read(slot: LeafSlot, start: jax.Array, size: int) -> jax.Array:
        if one.pages is not None:
            return entries.read(one, slot, 0, start, size)
        index = start + jnp.arange(size)
        return one.leaf(slot)[:, 0].at[:, index].get(mode="fill", fill_value=0)

    def state() -> jax.Array:
        some = {x: one.leaf(x) for x in spec.slots() if spec.group_of(x) == slot_sums.GROUP}
        return slot_sums.of_leaves(spec, some, brought.tokens[None])[0]

    sums = _of_history(spec, _history(spec), read, brought.first, brought.tokens)
    sums += jax.lax.cond(here & brought.state, state, lambda: jnp.zeros_like(sums))
    wrong = here & (sums != brought.sums)
    if one.pages is not None:
        some, one = _condemned(spec, one, jnp.where(here, brought.shared, 0))
        wrong |= some
    return validate.bit(wrong, validate.CHECKSUM), one


def _history(spec: CacheSpec) -> list[LeafSlot]:
    return [x for x in spec.slots() if isinstance(x.leaf.contract, History)]


def _of_history(
    spec: CacheSpec, slots: list[LeafSlot], read: Read, first: jax.Array, tokens: jax.Array
) -> jax.Array:
    """u32[C]: a block at a time; how many there are is not compiled in."""
    names, every = validate.components(spec), _history(spec)

    def body(block: jax.Array, sums: jax.Array) -> jax.Array:
        for slot in slots:
            contract = slot.leaf.contract
            size = spec.block // contract.stride
            index = block * size + jnp.arange(size, dtype=jnp.int32)
            keep = index >= contract.count(first * spec.block)
            keep &= index < contract.count(tokens)
            values = read(slot, block * size, size)
            keep = keep.reshape(1, -1, *[1] * (values.ndim - 2))
            values = jnp.where(keep, values, jnp.zeros((), values.dtype))
            salt = jnp.uint32(every.index(slot) << 16) + block.astype(jnp.uint32) * jnp.uint32(
                checksum.GOLDEN
            )
            c = names.index(slot.leaf.component)
            total = checksum.add(jnp.zeros(1, jnp.uint32), values[None], salt)
            sums = sums.at[c].add(total[0])
        return sums

    stop = -(-tokens // spec.block)
    return jax.lax.fori_loop(first, stop, body, jnp.zeros(len(names), jnp.uint32))


def _condemned(spec: CacheSpec, one: Cache, shared: jax.Array) -> tuple[jax.Array, Cache]:
    """bool[C]: which components have a shared page that is not what was sealed."""
    names, tables = validate.components(spec), {}
    found = jnp.zeros(len(names), bool)
    for c, page in enumerate(one.pages.paging.pages):
        pages = one.pages.tables[page.component]
        ids = pages.table[0]
        sums = paged.some_checksums(spec, one, page.component, ids, 0, shared[c])
        wrong = jnp.arange(page.columns, dtype=jnp.int32) < shared[c]
        wrong &= sums != pages.column("checksum", ids)
        tables[page.component] = table.condemn(pages, ids, wrong)
        found = found.at[names.index(page.component)].set(jnp.any(wrong))
    return found, one.replace(pages=one.pages.replace(tables=tables))
