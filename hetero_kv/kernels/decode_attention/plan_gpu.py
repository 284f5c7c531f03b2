"""Sizes, tables and masks of a decode attention on a GPU: what its kernels need besides the rows.

A sequence's rows are taken in tiles: those of the window, then entries. Copies are of the same
number of rows all over; places say where the rows of each copy of entries are.
"""

import math

import jax
import jax.numpy as jnp

from hetero_kv.attention import ring
from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import paging
from hetero_kv.kernels.decode_attention.operands import Entries, Operands
from hetero_kv.kernels.hopper import ROWS
from hetero_kv.packing import Packed

BLOCKS = 132  # about one block per multiprocessor


class Plan:
    """Sizes of a call.

    tile: rows of a tile. pick: rows that come with a picked one (one, where they are packed).
    copy: rows of one copy of entries, window_copy: of the window; they differ where entries are
    packed. window, page, wanted: rows of the window, of a page, and of entries that can be
    attended. dtypes: of queries, of the window, and of entries as they are read.
    """

    def __init__(self, operands: Operands, tile: int, pick: int):
        self.tile = tile
        self.batch, self.heads, self.width = operands.q.shape
        self.dtypes = [operands.q.dtype]
        self.window = self.page = self.pages = self.wanted = 0
        self.picked, self.packing = False, None
        near, far = [tile], [tile]
        if operands.window is not None:
            self.window = operands.window.rows.shape[2]
            self.dtypes.append(operands.window.rows.dtype)
            near.append(self.window)
        if operands.entries is not None:
            self.packing = paging.packing(operands.entries.pool)
            view = jax.eval_shape(lambda x: paging.view(x, tile), operands.entries.pool)
            self.page, self.pages = view.entries, view.pages.shape[1]
            self.dtypes.append(jnp.dtype(self.packing.dtype) if self.packing else view.pages.dtype)
            self.picked = operands.entries.picked is not None
            pick = 1 if self.packing else pick
            far += [self.page, pick if self.picked else tile]
            self.wanted = view.capacity
            if self.picked:
                self.wanted = operands.entries.picked.shape[1] * pick
        self.pick = pick
        self.copy, self.window_copy = math.gcd(*far), math.gcd(*near)
        if not self.packing:
            self.copy = self.window_copy = math.gcd(self.copy, self.window_copy)
        self.window_tiles = -(-self.window // tile)
        self.tiles = self.window_tiles + -(-self.wanted // tile)
        self.groups = -(-self.heads // ROWS)  # of heads

    def splits(self, wanted: int) -> int:
        """Blocks per sequence and group of heads; wanted = 0: as many as fill a device."""
        wanted = wanted or BLOCKS // (self.batch * self.groups)
        return max(1, min(wanted, self.tiles))


def plain(operands: Operands) -> tuple[Operands, jax.Array]:
    """The same with a window of floats, and the layers i32[2] of its window and of its entries.

    A packed window is unpacked before the kernel: it is short, and the same for all heads.
    """
    layer = jnp.asarray(operands.layer, jnp.int32)
    window = operands.window
    if window is None or not isinstance(window.rows, Packed):
        return operands, jnp.stack([layer, layer])
    window = window._replace(rows=ring.read(window.rows, layer)[None])
    return operands._replace(window=window), jnp.stack([0 * layer, layer])


def live(plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Which rows of a sequence's tiles are seen, f32[R, tiles, tile], and its tiles, i32[R]."""
    window, entries = operands.window, operands.entries
    parts, count = [], jnp.full(plan.batch, plan.window_tiles, jnp.int32)

    def fill(seen: jax.Array) -> jax.Array:
        return jnp.pad(seen, ((0, 0), (0, -seen.shape[1] % plan.tile)))

    if window is not None:
        slot = jnp.arange(plan.window, dtype=jnp.int32)
        held = window.position[:, None] - (window.position[:, None] - slot) % plan.window
        parts.append(fill((held >= 0) & (held < window.stop[:, None])))
    if entries is not None and plan.picked:
        place = jnp.arange(plan.pick, dtype=jnp.int32)
        seen = (entries.picked[..., None] % plan.pick == place) & (entries.picked[..., None] >= 0)
        parts.append(fill(seen.reshape(plan.batch, -1)))
        count += -(-plan.wanted // plan.tile)
    elif entries is not None:
        index = jnp.arange(plan.wanted, dtype=jnp.int32)
        parts.append(fill(index < entries.visible[:, None]))
        count += -(-jnp.minimum(entries.visible, plan.wanted) // plan.tile)
    seen = jnp.concatenate(parts, axis=1).astype(jnp.float32)
    return seen.reshape(plan.batch, plan.tiles, plan.tile), count


def places(plan: Plan, view: paging.PageView, entries: Entries) -> tuple[jax.Array, jax.Array]:
    """Page and first row of every copy, i32[R, copies, 2] and valid ones all; and bool[R], where
    one that counts has none."""
    steps = -(-plan.wanted // plan.tile) * (plan.tile // plan.copy)
    if plan.picked:
        many = entries.picked.shape[1] * plan.pick // plan.copy
        index = entries.picked // plan.pick * plan.pick
        counts = entries.picked >= 0
        index = jnp.pad(jnp.maximum(index, 0), ((0, 0), (0, steps - many)))
        counts = jnp.pad(counts, ((0, 0), (0, steps - many)))
    else:
        index = jnp.arange(steps, dtype=jnp.int32) * plan.copy
        index = jnp.broadcast_to(index, (plan.batch, steps))
        counts = index < entries.visible[:, None]
    column = index // plan.page
    page = jnp.take_along_axis(view.table, column, axis=1, mode="fill", fill_value=-1)
    found = (page >= 0) & (page < plan.pages)
    where = jnp.stack([jnp.where(found, page, 0), index % plan.page], axis=-1)
    return where, jnp.any(counts & ~found, axis=1)


def join(
    out: jax.Array, top: jax.Array, total: jax.Array, sinks: jax.Array | None, plan: Plan
) -> jax.Array:
    """The softmax over the parts of all blocks, and the sinks: f32[R, H, c]."""
    if sinks is None:
        sink, weight = MASKED, 0.0
    else:
        sink = jnp.pad(sinks.astype(jnp.float32), (0, plan.groups * ROWS - plan.heads))
        sink, weight = jnp.tile(sink.reshape(plan.groups, ROWS), (plan.batch, 1)), 1.0
    best = jnp.maximum(jnp.max(top, axis=1), sink)
    share = jnp.exp(top - best[:, None])
    total = jnp.sum(total * share, axis=1) + weight * jnp.exp(sink - best)
    out = jnp.sum(out * share[..., None], axis=1) / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(plan.batch, -1, plan.width)[:, : plan.heads]
