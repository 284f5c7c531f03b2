"""Chunk attention for Mosaic GPU (Hopper and later): rows by TMA, products on tensor cores.

A block has 64 rows of queries x heads of one sequence. One warpgroup fetches tiles of 64 keys: of
the ring, of the call's own rows, then of entries, up to the last that the block sees; two others
each own half of the channels.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import hopper, paging
from hetero_kv.kernels.chunk_attention.operands import Operands, Rule
from hetero_kv.kernels.hopper import GROUP, ROWS, swizzled

LANES = 64  # channels of a unit of swizzled memory
STAGES = 2  # tiles in shared memory
PARTS = 2  # warpgroups that compute
FAR = 1 << 30  # more than any distance of positions
_NAME = "chunk_attention/pallas_gpu"


def check(rule: Rule, operands: Operands) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    _, _, heads, width = operands.q.shape
    plan = _Plan(rule, operands)
    for dtype in plan.dtypes:
        if dtype != jnp.bfloat16:
            raise NotImplementedError(
                f"{_NAME}: {dtype}; bfloat16 only, since tensor cores round float32 to 10 bits"
            )
    if width % (PARTS * LANES) or width > 512:
        raise NotImplementedError(f"{_NAME}: {width} channels; a multiple of 128 up to 512")
    if heads % ROWS and (ROWS % heads or heads & (heads - 1)):
        raise NotImplementedError(f"{_NAME}: {heads=}; a divisor of {ROWS} or a multiple")
    if plan.copy % GROUP:
        raise NotImplementedError(
            f"{_NAME}: a window of {plan.width} rows and pages of {plan.page} entries cannot be "
            f"copied in equal groups of {GROUP} to {ROWS} rows"
        )
    if plan.chosen and (heads % ROWS or plan.capacity % ROWS):
        raise NotImplementedError(
            f"{_NAME}: choices of {heads=} among {plan.capacity} entries; multiples of {ROWS} only"
        )


class _Plan:
    """Sizes of a call. copy: rows of one TMA copy, the same for window and entries."""

    def __init__(self, rule: Rule, operands: Operands):
        self.rule = rule
        self.batch, self.size, self.heads, self.channels = operands.q.shape
        self.dtypes = [operands.q.dtype]
        self.width = self.page = self.pages = self.capacity = 0
        self.sinks = operands.sinks is not None
        self.chosen = False
        copies = [ROWS]
        if (window := operands.window) is not None:
            self.width = window.rows.shape[2]
            self.dtypes.append(window.rows.dtype)
            copies.append(self.width)
        if (entries := operands.entries) is not None:
            view = jax.eval_shape(lambda x: paging.view(x, ROWS), entries.pool)
            self.page, self.pages, self.capacity = view.entries, view.pages.shape[1], view.capacity
            self.dtypes.append(view.pages.dtype)
            self.chosen = entries.chosen is not None
            copies.append(self.page)
        self.copy = math.gcd(*copies)
        self.blocks = -(-self.size * self.heads // ROWS)
        self.queries = max(1, ROWS // self.heads)  # of a block
        self.ring_tiles = -(-self.width // ROWS)
        self.own_tiles = -(-(self.width - 1 + self.queries) // ROWS) if self.width else 0

    @property
    def columns(self) -> int:
        """Channels of one warpgroup."""
        return self.channels // PARTS


def run(rule: Rule, operands: Operands, interpret: Any = None) -> jax.Array:
    """See `api.chunk_attention`."""
    plan, window, entries = _Plan(rule, operands), operands.window, operands.entries
    rows = plan.size * plan.heads
    q = operands.q.reshape(plan.batch, rows, plan.channels)
    q = jnp.pad(q, ((0, 0), (0, plan.blocks * ROWS - rows), (0, 0))) if rows % ROWS else q
    sinks = operands.sinks
    sinks = jnp.full(plan.heads, MASKED) if sinks is None else sinks.astype(jnp.float32)
    repeats = -(-ROWS // plan.heads)
    layer = jnp.asarray(operands.layer, jnp.int32).reshape(1)
    arrays = [layer, operands.start, operands.count, jnp.tile(sinks, repeats), q]
    bad = jnp.zeros(plan.batch, bool)
    if window is not None:
        own = window.kv.astype(window.rows.dtype)
        more = plan.own_tiles * ROWS  # a block's tiles may go beyond the last row
        arrays += [window.first, window.rows, jnp.pad(own, ((0, 0), (0, more), (0, 0)))]
    if entries is not None:
        view = paging.view(entries.pool, ROWS)
        places, bad = _places(plan, view, operands)
        if plan.chosen:
            chosen = entries.chosen
            arrays += [chosen.order, chosen.low, chosen.cut]
        arrays += [places, view.pages]
    out = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.batch, plan.blocks * ROWS, plan.channels), jnp.float32),
        grid=(plan.batch, plan.blocks),
        grid_names=("row", "block"),
        num_threads=PARTS + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*arrays)
    out = jnp.where(bad[:, None, None], jnp.nan, out[:, :rows])
    return out.reshape(operands.q.shape)


def _places(plan: _Plan, view: paging.PageView, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Page and first row of every copy, i32[R, copies, 2], all valid ones; and bool[R], where one
    that is read has none."""
    steps = -(-plan.capacity // ROWS) * (ROWS // plan.copy)
    index = jnp.arange(steps, dtype=jnp.int32) * plan.copy
    index = jnp.broadcast_to(index, (plan.batch, steps))
    visible = (operands.start + operands.count) // plan.rule.ratio
    counts = (index < visible[:, None]) & (operands.count > 0)[:, None]
    column = index // plan.page
    page = jnp.take_along_axis(view.table, column, axis=1, mode="fill", fill_value=-1)
    found = (page >= 0) & (page < plan.pages)
    places = jnp.stack([jnp.where(found, page, 0), index % plan.page], axis=-1)
    return places, jnp.any(counts & ~found & (index < plan.capacity), axis=1)


def _kernel(plan: _Plan, *refs) -> None:
    pl.run_scoped(
        functools.partial(_body, plan, refs),
        swizzled(ROWS, plan.channels),
        swizzled(STAGES, ROWS, plan.channels),
        swizzled(PARTS, ROWS, ROWS),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=ROWS // plan.copy, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=PARTS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=PARTS),
        collective_axes="wg",
    )


@dataclasses.dataclass
class _Block:
    """The tiles of one block, as scalars: ring, own rows and entries come one after the other."""

    plan: _Plan
    start: jax.Array
    first: jax.Array  # position from which on ring rows are there
    query: jax.Array  # the first of the block
    last: jax.Array  # the last of it that runs

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
        self.steps = self.window + jax.lax.div(self.visible + (ROWS - 1), jnp.int32(ROWS))

    def seen(self, tile: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each key of a tile (i32[64] `lane`): the first position that sees it, and whether
        it is there at all."""
        plan, start = self.plan, self.start
        ring, own = tile < self.ring, tile < self.window
        ratio = max(plan.rule.ratio, 1)
        newest = jax.lax.rem(start, jnp.int32(max(plan.width, 1)))  # the slot of `start` - W
        base = jnp.where(own, start + self.offset + (tile - self.ring) * ROWS, 0)
        base = jnp.where(ring, start - newest + tile * ROWS, base)
        entry = (tile - self.window) * ROWS
        base = jnp.where(own, base, (entry + 1) * ratio - 1)
        step = jnp.where(own, 1, ratio)
        wrap = jnp.where(ring, plan.width, 0)
        low = jnp.where(ring, jnp.maximum(jnp.maximum(self.first, 0), start - plan.width + 1), 0)
        high = jnp.where(own, start + self.last + 1, self.visible * ratio)
        high = jnp.where(ring, start, high)
        most = jnp.where(ring, plan.width - tile * ROWS, ROWS)
        position = base + step * lane
        position -= jnp.where(lane + tile * ROWS >= newest, wrap, 0)
        there = (position >= low) & (position < high) & (lane < most)
        return position, there

    def reach(self, tile: jax.Array) -> jax.Array:
        """Positions for which a key stays in sight."""
        return jnp.where(tile < self.window, self.plan.width, FAR)


def _body(plan: _Plan, refs, q, rows, weights, arrived, full, free, clean) -> None:
    layer, start, count, sinks, q_all, *refs = refs
    *refs, out = refs
    row, block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
    wg = jax.lax.axis_index("wg")
    first = refs.pop(0)[row] if plan.width else jnp.int32(0)
    query = jax.lax.div(block * ROWS, jnp.int32(plan.heads))
    last = jnp.minimum(query + plan.queries, count[row]) - 1
    at = _Block(plan, start[row], first, query, last)
    runs = query < count[row]
    place = pl.ds(pl.multiple_of(block * ROWS, ROWS), ROWS)

    @pl.when(runs & (wg == PARTS))
    def _fetch():
        plgpu.copy_gmem_to_smem(q_all.at[row, place], q, arrived)

        @pl.loop(0, at.steps)
        def _(i):
            slot = jax.lax.rem(i, STAGES)

            @pl.when(i >= STAGES)
            def _():
                plgpu.barrier_wait(free.at[slot])

            _copy_tile(at, refs, layer[0], row, i, rows.at[slot], full.at[slot])

    columns = pl.ds(pl.multiple_of(wg * plan.columns, LANES), plan.columns)
    vector, matrix = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    across = plgpu.Layout.WGMMA.reduce(0)

    def full_of(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    @pl.when(jnp.logical_not(runs) & (wg < PARTS))
    def _padding():
        out[row, place, columns] = full_of(0.0, (ROWS, plan.columns), matrix)

    @pl.when(runs & (wg < PARTS))
    def _compute():
        plgpu.barrier_wait(arrived)
        line = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=vector)
        lane = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=across)
        shift = plan.heads.bit_length() - 1  # 64 rows are of one query, or of a power of two
        own_query = jax.lax.shift_right_logical(line, jnp.full_like(line, shift))
        position = at.start + query + (own_query if plan.heads < ROWS else line * 0)

        def spread(x, axis):
            return jax.lax.broadcast_in_dim(x, (ROWS, ROWS), [axis])

        def step(i, carry):
            acc, top, total = carry
            slot = jax.lax.rem(i, STAGES)
            plgpu.barrier_wait(full.at[slot])
            # Rows that are not there may be NaN, and 0 times NaN is NaN: each zeroes its own part.
            part = rows.at[slot, :, columns]
            _, there = at.seen(i, line)
            there = jax.lax.broadcast_in_dim(jnp.where(there, 1.0, 0.0), (ROWS, plan.columns), [0])
            part[...] = jnp.where(there > 0.5, part[...], jnp.bfloat16(0.0))
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)

            def score(acc):
                plgpu.wgmma(acc, q, rows.at[slot].transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(score, plgpu.ACC((ROWS, ROWS), jnp.float32))
            scores = scores * plan.rule.scale
            begins, there = at.seen(i, lane)
            there = jnp.where(there, 1.0, 0.0)
            if plan.chosen:
                there *= _picked(at, refs, row, query, i, lane, across)
            gap = spread(position, 0) - spread(begins, 1)
            live = (gap >= 0) & (gap < at.reach(i)) & (spread(there, 1) > 0.5)
            scores = jnp.where(live, scores, MASKED)
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            p = jnp.where(live, jnp.exp(scores - spread(new, 0)), 0.0)
            shrink = jnp.exp(top - new)
            weights[wg] = p.astype(jnp.bfloat16)
            plgpu.commit_smem()

            def product(acc):
                plgpu.wgmma(acc, weights.at[wg], part)
                return acc[...]

            more = pl.run_scoped(product, plgpu.ACC((ROWS, plan.columns), jnp.float32))
            acc = acc * jax.lax.broadcast_in_dim(shrink, (ROWS, plan.columns), [0]) + more
            plgpu.barrier_arrive(free.at[slot])
            return acc, new, total * shrink + jnp.sum(p, axis=1)

        head = pl.multiple_of(jax.lax.rem(block * ROWS, jnp.int32(max(plan.heads, ROWS))), ROWS)
        sink = hopper.load(sinks.at[pl.ds(head, ROWS)], vector)
        one = full_of(1.0 if plan.sinks else 0.0, (ROWS,), vector)
        begin = full_of(0.0, (ROWS, plan.columns), matrix), sink, one
        acc, _, total = jax.lax.fori_loop(0, at.steps, step, begin)
        total = jnp.where(total > 0.0, total, 1.0)
        out[row, place, columns] = acc / jax.lax.broadcast_in_dim(total, (ROWS, plan.columns), [0])


def _picked(at: _Block, refs, row, query, tile, lane, layout) -> jax.Array:
    """f32[64]: 1 for keys of a window, and for entries that the block's query has chosen."""
    order, low, cut = refs[-5:-2]
    entry = jnp.maximum(tile - at.window, 0) * ROWS
    source = order.at[row, query, pl.ds(pl.multiple_of(entry, ROWS), ROWS)]
    keys = hopper.load(source, layout)
    low, cut = low[row, query], cut[row, query]
    chosen = (keys > low) | ((keys == low) & (entry + lane < cut))
    chosen = jnp.where(chosen & (keys != 0), 1.0, 0.0)
    return jnp.maximum(chosen, jnp.where(tile < at.window, 1.0, 0.0))


def _copy_tile(at: _Block, refs, layer, row, tile, target, barrier) -> None:
    """Copies one tile: the same number of copies, of `copy` rows, whatever it is of."""
    plan = at.plan
    many = ROWS // plan.copy

    def copy(source, j: int) -> None:
        there = target.at[pl.ds(j * plan.copy, plan.copy), :]
        plgpu.copy_gmem_to_smem(source, there, barrier)

    def ring() -> None:
        for j in range(many):
            # A window shorter than a tile is repeated; what is repeated is not seen.
            first = jax.lax.rem((tile * many + j) * plan.copy, jnp.int32(plan.width))
            first = pl.multiple_of(first, GROUP)
            copy(refs[0].at[layer, row, pl.ds(first, plan.copy), :], j)

    def own() -> None:
        begin = at.offset + (tile - at.ring) * ROWS
        for j in range(many):
            copy(refs[1].at[row, pl.ds(begin + j * plan.copy, plan.copy), :], j)

    def entries() -> None:
        places, pages = refs[-2:]
        for j in range(many):
            index = (tile - at.window) * many + j
            first = pl.multiple_of(places[row, index, 1], GROUP)
            copy(pages.at[layer, places[row, index, 0], pl.ds(first, plan.copy), :], j)

    def window() -> None:
        jax.lax.cond(tile < at.ring, ring, own)

    if not plan.page:
        window()
    elif not plan.width:
        entries()
    else:
        jax.lax.cond(tile < at.window, window, entries)
