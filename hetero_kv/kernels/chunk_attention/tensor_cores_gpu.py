"""Chunk attention of bfloat16 rows: products on tensor cores."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import attend_gpu, hopper
from hetero_kv.kernels.attend_gpu import ACROSS, VECTOR, filled, spread
from hetero_kv.kernels.buffers_gpu import Buffers
from hetero_kv.kernels.chunk_attention.plan_gpu import Block, Plan
from hetero_kv.kernels.hopper import GROUP, ROWS, swizzled

TILE = ROWS
COPY = GROUP  # the least rows of a copy
STAGES = 2  # tiles in shared memory
PARTS = 2  # warpgroups that compute, each its own channels


def parts(plan: Plan) -> int:
    """Warpgroups that compute."""
    del plan
    return PARTS


def check(name: str, plan: Plan) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    if plan.channels % (PARTS * 64) or plan.channels > 512:
        raise NotImplementedError(
            f"{name}: {plan.channels} channels; a multiple of {PARTS * 64} up to 512"
        )


def kernel(plan: Plan) -> Callable:
    """What a block runs."""
    buffers = Buffers(
        STAGES, TILE // plan.copy, PARTS, lambda stages: swizzled(stages, TILE, plan.channels)
    )

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, buffers, refs),
            swizzled(ROWS, plan.channels),
            swizzled(PARTS, ROWS, ROWS),
            buffers.memory(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=PARTS),
            collective_axes="wg",
        )

    return run


def _body(plan, buffers, refs, q, weights, held, arrived, clean) -> None:
    layer, start, count, sinks, q_all, *refs = refs
    *refs, out = refs
    row, wg = jax.lax.axis_index("row"), jax.lax.axis_index("wg")
    at = Block.of(plan, start[row], count[row], refs.pop(0)[row] if plan.width else 0)
    place = pl.ds(pl.multiple_of(at.index * ROWS, ROWS), ROWS)

    @pl.when(at.runs & (wg == PARTS))
    def _fetch():
        plgpu.copy_gmem_to_smem(q_all.at[row, place], q, arrived)

        @pl.loop(0, at.steps)
        def _(i):
            def begin(rows, barrier) -> None:
                def copy(source, first: int) -> None:
                    there = rows.at[pl.ds(first, plan.copy), :]
                    plgpu.copy_gmem_to_smem(source, there, barrier)

                at.copies(refs, layer[0], row, i, copy)

            buffers.fetch(held, i, begin)

    columns = plan.channels // PARTS
    pieces = attend_gpu.pieces(wg * columns, columns)

    @pl.when(jnp.logical_not(at.runs) & (wg < PARTS))
    def _padding():
        for piece in pieces:
            out[row, place, piece] = filled(0.0, (ROWS, piece.size), plgpu.Layout.WGMMA)

    @pl.when(at.runs & (wg < PARTS))
    def _compute():
        plgpu.barrier_wait(arrived)
        line = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=VECTOR)
        lane = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ACROSS)
        position = at.positions(line)

        def step(i, state):
            rows = buffers.rows(held, i)
            buffers.wait(held, i)
            _, there = at.seen(i, line)
            attend_gpu.clean(rows, pieces, jnp.where(there, 1.0, 0.0))
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)
            begins, there = at.seen(i, lane)
            there = jnp.where(there, 1.0, 0.0)
            if plan.chosen:
                there *= _picked(at, refs, row, i, lane)
            gap = spread(position, 0) - spread(begins, 1)
            live = (gap >= 0) & (gap < at.reach(i)) & (spread(there, 1) > 0.5)
            state = attend_gpu.add(state, q, rows, weights.at[wg], pieces, live, plan.rule.scale)
            buffers.done(held, i)
            return state

        sink = hopper.load(sinks.at[at.sinks], VECTOR)
        state = attend_gpu.begin([x.size for x in pieces], sink, float(plan.sinks))
        state = jax.lax.fori_loop(0, at.steps, step, state)
        total = jnp.where(state.total > 0.0, state.total, 1.0)
        for piece, value in zip(pieces, state.sums, strict=True):
            out[row, place, piece] = value / spread(total, 0, piece.size)


def _picked(at: Block, refs, row, tile, lane) -> jax.Array:
    """f32[64]: 1 for keys of a window, and for entries that the block's query has chosen."""
    order, low, cut = refs[-5:-2]
    entry = at.begin_entry(tile)
    source = order.at[row, at.query, pl.ds(pl.multiple_of(entry, ROWS), ROWS)]
    keys = hopper.load(source, ACROSS)
    low, cut = low[row, at.query], cut[row, at.query]
    chosen = (keys > low) | ((keys == low) & (entry + lane < cut))
    chosen = jnp.where(chosen & (keys != 0), 1.0, 0.0)
    return jnp.maximum(chosen, jnp.where(tile < at.window, 1.0, 0.0))
