"""Decode attention of bfloat16 rows: products on tensor cores.

Picked entries come with the 8 rows that they lie among, since swizzled memory is written in groups
of 8.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import hopper
from hetero_kv.kernels.decode_attention import fetch_gpu
from hetero_kv.kernels.decode_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import GROUP, ROWS

TILE = ROWS
PICK = COPY = GROUP  # rows that a picked one comes with; the least rows of a copy


def parts(plan: Plan) -> int:
    """Warpgroups that compute, each its own channels."""
    return 2 if plan.width % 128 == 0 else 1


def check(name: str, plan: Plan, stages: int) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    if any(dtype != jnp.bfloat16 for dtype in plan.dtypes):
        raise NotImplementedError(
            f"{name}: bfloat16 queries and rows of {plan.dtypes[-1]}; rows must be bfloat16 too"
        )
    if plan.width % 64 or plan.width > 512:
        raise NotImplementedError(f"{name}: {plan.width} channels; a multiple of 64 up to 512")


def kernel(plan: Plan, splits: int, stages: int, scale: float) -> Callable:
    """What a block runs."""

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, splits, stages, scale, refs),
            hopper.swizzled(ROWS, plan.width),
            hopper.swizzled(stages, ROWS, plan.width),
            hopper.swizzled(parts(plan), ROWS, ROWS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=ROWS // plan.copy, num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts(plan), num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts(plan)),
            collective_axes="wg",
        )

    return run


def _body(plan, splits, stages, scale, refs, q, rows, weights, arrived, full, free, clean) -> None:
    layer, count, live, q_all, *refs = refs
    *refs, out, tops, totals = refs
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    split, wg = jax.lax.axis_index("split"), jax.lax.axis_index("wg")
    block = row * plan.groups + group
    steps = jax.lax.div(count[row] - split + splits - 1, splits)

    @pl.when(wg == parts(plan))
    def _fetch():
        plgpu.copy_gmem_to_smem(q_all.at[block], q, arrived)

        @pl.loop(0, steps)
        def _(i):
            slot = jax.lax.rem(i, stages)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            def copy(source, j: int, slot=slot) -> None:
                target = rows.at[slot, pl.ds(j * plan.copy, plan.copy), :]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

            fetch_gpu.tile(plan, refs, layer[0], row, split + i * splits, copy)

    @pl.when(wg < parts(plan))
    def _compute():
        plgpu.barrier_wait(arrived)
        columns = plan.width // parts(plan)
        width = 128 if columns % 128 == 0 else 64  # a product and its sum must fit the registers
        pieces = [
            pl.ds(pl.multiple_of(wg * columns + j, 64), width) for j in range(0, columns, width)
        ]
        vector, matrix = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

        def step(i, carry):
            acc, top, total = carry
            slot, tile = jax.lax.rem(i, stages), split + i * splits
            plgpu.barrier_wait(full.at[slot])
            # Rows that are not seen may be NaN, and 0 times NaN is NaN: each zeroes its own part.
            seen = hopper.load(live.at[row, tile], vector)
            seen = jax.lax.broadcast_in_dim(seen, (ROWS, width), [0])
            for piece in pieces:
                own = rows.at[slot, :, piece]
                own[...] = jnp.where(seen > 0.5, own[...], jnp.bfloat16(0.0))
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)

            def score(acc):
                plgpu.wgmma(acc, q, rows.at[slot].transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(score, plgpu.ACC((ROWS, ROWS), jnp.float32)) * scale
            across = plgpu.Layout.WGMMA.reduce(0)
            lane = hopper.load(live.at[row, tile], across)
            lane = jax.lax.broadcast_in_dim(lane, (ROWS, ROWS), [1])
            scores = jnp.where(lane > 0.5, scores, MASKED)
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            wide = jax.lax.broadcast_in_dim(new, (ROWS, ROWS), [0])
            p = jnp.where(lane > 0.5, jnp.exp(scores - wide), 0.0)
            shrink = jnp.exp(top - new)
            weights[wg] = p.astype(jnp.bfloat16)
            plgpu.commit_smem()

            def product(piece, acc):
                plgpu.wgmma(acc, weights.at[wg], rows.at[slot, :, piece])
                return acc[...]

            accumulator = plgpu.ACC((ROWS, width), jnp.float32)
            less = jax.lax.broadcast_in_dim(shrink, (ROWS, width), [0])
            acc = [
                old * less + pl.run_scoped(functools.partial(product, piece), accumulator)
                for old, piece in zip(acc, pieces, strict=True)
            ]
            plgpu.barrier_arrive(free.at[slot])
            return acc, new, total * shrink + jnp.sum(p, axis=1)

        def full_of(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        start = (
            [full_of(0.0, (ROWS, width), matrix) for _ in pieces],
            full_of(MASKED, (ROWS,), vector),
            full_of(0.0, (ROWS,), vector),
        )
        acc, top, total = jax.lax.fori_loop(0, steps, step, start)
        for piece, value in zip(pieces, acc, strict=True):
            out[block, split, :, piece] = value

        @pl.when(wg == 0)
        def _():
            tops[block, split] = top
            totals[block, split] = total
