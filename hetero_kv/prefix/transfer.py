"""Copies between one row of a cache on the device and group buffers on the host.

Nothing aliases (DESIGN rule 15): what is read is a fresh device array that is copied once more into
the group's own buffer, and what is written was first copied out of the store. Shapes depend on the
number of blocks rounded up to a power of two, never on lengths or validity, so there is one
compile per bucket.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state, validate
from hetero_kv.contract import CacheSpec, Evidence, History
from hetero_kv.pages import brought, entries
from hetero_kv.pages.validate import check as check_pages
from hetero_kv.prefix.index import CHECKPOINT
from hetero_kv.prefix.payload import (
    ArrayPayload,
    GroupLayout,
    Section,
    checkpoint_layout,
    history_layout,
)
from hetero_kv.state import Cache

_OTHER = "it was made by another model"
Arrays = dict[str, jax.Array | np.ndarray]  # by LeafSlot.path


@functools.lru_cache(maxsize=64)
def transfer_for(spec: CacheSpec) -> "Transfer":
    """The (shared) transfer of a spec, so that equal specs compile once."""
    return Transfer(spec)


def bucket(blocks: int, capacity_blocks: int) -> int:
    """`blocks` rounded up to a power of two, at most what the cache can hold."""
    return min(1 << max(0, blocks - 1).bit_length(), capacity_blocks)


class Transfer:
    """Jitted copies for the caches of one spec."""

    def __init__(self, spec: CacheSpec):
        self.spec = spec
        self.history = [x for x in spec.slots() if isinstance(x.leaf.contract, History)]
        self.checkpoint_layout = checkpoint_layout(spec)
        self._history_layout = functools.lru_cache(maxsize=4096)(
            functools.partial(history_layout, spec)
        )
        self._abstract = functools.lru_cache(maxsize=64)(functools.partial(state.abstract, spec))
        self._inspect = jax.jit(self._traced_inspect)
        self._read_history = jax.jit(self._traced_read_history, static_argnames="sizes")
        self._read_checkpoint = jax.jit(self._traced_read_checkpoint)
        # (cache, row, length, grid length, history, checkpoint, held blocks) -> (cache, sums of
        # what was given, see pages/brought.py).
        self.write = jax.jit(self._traced_write, donate_argnums=0)
        self.overwrite = jax.jit(self._traced_overwrite, donate_argnums=0, static_argnames="zeroed")

    def check(self, cache: Cache) -> None:
        """Raises ValueError unless the cache is one of this spec."""
        wanted = self._abstract(cache.batch, cache.capacity)
        for slot in self.spec.slots():
            try:
                found, want = cache.leaf(slot), wanted.leaf(slot)
            except (LookupError, TypeError):
                raise ValueError(f"the cache has no leaf {slot.path}: {_OTHER}") from None
            in_pages = cache.pages is not None and isinstance(slot.leaf.contract, History)
            if found.dtype != want.dtype or (not in_pages and found.shape != want.shape):
                raise ValueError(
                    f"{slot.path} of the cache is {found.dtype}{list(found.shape)}, and "
                    f"{want.dtype}{list(want.shape)} by the store's spec: {_OTHER}"
                )

    def history_layout(self, block: int) -> GroupLayout:
        """The layout of a block's history group."""
        return self._history_layout(block)

    def layout_of(self, kind: str, depth: int) -> GroupLayout:
        """The layout of a group whose prefix has `depth` blocks."""
        return self.checkpoint_layout if kind == CHECKPOINT else self._history_layout(depth - 1)

    # -- device to host ------------------------------------------------------------------------

    def inspect(self, cache: Cache, row: int) -> tuple[int, int, validate.Verdict]:
        """Length, grid length and verdict (of a batch of one) of a row, on the host."""
        length, grid_length, verdict = jax.device_get(self._inspect(cache, row))
        return int(length), int(grid_length), verdict

    def read_history(self, cache: Cache, row: int, first: int, stop: int) -> list[np.ndarray]:
        """Buffers of the history groups of blocks `first .. stop - 1`."""
        count = bucket(stop - first, self.spec.blocks_in(cache.capacity))
        starts, sizes = [], []
        for slot in self.history:
            rows = slot.leaf.row_count(cache.capacity)
            size = min(count * self.spec.block // slot.leaf.contract.stride, rows)
            begin, _ = self.spec.entries_of_block(slot.leaf, first)
            # dynamic_slice clamps silently: do it here, where the shift is known.
            starts.append(min(begin, rows - size))
            sizes.append(size)
        arrays = self._read_history(cache, row, np.asarray(starts, np.int32), sizes=tuple(sizes))
        arrays = jax.device_get(arrays)
        origin = {slot.path: start for slot, start in zip(self.history, starts, strict=True)}
        buffers = []
        for block in range(first, stop):
            layout = self.history_layout(block)
            buffer = np.zeros(layout.nbytes, np.uint8)
            for section in layout.sections:
                path = section.slot.path
                begin = section.first - origin[path]
                part = arrays[path][:, begin : begin + section.shape[1]]
                np.copyto(section.view(buffer), part)
            buffers.append(buffer)
        return buffers

    def read_checkpoint(self, cache: Cache, row: int) -> np.ndarray:
        """Buffer of the checkpoint group at the row's length, dead rows in canonical form."""
        arrays = jax.device_get(self._read_checkpoint(cache, row))
        buffer = np.zeros(self.checkpoint_layout.nbytes, np.uint8)
        for section in self.checkpoint_layout.sections:
            np.copyto(section.view(buffer), arrays[section.slot.path])
        return buffer

    # -- host to device ------------------------------------------------------------------------

    def stage_history(
        self,
        payloads: list[ArrayPayload],
        capacity: int,
        keep: frozenset[str] | None = None,
        *,
        held: int = 0,
    ) -> Arrays:
        """Leading entries of every History leaf ([repeats, rows, *width]), padded to a bucket.

        keep: components to stage; None: all. held: blocks before those of the payloads; their
        entries are 0 here, and must go nowhere.
        """
        if not payloads:
            return {}
        count = bucket(held + len(payloads), self.spec.blocks_in(capacity))
        staged = {}
        for slot in self.history:
            if keep is None or slot.leaf.component in keep:
                rows = int(slot.leaf.contract.count(count * self.spec.block))
                shape = (slot.repeats, rows, *slot.leaf.width)
                staged[slot.path] = np.zeros(shape, jnp.dtype(slot.leaf.dtype))
        for payload in payloads:
            for section in payload.layout.sections:
                if section.slot.path in staged:
                    stop = section.first + section.shape[1]
                    target = staged[section.slot.path][:, section.first : stop]
                    np.copyto(target, section.view(payload.buffer))
        return staged

    def stage_checkpoint(self, payload: ArrayPayload | None) -> Arrays:
        """The leaves of a checkpoint group, as views of the payload's buffer."""
        if payload is None:
            return {}
        return {x.slot.path: x.view(payload.buffer) for x in payload.layout.sections}

    def wrong_layout(self, payload: ArrayPayload, expected: GroupLayout) -> str:
        """The first component that a payload lacks, or holds in another form than expected, or "".

        What a payload does not bring would be restored as zeros, under checksums that agree.
        """
        if payload.layout is expected or payload.layout == expected:
            return ""
        have = dict.fromkeys(payload.layout.sections)
        wrong = (x.component for x in expected.sections if x not in have)
        return next(wrong, expected.components[0][0])

    def wrong_positions(self, payload: ArrayPayload, length: int) -> str:
        """The first component of a checkpoint whose positions are not those of `length`, or ""."""
        for section in payload.layout.sections:
            if isinstance(section.slot.leaf.contract, Evidence):
                held = section.view(payload.buffer)
                if not np.all(validate.positions_agree(self.spec, section.slot, held, length)):
                    return section.component
        return ""

    # -- traced ----------------------------------------------------------------------------------

    def _traced_inspect(self, cache: Cache, row: jax.Array):
        if cache.pages is not None:
            checked = check_pages(self.spec, cache)
            verdict = validate.Verdict(checked.bits[row][None], checked.ok[row][None])
            return cache.length[row], cache.grid_length[row], verdict
        one = state.take_row(cache, row)
        return one.length[0], one.grid_length[0], validate.evidence(self.spec, one)

    def _traced_read_history(
        self, cache: Cache, row: jax.Array, starts: jax.Array, *, sizes: tuple[int, ...]
    ) -> Arrays:
        found = {}
        for i, slot in enumerate(self.history):
            leaf = cache.leaf(slot)
            if cache.pages is not None:
                found[slot.path] = entries.read(cache, slot, row, starts[i], sizes[i])
                continue
            begin = (0, row, starts[i], *[0] * len(slot.leaf.width))
            shape = (slot.repeats, 1, sizes[i], *slot.leaf.width)
            found[slot.path] = jax.lax.dynamic_slice(leaf, begin, shape)[:, 0]
        return found

    def _traced_read_checkpoint(self, cache: Cache, row: jax.Array) -> Arrays:
        found = {}
        for section in self.checkpoint_layout.sections:
            value = jax.lax.dynamic_index_in_dim(cache.leaf(section.slot), row, 1, keepdims=False)
            found[section.slot.path] = _canonical(self.spec, section, value, cache.length[row])
        return found

    def _traced_write(
        self,
        cache: Cache,
        row: jax.Array,
        length: jax.Array,
        grid_length: jax.Array,
        history: Arrays,
        checkpoint: Arrays,
        held: jax.Array | int = 0,
    ) -> tuple[Cache, jax.Array]:
        """The cache with row `row` standing at `length`; only the given leaves are written.

        Evidence is reset first, so what is not restored (windows and tails before a replay)
        vouches for nothing. A row whose pages cannot hold `length` starts over at 0. The cache is
        donated. held: leading blocks that `history` does not bring. Also returns u32[C],
        `brought.given` of the leaves.
        """
        sums = brought.given(self.spec, history | checkpoint, jnp.int32(held), jnp.int32(length))
        cache = state.reset_row(self.spec, cache, row)
        takes = None
        if cache.pages is not None:
            takes = entries.takes(cache, row, length)
            length, grid_length = (jnp.where(takes, x, 0) for x in (length, grid_length))
        cache = self._traced_overwrite(cache, row, length, history)
        changed = {}
        for section in self.checkpoint_layout.sections:
            if section.slot.path in checkpoint:
                leaf = cache.leaf(section.slot)
                value = checkpoint[section.slot.path][:, None]
                if takes is not None:
                    value = jnp.where(takes, value, leaf[:, row][:, None])
                changed[section.slot] = jax.lax.dynamic_update_slice(
                    leaf, value, (0, row, *[0] * (leaf.ndim - 2))
                )
        cache = cache.with_leaves(changed)
        return cache.replace(grid_length=cache.grid_length.at[row].set(grid_length)), sums

    def _traced_overwrite(
        self,
        cache: Cache,
        row: jax.Array,
        length: jax.Array,
        history: Arrays,
        *,
        zeroed: frozenset[str] = frozenset(),
    ) -> Cache:
        """Writes History entries and claims `length`, whatever the other leaves hold.

        zeroed: components whose leaves are cleared where `history` does not bring them. Used as
        it is only by the hash-only baseline. The cache is donated.
        """
        changed = {}
        for slot in self.spec.slots():
            leaf, contract = cache.leaf(slot), slot.leaf.contract
            if slot.path in history:
                count = contract.count(length)
                if cache.pages is None:
                    changed[slot] = _write_entries(leaf, row, history[slot.path], count)
                else:
                    changed[slot] = entries.write(cache, slot, row, history[slot.path], count)
            elif isinstance(contract, Evidence):
                if contract.kind == "count":
                    count = validate.owner(self.spec, slot).leaf.contract.count(length)
                    changed[slot] = leaf.at[:, row].set(count)
            elif slot.leaf.component in zeroed:
                if cache.pages is not None and isinstance(contract, History):
                    raise ValueError("pages are never cleared: use a contiguous cache")
                changed[slot] = leaf.at[:, row].set(0)
        cache = cache if cache.pages is None else entries.counted(cache, row, length)
        return cache.with_leaves(changed).replace(
            length=cache.length.at[row].set(length),
            grid_length=cache.grid_length.at[row].set(length),
        )


def _canonical(spec: CacheSpec, section: Section, value: jax.Array, length: jax.Array) -> jax.Array:
    """[repeats, rows, *width] with dead rows 0, or -1 where they are positions."""
    leaf = validate.owner(spec, section.slot).leaf
    if not leaf.rows:
        return value
    live = leaf.live_rows(length).reshape(1, leaf.rows, *[1] * (value.ndim - 2))
    fill = -1 if isinstance(section.slot.leaf.contract, Evidence) else 0
    return jnp.where(live, value, jnp.asarray(fill, value.dtype))


def _write_entries(
    leaf: jax.Array, row: jax.Array, values: jax.Array, count: jax.Array
) -> jax.Array:
    """Writes the first `count` of values [repeats, n, *width]; the padding keeps old rows."""
    tail = [0] * (leaf.ndim - 3)
    shape = (leaf.shape[0], 1, values.shape[1], *leaf.shape[3:])
    old = jax.lax.dynamic_slice(leaf, (0, row, 0, *tail), shape)
    keep = jnp.arange(values.shape[1]) < count
    keep = keep.reshape(1, 1, -1, *[1] * len(tail))
    new = jnp.where(keep, values[:, None], old)
    return jax.lax.dynamic_update_slice(leaf, new, (0, row, 0, *tail))
