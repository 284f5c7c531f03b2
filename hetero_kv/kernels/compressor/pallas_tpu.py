"""The compressor's store for TPUs (Mosaic).

The grid is (rows, tiles of entries). A tile in which nothing closes moves no bytes. Else the raw
rows of its groups come by DMA, those before the call from the ring and the others from the call's
own rows; entries are made side by side (short ratios) or one after another (long ones), and the
tile's page is read, changed and written back.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.kernels import tuning
from hetero_kv.kernels.compressor import plan as plans
from hetero_kv.kernels.compressor.reference import Pooling

SIDE_BY_SIDE = 16  # the longest ratio of which a tile's entries are made side by side
NATIVE = 8  # rows of a native tile of float32
LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """entries: of one page that are read, changed and written at a time."""

    entries: int


def tiles(how: Pooling, pages: jax.Array) -> Tiles:
    """All entries of a page, or 32 (whole native tiles of every dtype) where they divide it."""
    entries = pages.shape[2]
    heuristic = Tiles(entries if entries % 32 else 32)
    key = tuning.bucket(entries=entries, width=how.width, ratio=how.ratio, dtype=how.dtype)
    picked = tuning.pick("compressor/pallas_tpu", "tpu", key, heuristic)
    valid = entries % picked.entries == 0 and (
        picked.entries % 32 == 0 or picked.entries == entries
    )
    return picked if valid else heuristic


def check(how: Pooling, pool: Pool, layer: Any, norm: Any, tail: Any, raw: Any, *_: Any) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    if how.width % LANES:
        raise NotImplementedError(f"entries of {how.width} channels; need a multiple of {LANES}")
    entries = tiles(how, plans.pages(pool)).entries
    size = (entries if how.ratio <= SIDE_BY_SIDE else 1) * how.ratio + how.keep
    if 4 * size * 2 * how.series * 4 > 1 << 25:
        raise NotImplementedError(
            f"tiles of {entries} entries of {how.width} channels do not fit on the chip; use pages "
            "of a multiple of 32 entries"
        )


def store(
    how: Pooling,
    pool: Pool,
    layer: jax.Array,
    norm: jax.Array,
    tail: jax.Array,
    raw: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    interpret: Any = False,
) -> Pool:
    """See `api.store`."""
    pages = plans.pages(pool)
    tile = tiles(how, pages).entries
    size = 1 if raw is None else raw.shape[1]
    plan = plans.plan(how, pool, start, count, size, tile)
    held = start if raw is not None else start + 1  # tokens whose rows are in the ring
    lanes = min(how.width, -(-how.rope.dim // LANES) * LANES) if how.rope.dim else 0
    turn = plans.turns(how, plan.first, tile, lanes) if lanes else ()
    raws = () if raw is None else (_padded(raw),)
    body = _Body(how, tile, raws[0].shape[1] if raws else 0, lanes)
    scalars = (layer.reshape(1), start, held, *plan)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    new = pl.pallas_call(
        functools.partial(_kernel, body, bool(raws), bool(turn)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=plan.first.shape,
            in_specs=[
                pl.BlockSpec((1, how.width), lambda r, t, *_: (0, 0)),
                *[pl.BlockSpec((1, 1, tile, lanes), lambda r, t, *_: (r, t, 0, 0)) for _ in turn],
                anywhere,
                *[anywhere for _ in raws],
                anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((how.held, 2 * how.series), jnp.float32),
                pltpu.VMEM((2 * how.series // LANES, body.buffer, LANES), jnp.float32),
                pltpu.VMEM((tile, how.width), jnp.float32),
                pltpu.VMEM((tile, how.width), pages.dtype),
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + 2 + len(turn) + len(raws): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2,
            has_side_effects=True,
            vmem_limit_bytes=64 << 20,
        ),
        interpret=interpret,
        name="compressor_store",
    )(*scalars, norm.astype(jnp.float32)[None], *turn, tail, *raws, pages)
    return pool._replace(pages=new) if isinstance(pool, Paged) else new


def _padded(raw: jax.Array) -> jax.Array:
    """Rows to a multiple of a native tile, so that any aligned window of them can be copied."""
    more = -raw.shape[1] % NATIVE
    return jnp.pad(raw, ((0, 0), (0, more), (0, 0))) if more else raw


@dataclasses.dataclass(frozen=True)
class _Body:
    """Static sizes. A group is what is made at a time: a whole tile, or a single entry."""

    how: Pooling
    tile: int
    size: int  # rows of the call; 0: all rows are in the ring
    lanes: int

    @property
    def side_by_side(self) -> bool:
        return self.how.ratio <= SIDE_BY_SIDE

    @property
    def group(self) -> int:
        return self.tile if self.side_by_side else 1

    @property
    def rows(self) -> int:
        """Raw rows of a group."""
        return self.group * self.how.ratio + self.how.keep

    @property
    def window(self) -> int:
        """Rows that are copied for a group: a few more, for alignment."""
        return min(self.size, -(-self.rows // NATIVE) * NATIVE + NATIVE)

    @property
    def front(self) -> int:
        """Rows of the buffer before the window: a group may begin before the call's rows."""
        return -(-self.rows // NATIVE) * NATIVE

    @property
    def buffer(self) -> int:
        return 2 * self.front + self.window


def _kernel(body: _Body, has_raw: bool, has_turn: bool, *refs):
    layer, start, held, first, low, high, page, place = refs[:8]
    rest = list(refs[8:])
    norm = rest.pop(0)
    turn = (rest.pop(0), rest.pop(0)) if has_turn else None
    tail = rest.pop(0)
    raw = rest.pop(0) if has_raw else None
    _, pool, ring, rows, made, stored, done = rest
    r, t = pl.program_id(0), pl.program_id(1)
    how, tile, one = body.how, body.tile, layer[0]

    @pl.when(low[r, t] < high[r, t])
    def _():
        there = pool.at[one, page[r, t]]
        if tile < pool.shape[2]:
            there = there.at[pl.ds(pl.multiple_of(place[r, t], tile), tile)]
        read = pltpu.make_async_copy(there, stored, done.at[0])
        read.start()

        # A row's later tiles begin after the ring, and do not read it again.
        @pl.when((first[r, t] + low[r, t]) * how.ratio - how.keep < held[r])
        def _():
            copy = pltpu.make_async_copy(tail.at[one, r], ring, done.at[1])
            copy.start()
            copy.wait()

        def make(entry: jax.Array, at: jax.Array) -> None:
            """Entries `entry ..` of a group, into `made` from row `at` on."""
            begin = entry * how.ratio - how.keep
            shift = body.front
            if has_raw:
                offset = begin - start[r]
                aligned = offset - (offset & (NATIVE - 1))  # down, also below zero
                source = jnp.clip(aligned, 0, max(body.size - body.window, 0))
                source = pl.multiple_of(source, NATIVE)
                window = raw.at[r]
                if body.window < body.size:
                    window = window.at[pl.ds(source, body.window)]
                copies = [
                    pltpu.make_async_copy(
                        window.at[:, pl.ds(c * LANES, LANES)],
                        rows.at[c, pl.ds(body.front, body.window)],
                        done.at[2],
                    )
                    for c in range(rows.shape[0])
                ]
                for copy in copies:
                    copy.start()
                for copy in copies:
                    copy.wait()
                shift = body.front + jnp.clip(offset - source, -body.front, body.window)
            pooled = _pooled(body, ring, rows if has_raw else None, shift, entry, held[r])
            made[pl.ds(at, body.group), :] = _normed(how, pooled, norm)

        if body.group == tile:
            make(first[r, t], 0)
        else:
            jax.lax.fori_loop(
                low[r, t], high[r, t], lambda k, _: (make(first[r, t] + k, k), None)[1], None
            )
        new = made[...]
        if turn is not None:
            new = _rotated(how, new, turn[0][0, 0], turn[1][0, 0], body.lanes)
        read.wait()
        row = jax.lax.broadcasted_iota(jnp.int32, new.shape, 0)
        mine = (row >= low[r, t]) & (row < high[r, t])
        old = stored[...]
        stored[...] = jnp.where(mine, new, old.astype(jnp.float32)).astype(old.dtype)
        write = pltpu.make_async_copy(stored, there, done.at[0])
        write.start()
        write.wait()


def _normed(how: Pooling, pooled: jax.Array, norm) -> jax.Array:
    mean = jnp.mean(jnp.square(pooled), axis=-1, keepdims=True)
    return pooled * jax.lax.rsqrt(mean + how.eps) * norm[...]


def _rotated(how: Pooling, x: jax.Array, cos: jax.Array, sin: jax.Array, lanes: int) -> jax.Array:
    """Rotates the last channels of x [n, width]; neighbours are exchanged by rolling lanes."""
    tail = x[:, how.width - lanes :]
    lane = jax.lax.broadcasted_iota(jnp.int32, tail.shape, 1)
    even = (lane - (lanes - how.rope.dim)) & 1 == 0
    other = jnp.where(even, pltpu.roll(tail, lanes - 1, 1), pltpu.roll(tail, 1, 1))
    turned = tail * cos + other * sin
    if lanes == how.width:
        return turned
    return jnp.concatenate([x[:, : how.width - lanes], turned], axis=1)


def _pooled(body: _Body, ring, rows, shift, entry: jax.Array, held: jax.Array) -> jax.Array:
    """Entries `entry ..` before the norm, f32[group, width], lane column by lane column.

    Rows of positions below `held` are in the ring, others (rows None: there are none) in the
    buffer, where row `shift` is the first that the first group needs.
    """
    how, load = body.how, _side_by_side if body.side_by_side else _one
    number = entry + jax.lax.broadcasted_iota(jnp.int32, (body.group, 1), 0)
    columns = []
    for lane in range(0, how.width, LANES):
        kv, gate = [], []
        for back, channel in _series(how):
            at = shift + how.keep - back * how.ratio
            part = functools.partial(load, how, ring, rows, at, number - back, held)
            absent = number < back
            kv += [jnp.where(absent, 0.0, x) for x in part(channel + lane)]
            gate += [jnp.where(absent, -jnp.inf, x) for x in part(how.series + channel + lane)]
        top = functools.reduce(jnp.maximum, [_over_rows(body, jnp.max, x) for x in gate])
        weight = [jnp.exp(x - top) for x in gate]
        summed = sum(_over_rows(body, jnp.sum, w * x) for w, x in zip(weight, kv, strict=True))
        columns.append(summed / sum(_over_rows(body, jnp.sum, w) for w in weight))
    return jnp.concatenate(columns, axis=1)


def _over_rows(body: _Body, reduce: Callable, x: jax.Array) -> jax.Array:
    """Reduces what `_one` loads to one row; `_side_by_side` loads one row per group already."""
    return x if body.side_by_side else reduce(x, axis=0, keepdims=True)


def _side_by_side(
    how: Pooling, ring, rows, at, block: jax.Array, held: jax.Array, channel: int
) -> list[jax.Array]:
    """The rows of groups i32[n, 1] `block`, one row of every group at a time: f32[n, LANES] each.

    at: the buffer's row of the first group's first row; channel: the first of a lane column.
    """
    columns, found = pl.ds(channel, LANES), []
    for j in range(how.ratio):
        x = ring[j : j + 1, columns]
        if how.overlap:
            x = jnp.where(block & 1 == 1, ring[how.ratio + j : how.ratio + j + 1, columns], x)
        if rows is not None:
            own = rows[channel // LANES, pl.ds(at + j, block.shape[0], stride=how.ratio), :]
            x = jnp.where(block * how.ratio + j < held, x, own)
        found.append(jnp.broadcast_to(x, (block.shape[0], LANES)))
    return found


def _one(
    how: Pooling, ring, rows, at, block: jax.Array, held: jax.Array, channel: int
) -> list[jax.Array]:
    """All rows of group i32[1, 1] `block`, f32[ratio, LANES]; arguments as in `_side_by_side`."""
    columns, ratio = pl.ds(channel, LANES), how.ratio
    x = ring[pl.ds(0, ratio), columns]
    if how.overlap:
        x = jnp.where(block & 1 == 1, ring[pl.ds(ratio, ratio), columns], x)
    if rows is not None:
        # Rows cannot be loaded from where no native tile begins; they can be rolled there.
        window = rows[channel // LANES]
        own = pltpu.roll(window, window.shape[0] - at, 0)[:ratio]
        position = block * ratio + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        x = jnp.where(position < held, x, own)
    return [x]


def _series(how: Pooling) -> list[tuple[int, int]]:
    """Groups that an entry pools, the earlier first: how many back, and the first channel of kv."""
    return [(1, 0), (0, how.width)] if how.overlap else [(0, 0)]
