"""Sizes, tables and masks of a chunk attention on a GPU: what its kernels need besides the rows."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from hetero_kv.kernels import paging
from hetero_kv.kernels.chunk_attention.operands import Operands, Rule
from hetero_kv.kernels.hopper import ROWS

FAR = 1 << 30  # more than any distance of positions


class Plan:
    """Sizes of a call.

    tile: rows of a tile. copy: rows of one TMA copy, the same for window and entries. A block has
    64 rows of queries x heads.
    """

    def __init__(self, rule: Rule, operands: Operands, tile: int):
        self.rule, self.tile = rule, tile
        self.batch, self.size, self.heads, self.channels = operands.q.shape
        self.dtypes = [operands.q.dtype]
        self.width = self.page = self.pages = self.capacity = 0
        self.sinks = operands.sinks is not None
        self.chosen = False
        copies = [tile]
        if (window := operands.window) is not None:
            self.width = window.rows.shape[2]
            self.dtypes.append(window.rows.dtype)
            copies.append(self.width)
        if (entries := operands.entries) is not None:
            view = jax.eval_shape(lambda x: paging.view(x, tile), entries.pool)
            self.page, self.pages, self.capacity = view.entries, view.pages.shape[1], view.capacity
            self.dtypes.append(view.pages.dtype)
            self.chosen = entries.chosen is not None
            copies.append(self.page)
        self.copy = math.gcd(*copies)
        self.blocks = -(-self.size * self.heads // ROWS)
        self.queries = max(1, ROWS // self.heads)  # of a block
        self.ring_tiles = -(-self.width // tile)
        self.own_tiles = -(-(self.width - 1 + self.queries) // tile) if self.width else 0


def places(plan: Plan, view: paging.PageView, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Page and first row of every copy, i32[R, copies, 2], all valid ones; and bool[R], where one
    that is read has none."""
    steps = -(-plan.capacity // plan.tile) * (plan.tile // plan.copy)
    index = jnp.arange(steps, dtype=jnp.int32) * plan.copy
    index = jnp.broadcast_to(index, (plan.batch, steps))
    visible = (operands.start + operands.count) // plan.rule.ratio
    counts = (index < visible[:, None]) & (operands.count > 0)[:, None]
    column = index // plan.page
    page = jnp.take_along_axis(view.table, column, axis=1, mode="fill", fill_value=-1)
    found = (page >= 0) & (page < plan.pages)
    where = jnp.stack([jnp.where(found, page, 0), index % plan.page], axis=-1)
    return where, jnp.any(counts & ~found & (index < plan.capacity), axis=1)


@dataclasses.dataclass
class Block:
    """The tiles of one block, as scalars: ring, own rows and entries come one after the other."""

    @classmethod
    def of(cls, plan: Plan, start: jax.Array, count: jax.Array, first: jax.Array) -> "Block":
        """This block, of a sequence's tokens before the call, its queries, and `Window.first`."""
        index = jax.lax.axis_index("block")
        query = jax.lax.div(index * ROWS, jnp.int32(plan.heads))
        last = jnp.minimum(query + plan.queries, count) - 1
        return cls(plan, start, jnp.int32(first), index, query, last, query < count)

    plan: Plan
    start: jax.Array
    first: jax.Array  # position from which on ring rows are there
    index: jax.Array
    query: jax.Array  # the first of the block
    last: jax.Array  # the last of it that runs
    runs: jax.Array  # whether any does

    def __post_init__(self):
        plan = self.plan
        zero = jnp.int32(0)
        near = self.query < plan.width - 1  # else the ring is out of sight
        self.ring = jnp.where(near, plan.ring_tiles, 0) if plan.width else zero
        self.offset = jnp.maximum(self.query - (plan.width - 1), 0)  # of own rows
        self.visible = zero
        if plan.page:
            seen = jax.lax.div(self.start + self.last + 1, jnp.int32(plan.rule.ratio))
            self.visible = jnp.minimum(seen, plan.capacity)
        self.window = self.ring + plan.own_tiles
        self.steps = self.window + jax.lax.div(self.visible + (plan.tile - 1), jnp.int32(plan.tile))

    @property
    def sinks(self) -> Any:
        """Where the sinks of the block's rows are."""
        first = jax.lax.rem(self.index * ROWS, jnp.int32(max(self.plan.heads, ROWS)))
        return pl.ds(pl.multiple_of(first, ROWS), ROWS)

    def positions(self, line: jax.Array) -> jax.Array:
        """Of the queries of rows i32[64] of the block: those of one query, or of several."""
        heads = self.plan.heads
        if heads >= ROWS:
            return line * 0 + self.start + self.query
        shift = jnp.full_like(line, heads.bit_length() - 1)  # a power of two
        return jax.lax.shift_right_logical(line, shift) + self.start + self.query

    def seen(self, tile: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For keys of a tile (`lane`, i32 of any shape): the first position that sees each, and
        whether it is there at all."""
        plan, start, size = self.plan, self.start, self.plan.tile
        ring, own = tile < self.ring, tile < self.window
        ratio = max(plan.rule.ratio, 1)
        newest = jax.lax.rem(start, jnp.int32(max(plan.width, 1)))  # the slot of `start` - W
        base = jnp.where(own, start + self.offset + (tile - self.ring) * size, 0)
        base = jnp.where(ring, start - newest + tile * size, base)
        entry = (tile - self.window) * size
        base = jnp.where(own, base, (entry + 1) * ratio - 1)
        step = jnp.where(own, 1, ratio)
        wrap = jnp.where(ring, plan.width, 0)
        low = jnp.where(ring, jnp.maximum(jnp.maximum(self.first, 0), start - plan.width + 1), 0)
        high = jnp.where(own, start + self.last + 1, self.visible * ratio)
        high = jnp.where(ring, start, high)
        most = jnp.where(ring, plan.width - tile * size, size)
        position = base + step * lane
        position -= jnp.where(lane + tile * size >= newest, wrap, 0)
        there = (position >= low) & (position < high) & (lane < most)
        return position, there

    def reach(self, tile: jax.Array) -> jax.Array:
        """Positions for which a key stays in sight."""
        return jnp.where(tile < self.window, self.plan.width, FAR)

    def begin_entry(self, tile: jax.Array) -> jax.Array:
        """The first entry of a tile; 0 for tiles of the window."""
        return jnp.maximum(tile - self.window, 0) * self.plan.tile

    def copies(
        self,
        refs: Sequence[Any],
        layer: jax.Array,
        row: jax.Array,
        tile: jax.Array,
        copy: Callable[[Any, int], None],
    ) -> None:
        """Calls copy(source, first row) for each copy of a tile: as many, whatever it is of.

        refs: ring and own rows, if there is a window; places and pages, if there are entries.
        """
        plan, many = self.plan, self.plan.tile // self.plan.copy

        def ring() -> None:
            for j in range(many):
                # A window shorter than a tile is repeated; what is repeated is not seen.
                first = jax.lax.rem((tile * many + j) * plan.copy, jnp.int32(plan.width))
                first = pl.multiple_of(first, plan.copy)
                copy(refs[0].at[layer, row, pl.ds(first, plan.copy), :], j * plan.copy)

        def own() -> None:
            begin = self.offset + (tile - self.ring) * plan.tile
            for j in range(many):
                at = j * plan.copy
                copy(refs[1].at[row, pl.ds(begin + at, plan.copy), :], at)

        def entries() -> None:
            places, pages = refs[-2:]
            for j in range(many):
                index = (tile - self.window) * many + j
                first = pl.multiple_of(places[row, index, 1], plan.copy)
                page = pages.at[layer, places[row, index, 0]]
                copy(page.at[pl.ds(first, plan.copy), :], j * plan.copy)

        def window() -> None:
            jax.lax.cond(tile < self.ring, ring, own)

        if not plan.page:
            window()
        elif not plan.width:
            entries()
        else:
            jax.lax.cond(tile < self.window, window, entries)
