"""Decode attention of float32 queries: products without tensor cores, which round to 10 bits.

Rows may be float32 or bfloat16. Each warpgroup owns up to 128 channels: it adds up its part of the
scores of 8 rows at a time, and of the weighted rows. Parts of scores meet in shared memory, which
is used in turns, so that one barrier a tile is enough. Picked rows are copied one by one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import hopper
from hetero_kv.kernels.decode_attention import tiles_gpu
from hetero_kv.kernels.decode_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import ROWS
from hetero_kv.kernels.unpack_gpu import Unpack

TILE = 16
PICK = COPY = 1  # rows that a picked one comes with; the least rows of a copy
COLUMNS = 128  # of a warpgroup
STEP = 8  # channels, and rows, that are multiplied at a time


def parts(plan: Plan) -> int:
    """Warpgroups that compute, each its own channels."""
    return -(-plan.width // COLUMNS)


def check(name: str, plan: Plan) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    rows = set(plan.dtypes[1:])
    if len(rows) > 1 or not rows <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        raise NotImplementedError(
            f"{name}: float32 queries and rows of {sorted(map(str, rows))}; all float32, or all "
            "bfloat16"
        )
    if plan.width > 4 * COLUMNS or plan.width % (COLUMNS if plan.width > COLUMNS else 64):
        raise NotImplementedError(
            f"{name}: {plan.width} channels of float32; 64, or a multiple of {COLUMNS} up to 512"
        )
    if plan.packing and plan.packing.rope > plan.width // parts(plan):
        raise NotImplementedError(
            f"{name}: {plan.packing.rope} of {plan.width} channels stored as bfloat16; at most "
            f"{plan.width // parts(plan)}, since one warpgroup joins their bytes"
        )


def most_stages(plan: Plan) -> int:
    """As many tiles as there is room for, up to 2; 1 where there is room for none."""
    return 2 if shared(plan, 2) <= hopper.SHARED else 1


def shared(plan: Plan, stages: int) -> int:
    """Bytes of shared memory."""
    return hopper.size((_own(plan), _tiles(plan, stages).memory()))


def _own(plan: Plan) -> tuple:
    """Shared memory for queries and for parts of scores."""
    many, columns = parts(plan), plan.width // parts(plan)
    return (
        plgpu.SMEM((many, ROWS, columns), jnp.float32),
        plgpu.SMEM((2, many, TILE, ROWS), jnp.float32),
    )


def _tiles(plan: Plan, stages: int) -> tiles_gpu.Tiles:
    many, columns = parts(plan), plan.width // parts(plan)

    def buffer(stages: int):
        return plgpu.SMEM((stages, many, TILE, columns), plan.dtypes[-1])

    return tiles_gpu.make(plan, stages, many, buffer, many)


def kernel(plan: Plan, splits: int, stages: int, scale: float) -> Callable:
    """What a block runs."""
    many, tiles = parts(plan), _tiles(plan, stages)

    def run(*refs) -> None:
        pl.run_scoped(
            functools.partial(_body, plan, splits, tiles, scale, refs),
            *_own(plan),
            tiles.memory(),
            plgpu.Barrier(num_arrivals=many),
            plgpu.Barrier(num_arrivals=many),
            collective_axes="wg",
        )

    return run


def _body(plan, splits, tiles, scale, refs, q, sums, memory, arrived, joined) -> None:
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
        for part in range(many):
            source = q_all.at[block, :, pl.ds(part * columns, columns)]
            plgpu.copy_gmem_to_smem(source, q.at[part], arrived)

        def copy(source, rows, first: int, barrier) -> None:
            for part in range(many):
                there = rows.at[part, pl.ds(first, source.shape[0])]
                own = source.at[:, pl.ds(part * columns, columns)]
                plgpu.copy_gmem_to_smem(own, there, barrier)

        @pl.loop(0, steps)
        def _(i):
            tiles.fetch(i, split + i * splits, copy)

    vector, matrix = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    across = plgpu.Layout.WGMMA.reduce(0)

    def full_of(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def wide(x, width: int, axis: int):
        return jax.lax.broadcast_in_dim(x, (ROWS, width), [axis])

    @pl.when(wg < many)
    def _compute():
        plgpu.barrier_wait(arrived)

        def part_of_scores(i, first: int) -> list:
            """This warpgroup's part of the scores of STEP rows, f32[64] each."""

            def body(c, found):
                channels = pl.ds(pl.multiple_of(c * STEP, STEP), STEP)
                own = hopper.load(q.at[wg, :, channels], matrix)
                keys = [
                    hopper.load(tiles.rows(i).at[wg, first + j, channels], across)
                    for j in range(STEP)
                ]
                return [
                    old + own * wide(key.astype(jnp.float32), STEP, 1)
                    for old, key in zip(found, keys, strict=True)
                ]

            start = [full_of(0.0, (ROWS, STEP), matrix) for _ in range(STEP)]
            return [jnp.sum(x, axis=1) for x in jax.lax.fori_loop(0, columns // STEP, body, start)]

        def step(i, carry):
            tile, turn = split + i * splits, jax.lax.rem(i, 2)

            def unpack(raw, scratch) -> None:
                for part in range(many):

                    @pl.when(wg == part)
                    def _(part=part) -> None:
                        own = tiles.rows(i).at[part]
                        Unpack(plan.packing).fill(own, raw, part * columns, scratch)

            tiles.wait(i, tile, unpack)
            for first in range(0, TILE, STEP):
                for j, part in enumerate(part_of_scores(i, first)):
                    sums[turn, wg, first + j] = part
            plgpu.barrier_arrive(joined)
            plgpu.barrier_wait(joined)

            def add(first, carry):
                acc, top, total = carry
                seen, scores = [], []
                for j in range(STEP):
                    # A row that is not seen may be NaN: both it and its score are replaced.
                    seen.append(full_of(live[row, tile, first + j], (ROWS,), vector) > 0.5)
                    score = full_of(0.0, (ROWS,), vector)
                    for part in range(many):
                        score += hopper.load(sums.at[turn, part, first + j], vector)
                    scores.append(jnp.where(seen[j], score * scale, MASKED))
                new = functools.reduce(jnp.maximum, scores, top)
                shrink = jnp.exp(top - new)
                total, pieces = total * shrink, []
                weights = [
                    jnp.where(see, jnp.exp(score - new), 0.0)
                    for see, score in zip(seen, scores, strict=True)
                ]
                for weight in weights:
                    total += weight
                for p, old in enumerate(acc):
                    old = old * wide(shrink, old.shape[1], 0)
                    for j, weight in enumerate(weights):
                        there = tiles.rows(i).at[wg, first + j, pl.ds(p * 32, 32)]
                        key = hopper.load(there, across).astype(jnp.float32)
                        here = full_of(live[row, tile, first + j], (32,), across) > 0.5
                        key = jnp.where(here, key, 0.0)
                        old += wide(weight, 32, 0) * wide(key, 32, 1)
                    pieces.append(old)
                return pieces, new, total

            for first in range(0, TILE, STEP):
                carry = add(first, carry)
            plgpu.commit_smem()  # loads are over before a copy may write there
            tiles.done(i)
            return carry

        start = (
            [full_of(0.0, (ROWS, 32), matrix) for _ in range(columns // 32)],
            full_of(MASKED, (ROWS,), vector),
            full_of(0.0, (ROWS,), vector),
        )
        acc, top, total = jax.lax.fori_loop(0, steps, step, start)
        for p, value in enumerate(acc):
            channels = pl.ds(pl.multiple_of(wg * columns + p * 32, 32), 32)
            out[block, split, :, channels] = value

        @pl.when(wg == 0)
        def _():
            tops[block, split] = top
            totals[block, split] = total
