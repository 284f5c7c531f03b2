"""Decode attention for Mosaic GPU (Hopper and later): rows by TMA, products on tensor cores.

A block has one sequence, 64 heads and every S-th tile of 64 rows; one warpgroup fetches tiles, the
others each own a part of the channels. Picked entries come with the 8 rows that they lie among,
since swizzled memory is written in groups of 8. The softmaxes of the S parts are joined by XLA.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.attention.pool import Paged
from hetero_kv.kernels import hopper, paging, tuning
from hetero_kv.kernels.decode_attention.operands import Operands
from hetero_kv.kernels.hopper import GROUP, ROWS

BLOCKS = 132  # about one block per multiprocessor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """splits: blocks that share a sequence's rows; 0: as many as fill a device. stages: tiles in
    shared memory."""

    splits: int = 0
    stages: int = 2

    def __post_init__(self):
        if self.splits < 0 or self.stages < 2:
            raise ValueError(f"tiles: {self.splits=} must be >= 0 and {self.stages=} >= 2")


def key(operands: Operands) -> str:
    """The bucket of these shapes in the tuning table."""
    batch, heads, width = operands.q.shape
    return tuning.bucket(batch=batch, heads=heads, width=width, tiles=_Plan(operands).tiles)


def choose(operands: Operands) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    return tuning.pick("decode_attention/pallas_gpu", "cuda", key(operands), Tiles())


def check(operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    plan = _Plan(operands)
    for dtype in plan.dtypes:
        if dtype != jnp.bfloat16:
            raise NotImplementedError(
                f"decode_attention/pallas_gpu: {dtype}; bfloat16 only, since tensor cores round "
                "float32 to 10 bits"
            )
    if plan.width % 64 or plan.width > 512:
        raise NotImplementedError(
            f"decode_attention/pallas_gpu: {plan.width} channels; a multiple of 64 up to 512"
        )
    if plan.copy % GROUP or ROWS % plan.copy or plan.window % plan.copy:
        raise NotImplementedError(
            f"decode_attention/pallas_gpu: a window of {plan.window} rows and pages of "
            f"{plan.page} entries cannot be copied in equal groups of {GROUP} to {ROWS} rows"
        )


class _Plan:
    """Sizes of a call. copy: rows of one TMA copy, the same for window and entries."""

    def __init__(self, operands: Operands):
        self.batch, self.heads, self.width = operands.q.shape
        self.dtypes = [operands.q.dtype]
        self.window = self.page = self.wanted = 0
        self.picked = False
        copies = [ROWS]
        if operands.window is not None:
            self.window = operands.window.rows.shape[2]
            self.dtypes.append(operands.window.rows.dtype)
            copies.append(min(ROWS, self.window))
        if operands.entries is not None:
            pool = operands.entries.pool
            view = jax.eval_shape(lambda x: paging.view(x, ROWS), pool)
            self.page, self.pages = view.entries, view.pages.shape[1]
            self.dtypes.append(pool.pages.dtype if isinstance(pool, Paged) else pool.dtype)
            self.picked = operands.entries.picked is not None
            copies.append(GROUP if self.picked else min(ROWS, self.page))
            self.wanted = view.capacity
            if self.picked:
                self.wanted = operands.entries.picked.shape[1] * GROUP
        self.copy = min(copies)
        self.window_tiles = -(-self.window // ROWS)
        self.tiles = self.window_tiles + -(-self.wanted // ROWS)
        self.groups = -(-self.heads // ROWS)  # of heads
        self.parts = 2 if self.width % 128 == 0 else 1  # warpgroups that compute

    @property
    def columns(self) -> int:
        """Channels of one warpgroup."""
        return self.width // self.parts

    @property
    def piece(self) -> int:
        """Channels of one product: its result and the sum so far must fit the registers."""
        return 128 if self.columns % 128 == 0 else 64

    def splits(self, tiles: Tiles) -> int:
        """Blocks per sequence and group of heads."""
        wanted = tiles.splits or BLOCKS // (self.batch * self.groups)
        return max(1, min(wanted, self.tiles))


def run(
    operands: Operands, *, scale: float, tiles: Tiles | None = None, interpret: Any = None
) -> jax.Array:
    """See `api.decode_attention`."""
    tiles = tiles or choose(operands)
    plan, window, entries = _Plan(operands), operands.window, operands.entries
    splits = plan.splits(tiles)
    pad = plan.groups * ROWS - plan.heads
    q = jnp.pad(operands.q, ((0, 0), (0, pad), (0, 0))).reshape(-1, ROWS, plan.width)
    live, count = _live(plan, operands)
    arrays = [jnp.asarray(operands.layer, jnp.int32).reshape(1), count, live, q]
    bad = jnp.zeros(plan.batch, bool)
    if window is not None:
        arrays.append(window.rows)
    if entries is not None:
        view = paging.view(entries.pool, ROWS)
        places, bad = _places(plan, view, entries)
        arrays += [places, view.pages]

    parts = (plan.batch * plan.groups, splits, ROWS)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan, splits, tiles.stages, scale),
        out_type=(
            jax.ShapeDtypeStruct((*parts, plan.width), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(plan.batch, plan.groups, splits),
        grid_names=("row", "group", "split"),
        num_threads=plan.parts + 1,
        thread_name="wg",
        interpret=interpret,
    )
    out = _join(*kernel(*arrays), operands.sinks, plan)
    return jnp.where(bad[:, None, None], jnp.nan, out)


def _live(plan: _Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Which rows of a sequence's tiles are seen, f32[R, tiles, 64], and its tiles, i32[R]."""
    window, entries = operands.window, operands.entries
    parts, count = [], jnp.full(plan.batch, plan.window_tiles, jnp.int32)

    def fill(seen: jax.Array) -> jax.Array:
        return jnp.pad(seen, ((0, 0), (0, -seen.shape[1] % ROWS)))

    if window is not None:
        slot = jnp.arange(plan.window, dtype=jnp.int32)
        held = window.position[:, None] - (window.position[:, None] - slot) % plan.window
        parts.append(fill((held >= 0) & (held < window.stop[:, None])))
    if entries is not None and plan.picked:
        place = jnp.arange(GROUP, dtype=jnp.int32)
        seen = (entries.picked[..., None] % GROUP == place) & (entries.picked[..., None] >= 0)
        parts.append(fill(seen.reshape(plan.batch, -1)))
        count += -(-plan.wanted // ROWS)
    elif entries is not None:
        index = jnp.arange(plan.wanted, dtype=jnp.int32)
        parts.append(fill(index < entries.visible[:, None]))
        count += -(-jnp.minimum(entries.visible, plan.wanted) // ROWS)
    live = jnp.concatenate(parts, axis=1).astype(jnp.float32)
    return live.reshape(plan.batch, plan.tiles, ROWS), count


def _places(plan: _Plan, view: paging.PageView, entries) -> tuple[jax.Array, jax.Array]:
    """Page and first row of every copy, i32[R, copies, 2] and valid ones all; and bool[R], where
    one that counts has none."""
    steps = -(-plan.wanted // ROWS) * (ROWS // plan.copy)
    if plan.picked:
        many = entries.picked.shape[1] * GROUP // plan.copy
        index = entries.picked // GROUP * GROUP
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
    places = jnp.stack([jnp.where(found, page, 0), index % plan.page], axis=-1)
    return places, jnp.any(counts & ~found, axis=1)


def _join(out, top, total, sinks, plan: _Plan) -> jax.Array:
    """The softmax over all parts and the sinks: f32[R, H, c]."""
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


def _kernel(plan: _Plan, splits: int, stages: int, scale: float, *refs) -> None:
    pl.run_scoped(
        functools.partial(_body, plan, splits, stages, scale, refs),
        hopper.swizzled(ROWS, plan.width),
        hopper.swizzled(stages, ROWS, plan.width),
        hopper.swizzled(plan.parts, ROWS, ROWS),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=ROWS // plan.copy, num_barriers=stages),
        plgpu.Barrier(num_arrivals=plan.parts, num_barriers=stages),
        plgpu.Barrier(num_arrivals=plan.parts),
        collective_axes="wg",
    )


def _body(plan, splits, stages, scale, refs, q, rows, weights, arrived, full, free, clean) -> None:
    layer, count, live, q_all, *refs = refs
    *refs, out, tops, totals = refs
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    split, wg = jax.lax.axis_index("split"), jax.lax.axis_index("wg")
    block = row * plan.groups + group
    steps = jax.lax.div(count[row] - split + splits - 1, splits)

    @pl.when(wg == plan.parts)
    def _fetch():
        plgpu.copy_gmem_to_smem(q_all.at[block], q, arrived)

        @pl.loop(0, steps)
        def _(i):
            slot = jax.lax.rem(i, stages)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            _copy_tile(plan, refs, layer[0], row, split + i * splits, rows.at[slot], full.at[slot])

    @pl.when(wg < plan.parts)
    def _compute():
        plgpu.barrier_wait(arrived)
        pieces = [
            pl.ds(pl.multiple_of(wg * plan.columns + j, 64), plan.piece)
            for j in range(0, plan.columns, plan.piece)
        ]
        vector, matrix = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

        def step(i, carry):
            acc, top, total = carry
            slot, tile = jax.lax.rem(i, stages), split + i * splits
            plgpu.barrier_wait(full.at[slot])
            # Rows that are not seen may be NaN, and 0 times NaN is NaN: each zeroes its own part.
            seen = hopper.load(live.at[row, tile], vector)
            seen = jax.lax.broadcast_in_dim(seen, (ROWS, plan.piece), [0])
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

            accumulator = plgpu.ACC((ROWS, plan.piece), jnp.float32)
            less = jax.lax.broadcast_in_dim(shrink, (ROWS, plan.piece), [0])
            acc = [
                old * less + pl.run_scoped(functools.partial(product, piece), accumulator)
                for old, piece in zip(acc, pieces, strict=True)
            ]
            plgpu.barrier_arrive(free.at[slot])
            return acc, new, total * shrink + jnp.sum(p, axis=1)

        def full_of(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        start = (
            [full_of(0.0, (ROWS, plan.piece), matrix) for _ in pieces],
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


def _copy_tile(plan, refs, layer, row, tile, target, barrier) -> None:
    """Copies one tile: the same number of copies, of `copy` rows, whether window or entries."""
    many = ROWS // plan.copy

    def window() -> None:
        rows = refs[0]
        for j in range(many):
            # A window shorter than a tile is repeated; what is repeated is not seen.
            first = jax.lax.rem((tile * many + j) * plan.copy, plan.window)
            first = pl.multiple_of(first, GROUP)
            source = rows.at[layer, row, pl.ds(first, plan.copy), :]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(j * plan.copy, plan.copy), :], barrier)

    def entries() -> None:
        places, pages = refs[-2:]
        for j in range(many):
            at = (tile - plan.window_tiles) * many + j
            first = pl.multiple_of(places[row, at, 1], GROUP)
            source = pages.at[layer, places[row, at, 0], pl.ds(first, plan.copy), :]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(j * plan.copy, plan.copy), :], barrier)

    if not plan.page:
        window()
    elif not plan.window:
        entries()
    else:
        jax.lax.cond(tile < plan.window_tiles, window, entries)
