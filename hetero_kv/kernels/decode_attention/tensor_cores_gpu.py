"""Decode attention of bfloat16 rows: products on tensor cores.

Picked entries come with the 8 rows that they lie among, since swizzled memory is written in groups
of 8; packed ones come alone.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import attend_gpu, hopper
from hetero_kv.kernels.decode_attention import tiles_gpu
from hetero_kv.kernels.decode_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import GROUP, ROWS
from hetero_kv.kernels.unpack_gpu import PIECE, Unpack

TILE = ROWS
PICK = COPY = GROUP  # rows that a picked one comes with; the least rows of a copy


def parts(plan: Plan) -> int:
    """Warpgroups that compute, each its own channels."""
    return 2 if plan.width % 128 == 0 else 1


def check(name: str, plan: Plan) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    if any(dtype != jnp.bfloat16 for dtype in plan.dtypes):
        raise NotImplementedError(
            f"{name}: bfloat16 queries and rows of {plan.dtypes[-1]}; rows must be bfloat16 too"
        )
    if plan.width % 64 or plan.width > 512:
        raise NotImplementedError(f"{name}: {plan.width} channels; a multiple of 64 up to 512")


def shared(plan: Plan, stages: int) -> int:
    """Bytes of shared memory."""
    buffers = tiles_gpu.make(plan, stages, parts(plan), _buffer(plan)).shared
    own = hopper.swizzled(ROWS, plan.width), hopper.swizzled(parts(plan), ROWS, ROWS)
    return buffers + hopper.size(own)


def kernel(plan: Plan, splits: int, stages: int, scale: float) -> Callable:
    """What a block runs."""
    tiles = tiles_gpu.make(plan, stages, parts(plan), _buffer(plan))

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, splits, tiles, scale, refs),
            hopper.swizzled(ROWS, plan.width),
            hopper.swizzled(parts(plan), ROWS, ROWS),
            tiles.memory(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=parts(plan)),
            collective_axes="wg",
        )

    return run


def _buffer(plan: Plan) -> Callable:
    return lambda stages: hopper.swizzled(stages, ROWS, plan.width)


def _body(plan, splits, tiles, scale, refs, q, weights, memory, arrived, clean) -> None:
    layers, count, live, q_all, *refs = refs
    *refs, out, tops, totals = refs
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    split, wg = jax.lax.axis_index("split"), jax.lax.axis_index("wg")
    block = row * plan.groups + group
    steps = jax.lax.div(count[row] - split + splits - 1, splits)
    tiles.bind(memory, refs, layers, row)
    columns = plan.width // parts(plan)

    @pl.when(wg == parts(plan))
    def _fetch():
        plgpu.copy_gmem_to_smem(q_all.at[block], q, arrived)

        def copy(source, rows, first: int, barrier) -> None:
            there = rows.at[pl.ds(first, source.shape[0]), :]
            plgpu.copy_gmem_to_smem(source, there, barrier)

        @pl.loop(0, steps)
        def _(i):
            tiles.fetch(i, split + i * splits, copy)

    @pl.when(wg < parts(plan))
    def _compute():
        plgpu.barrier_wait(arrived)
        pieces = attend_gpu.pieces(wg * columns, columns)

        def step(i, state):
            tile = split + i * splits
            seen = hopper.load(live.at[row, tile], attend_gpu.VECTOR)

            def unpack(raw, scratch) -> None:
                for part in range(parts(plan)):

                    @pl.when(wg == part)
                    def _(part=part) -> None:
                        for first in range(part * columns, (part + 1) * columns, PIECE):
                            values = Unpack(plan.packing).piece(raw, first, scratch)
                            there = tiles.rows(i).at[:, pl.ds(first, PIECE)]
                            there[...] = values.astype(jnp.bfloat16)

            tiles.wait(i, tile, unpack)
            attend_gpu.clean(tiles.rows(i), pieces, seen)
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)
            lane = hopper.load(live.at[row, tile], attend_gpu.ACROSS)
            seen = attend_gpu.spread(lane, 1) > 0.5
            state = attend_gpu.add(state, q, tiles.rows(i), weights.at[wg], pieces, seen, scale)
            tiles.done(i)
            return state

        state = jax.lax.fori_loop(0, steps, step, attend_gpu.begin([x.size for x in pieces]))
        for piece, value in zip(pieces, state.sums, strict=True):
            out[block, split, :, piece] = value

        @pl.when(wg == 0)
        def _():
            tops[block, split] = state.top
            totals[block, split] = state.total
