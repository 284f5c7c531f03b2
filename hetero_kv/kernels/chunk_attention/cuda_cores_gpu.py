"""Chunk attention of float32 rows: products without tensor cores, which round to 10 bits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import attend_cuda_gpu, hopper
from hetero_kv.kernels.attend_cuda_gpu import PIECE, TILE
from hetero_kv.kernels.attend_gpu import VECTOR, filled, spread
from hetero_kv.kernels.buffers_gpu import Buffers
from hetero_kv.kernels.chunk_attention.plan_gpu import Block, Plan
from hetero_kv.kernels.hopper import ROWS

__all__ = ["COPY", "TILE", "check", "kernel", "parts"]

COPY = 1  # the least rows of a copy
STAGES = 2  # tiles in shared memory


def parts(plan: Plan) -> int:
    """Warpgroups that compute, each its own channels."""
    return attend_cuda_gpu.parts(plan.channels)


def check(name: str, plan: Plan) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    attend_cuda_gpu.check(name, plan.channels)


def kernel(plan: Plan) -> Callable:
    """What a block runs."""
    many = parts(plan)
    buffer = attend_cuda_gpu.buffer(plan.channels, jnp.float32)
    buffers = Buffers(STAGES, many * (TILE // plan.copy), many, buffer)

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, buffers, refs),
            attend_cuda_gpu.memory(plan.channels),
            buffers.memory(),
            plgpu.Barrier(num_arrivals=many),
            collective_axes="wg",
        )

    return run


def _body(plan, buffers, refs, own, held, arrived) -> None:
    layer, start, count, sinks, q_all, *refs = refs
    *refs, out = refs
    row, wg, many = jax.lax.axis_index("row"), jax.lax.axis_index("wg"), parts(plan)
    at = Block.of(plan, start[row], count[row], refs.pop(0)[row] if plan.width else 0)
    place = pl.ds(pl.multiple_of(at.index * ROWS, ROWS), ROWS)

    @pl.when(at.runs & (wg == many))
    def _fetch():
        attend_cuda_gpu.copy(q_all.at[row, place], own[0], 0, arrived)

        @pl.loop(0, at.steps)
        def _(i):
            def begin(rows, barrier) -> None:
                def copy(source, first: int) -> None:
                    attend_cuda_gpu.copy(source, rows, first, barrier)

                at.copies(refs, layer[0], row, i, copy)

            buffers.fetch(held, i, begin)

    columns = plan.channels // many

    def channels(p: int):
        return pl.ds(pl.multiple_of(wg * columns + p * PIECE, PIECE), PIECE)

    @pl.when(jnp.logical_not(at.runs) & (wg < many))
    def _padding():
        for p in range(columns // PIECE):
            out[row, place, channels(p)] = filled(0.0, (ROWS, PIECE), plgpu.Layout.WGMMA)

    @pl.when(at.runs & (wg < many))
    def _compute():
        plgpu.barrier_wait(arrived)
        position = at.positions(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=VECTOR))

        bounds = _bounds(refs, row, at) if plan.chosen else ()

        def step(i, state):
            buffers.wait(held, i)

            def there(j: int) -> jax.Array:
                return jnp.where(at.seen(i, jnp.int32(j))[1], 1.0, 0.0)

            def seen(j: int) -> jax.Array:
                here = there(j) * _picked(at, refs, row, i, j, bounds) if plan.chosen else there(j)
                gap = position - at.seen(i, jnp.int32(j))[0]
                live = (gap >= 0) & (gap < at.reach(i))
                return live & (filled(here, (ROWS,), VECTOR) > 0.5)

            rows, turn = buffers.rows(held, i), jax.lax.rem(i, 2)
            scale = plan.rule.scale
            state = attend_cuda_gpu.add(state, own, rows, wg, turn, seen, there, scale)
            buffers.done(held, i)
            return state

        sink = hopper.load(sinks.at[at.sinks], VECTOR)
        state = attend_cuda_gpu.begin(plan.channels, sink, float(plan.sinks))
        state = jax.lax.fori_loop(0, at.steps, step, state)
        total = jnp.where(state.total > 0.0, state.total, 1.0)
        for p, value in enumerate(state.sums):
            out[row, place, channels(p)] = value / spread(total, 0, PIECE)


def _bounds(refs, row, at: Block) -> tuple[jax.Array, jax.Array]:
    """`Chosen.low` and `Chosen.cut` of the block's query."""
    low, cut = refs[-4:-2]
    return low[row, at.query], cut[row, at.query]


def _picked(at: Block, refs, row, tile, j: int, bounds: tuple) -> jax.Array:
    """f32[]: 1 for a key of a window, and for an entry that the block's query has chosen."""
    order, (low, cut) = refs[-5], bounds
    entry = at.begin_entry(tile) + j
    key = order[row, at.query, entry]
    chosen = (key > low) | ((key == low) & (entry < cut))
    return jnp.where((chosen & (key != 0)) | (tile < at.window), 1.0, 0.0)
