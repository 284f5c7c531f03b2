"""Checksums of what is not sealed: what pages have when they are, for the state that changes.

Windows, tails, recurrent state and the entries of open pages change with every token, so their
checksum is taken after a call and compared before the next one that goes on with the row. Rows that
nobody reads any more count as 0: they may hold anything.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hetero_kv import validate
from hetero_kv.contract import CacheSpec, Evidence, LeafSlot
from hetero_kv.kernels.page_copy import checksum
from hetero_kv.pages import table
from hetero_kv.pages.cache import pages_for
from hetero_kv.pages.layout import history_slots
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict

GROUP = "checkpoint"  # whose leaves are in slots


def sums(spec: CacheSpec, cache: Cache) -> jax.Array:
    """u32[R, C] of the checkpoint groups and open pages of all rows; C as `validate.components`.

    History without pages counts as 0.
    """
    leaves = {x: cache.leaf(x) for x in spec.slots() if spec.group_of(x) == GROUP}
    length = jnp.clip(cache.length, 0, cache.capacity)
    found = of_leaves(spec, leaves, length)
    return found if cache.pages is None else found + _open_pages(spec, cache, length)


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
    reads of them; and the pages that are open in any row.
    """
    bits = validate.bit(sums(spec, cache) != before, validate.CHECKSUM)
    if rows is not None:
        bits = jnp.where(rows[:, None], bits, jnp.uint32(0))
    return Verdict(bits, jnp.all(bits == 0, axis=-1))


def _open_pages(spec: CacheSpec, cache: Cache, length: jax.Array) -> jax.Array:
    """u32[R, C]: entries written to pages of form WRITING; a column of all rows at a time."""
    names = validate.components(spec)
    found = {name: jnp.zeros(length.shape, jnp.uint32) for name in names}
    for page in cache.pages.paging.pages:
        pages = cache.pages.tables[page.component]
        ids, row = pages.safe(pages.table), jnp.arange(page.entries, dtype=jnp.int32)
        stop = pages_for(page, length)[:, None]
        used = (pages.column("form", ids) == table.WRITING) & (jnp.arange(page.columns) < stop)

        def body(column: jax.Array, total: jax.Array, page=page, ids=ids, row=row, used=used):
            own = jnp.take(ids, column, axis=1)
            held = page.contract.count(length) - column * page.entries
            live = jnp.take(used, column, axis=1)[:, None] & (row < held[:, None])  # [R, entries]
            for part, slot in enumerate(history_slots(spec)[page.component]):
                value = cache.leaf(slot).at[:, own].get(mode="fill", fill_value=0)
                keep = live.reshape(1, *live.shape, *[1] * (value.ndim - 3))
                value = jnp.where(keep, value, jnp.zeros((), value.dtype))
                salt = column.astype(jnp.uint32) * jnp.uint32(checksum.GOLDEN)
                for repeat in range(slot.repeats):
                    total = checksum.add(total, value[repeat], salt + (part << 16 | repeat))
            return total

        first = jnp.argmax(jnp.any(used, axis=0))
        last = jnp.where(jnp.any(used), jnp.max(stop), first)
        found[page.component] = jax.lax.fori_loop(first, last, body, found[page.component])
    return jnp.stack([found[name] for name in names], axis=-1)


def _live(spec: CacheSpec, slot: LeafSlot, value: jax.Array, length: jax.Array) -> jax.Array:
    """[repeats, R, ...] with dead rows 0, or -1 where they are positions."""
    leaf = validate.owner(spec, slot).leaf
    if not leaf.rows:
        return value
    live = leaf.live_rows(length)  # [R, rows]
    live = live.reshape(1, *live.shape, *[1] * (value.ndim - 3))
    fill = -1 if isinstance(slot.leaf.contract, Evidence) else 0
    return jnp.where(live, value, jnp.asarray(fill, value.dtype))
