"""Decode attention of float32 queries: products without tensor cores.

Rows may be float32 or bfloat16. Picked rows are copied one by one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import attend_cuda_gpu, hopper
from hetero_kv.kernels.attend_cuda_gpu import PIECE, TILE
from hetero_kv.kernels.attend_gpu import VECTOR, filled
from hetero_kv.kernels.decode_attention import tiles_gpu
from hetero_kv.kernels.decode_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import ROWS
from hetero_kv.kernels.unpack_gpu import Unpack

PICK = COPY = 1  # rows that a picked one comes with; the least rows of a copy


def parts(plan: Plan) -> int:
    """Warpgroups that compute, each its own channels."""
    return attend_cuda_gpu.parts(plan.width)


def check(name: str, plan: Plan) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    rows = set(plan.dtypes[1:])
    if len(rows) > 1 or not rows <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        raise NotImplementedError(
            f"{name}: float32 queries and rows of {sorted(map(str, rows))}; all float32, or all "
            "bfloat16"
        )
    attend_cuda_gpu.check(name, plan.width)


def shared(plan: Plan, stages: int) -> int:
    """Bytes of shared memory."""
    return hopper.size((attend_cuda_gpu.memory(plan.width), _tiles(plan, stages).memory()))


def _tiles(plan: Plan, stages: int) -> tiles_gpu.Tiles:
    buffer = attend_cuda_gpu.buffer(plan.width, plan.dtypes[-1])
    return tiles_gpu.make(plan, stages, parts(plan), buffer, parts(plan))


def kernel(plan: Plan, splits: int, stages: int, scale: float) -> Callable:
    """What a block runs."""
    tiles = _tiles(plan, stages)

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, splits, tiles, scale, refs),
            attend_cuda_gpu.memory(plan.width),
            tiles.memory(),
            plgpu.Barrier(num_arrivals=parts(plan)),
            collective_axes="wg",
        )

    return run


def _body(plan, splits, tiles, scale, refs, own, memory, arrived) -> None:
    layers, count, live, q_all, *refs = refs
    *refs, out, tops, totals = refs
    many, columns = parts(plan), plan.width // parts(plan)
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    split, wg = jax.lax.axis_index("split"), jax.lax.axis_index("wg")
    block = row * plan.groups + group
    steps = jax.lax.div(count[row] - split + splits - 1, splits)
    tiles.bind(memory, refs, layers, row)

    @pl.when(wg == many)
    def _fetch():
        attend_cuda_gpu.copy(q_all.at[block], own[0], 0, arrived)

        @pl.loop(0, steps)
        def _(i):
            tiles.fetch(i, split + i * splits, attend_cuda_gpu.copy)

    @pl.when(wg < many)
    def _compute():
        plgpu.barrier_wait(arrived)

        def step(i, state):
            tile = split + i * splits

            def unpack(raw, scratch) -> None:
                for part in range(many):

                    @pl.when(wg == part)
                    def _(part=part) -> None:
                        there = tiles.rows(i).at[part]
                        Unpack(plan.packing).fill(there, raw, part * columns, scratch)

            tiles.wait(i, tile, unpack)

            def there(j: int) -> jax.Array:
                return live[row, tile, j]

            def seen(j: int) -> jax.Array:
                return filled(there(j), (ROWS,), VECTOR) > 0.5

            rows, turn = tiles.rows(i), jax.lax.rem(i, 2)
            state = attend_cuda_gpu.add(state, own, rows, wg, turn, seen, there, scale)
            tiles.done(i)
            return state

        state = jax.lax.fori_loop(0, steps, step, attend_cuda_gpu.begin(plan.width))
        for p, value in enumerate(state.sums):
            channels = pl.ds(pl.multiple_of(wg * columns + p * PIECE, PIECE), PIECE)
            out[block, split, :, channels] = value

        @pl.when(wg == 0)
        def _():
            tops[block, split] = state.top
            totals[block, split] = state.total


__all__ = ["COPY", "PICK", "TILE", "check", "kernel", "parts", "shared"]
