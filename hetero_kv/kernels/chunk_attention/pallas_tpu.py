"""Chunk attention for Mosaic TPU: one grid step per block of queries, entries by its own copies.

All heads of a block's queries are the rows of one matrix. The ring is fetched by the grid's
pipeline, once per sequence; the call's own rows in one copy per block; entries (and the order keys
of what was chosen) follow in tiles, up to the last that a query of the block sees. One online
softmax in float32 runs over everything.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import checks, fetch_tpu, paging, tuning
from hetero_kv.kernels.chunk_attention.operands import Chosen, Entries, Operands, Rule
from hetero_kv.kernels.fetch_tpu import Fetch, Geometry, sublanes
from hetero_kv.packing import Packed

LANES = 128
ROWS = 1024  # queries x heads of a block, about: as many rows share each tile of keys
VMEM = 96 << 20  # bytes that a kernel may use
SIGN = np.int32(-(2**31))  # changes the order of u32 into that of i32
_NAME = "chunk_attention/pallas_tpu"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """queries: of a block; entries: attended at a time, about (whole pages)."""

    queries: int
    entries: int = 256

    def __post_init__(self):
        checks.count("tiles.queries", self.queries)
        checks.count("tiles.entries", self.entries, 8)


def key(operands: Operands) -> str:
    """The bucket of these shapes in the tuning table."""
    _, size, heads, width = operands.q.shape
    return tuning.bucket(heads=heads, width=width, size=size, dtype=str(operands.q.dtype))


def choose(operands: Operands) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    _, size, heads, _ = operands.q.shape
    queries = max(8, ROWS // heads)
    while queries > 1 and size % queries:
        queries //= 2
    picked = tuning.pick(_NAME, "tpu", key(operands), Tiles(queries))
    return picked if size % picked.queries == 0 else Tiles(queries)


def _geometry(entries: Entries, tiles: Tiles) -> Geometry:
    """Tiles of whole pages. Where queries have chosen, order keys are read in whole lanes: tiles
    that divide the capacity and are a multiple of 128, or everything at once."""
    found = Geometry.of(entries.pool, tiles.entries)
    if entries.chosen is None:
        return found
    columns = found.columns
    fits = [n for n in range(1, columns + 1) if columns % n == 0]
    fits = [n for n in fits if n * found.entries % LANES == 0 or n == columns]
    small = [n for n in fits if n * found.entries <= max(tiles.entries, LANES)]
    return dataclasses.replace(found, many=max(small) if small else min(fits))


def check(rule: Rule, operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    checks.tiles(tiles, Tiles)
    tiles = tiles or choose(operands)
    _, size, heads, width = operands.q.shape
    dtypes = [operands.q.dtype]
    if operands.window is not None and isinstance(operands.window.rows, Packed):
        raise NotImplementedError(f"{_NAME}: packed rows of a window are for the reference")
    if operands.window is not None:
        dtypes.append(operands.window.rows.dtype)
    if (entries := operands.entries) is not None:
        dtypes += [] if paging.packing(entries.pool) else [paging.dtype(entries.pool)]
    for dtype in dtypes:
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"{_NAME}: {dtype}; float32 and bfloat16 only")
    if size % tiles.queries:
        raise NotImplementedError(f"{_NAME}: {tiles.queries=} must divide the {size} of a call")
    rows = tiles.queries * heads
    keys = _geometry(entries, tiles).size if entries is not None else LANES
    chosen = entries is not None and entries.chosen is not None
    need = rows * (width * 28 + keys * 12) + keys * width * 16 + tiles.queries * keys * 8 * chosen
    if need > VMEM:
        raise NotImplementedError(
            f"{_NAME}: {tiles} need {need} bytes on the chip, of {VMEM}; use smaller tiles or pages"
        )
    if chosen and heads % 8 and tiles.queries > 1:
        raise NotImplementedError(f"{_NAME}: choices of {heads=}; a multiple of 8 is needed")


def run(
    rule: Rule, operands: Operands, *, tiles: Tiles | None = None, interpret: Any = False
) -> jax.Array:
    """See `api.chunk_attention`."""
    tiles = tiles or choose(operands)
    batch, size, heads, width = operands.q.shape
    queries = tiles.queries
    plan = _Plan(rule, queries, heads, size)
    scalars = [jnp.asarray(operands.layer, jnp.int32).reshape(1), operands.start, operands.count]
    # Rows of a block lie together: query by query, head by head.
    block = pl.BlockSpec((None, queries * heads, width), lambda r, b, *_: (r, b, 0))
    arrays, specs = [operands.q.reshape(batch, size * heads, width)], [block]
    scratch = [
        pltpu.VMEM((queries * heads, width), jnp.float32),
        pltpu.VMEM((queries * heads, 1), jnp.float32),
        pltpu.VMEM((queries * heads, 1), jnp.float32),
    ]
    if operands.sinks is not None:
        arrays.append(jnp.tile(operands.sinks.astype(jnp.float32), queries)[:, None])
        specs.append(pl.BlockSpec((queries * heads, 1), lambda r, b, *_: (0, 0)))
        plan.sinks = True
    if (window := operands.window) is not None:
        own = window.kv.astype(window.rows.dtype)
        align = sublanes(own.dtype)
        if size % align:
            own = jnp.pad(own, ((0, 0), (0, -size % align), (0, 0)))
        plan.width, plan.own, plan.align = window.rows.shape[2], own.shape[1], align
        scalars.append(window.first)
        arrays += [window.rows, own]
        ring = (None, None, plan.width, width)
        specs += [
            pl.BlockSpec(ring, lambda r, b, layer, *_: (layer[0], r, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ]
        scratch += [pltpu.VMEM((plan.band, width), own.dtype), pltpu.SemaphoreType.DMA(())]
    if (entries := operands.entries) is not None:
        plan.geometry = geometry = _geometry(entries, tiles)
        view = paging.view(entries.pool, tiles.entries)
        constants, blocks = geometry.constants()
        arrays += [view.table[:, None], view.pages, *constants]
        table = pl.BlockSpec(
            (None, 1, view.table.shape[1]), lambda r, b, *_: (r, 0, 0), memory_space=pltpu.SMEM
        )
        specs += [table, pl.BlockSpec(memory_space=pl.ANY), *blocks]
        scratch += geometry.scratch()
        plan.held = len(geometry.scratch())
        if entries.chosen is not None:
            plan.chosen = True
            arrays += _chosen(entries.chosen)
            column = pl.BlockSpec((None, queries, 1), lambda r, b, *_: (r, b, 0))
            specs += [pl.BlockSpec(memory_space=pl.ANY), column, column]
            scratch += [
                pltpu.VMEM((2, queries, geometry.size), jnp.uint32),
                pltpu.SemaphoreType.DMA((2,)),
            ]
    out = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, size // queries),
            in_specs=specs,
            out_specs=block,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, size * heads, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="chunk_attention",
    )(*scalars, *arrays)
    return out.reshape(batch, size, heads, width)


def _chosen(chosen: Chosen) -> list[jax.Array]:
    return [chosen.order, chosen.low[..., None], chosen.cut[..., None]]


@dataclasses.dataclass
class _Plan:
    """Static sizes, and which operands there are."""

    rule: Rule
    queries: int
    heads: int
    size: int  # queries of the call
    sinks: bool = False
    width: int = 0  # of the window
    own: int = 0  # rows of the call, padded
    align: int = 8
    geometry: Geometry | None = None
    held: int = 0  # scratch that `Fetch` takes
    chosen: bool = False

    @property
    def back(self) -> int:
        """Rows before a block that its queries see at most, in whole native tiles."""
        return -(-(self.width - 1) // self.align) * self.align

    @property
    def band(self) -> int:
        """Own rows that are copied for a block."""
        block = -(-self.queries // self.align) * self.align
        if self.queries % self.align and self.align % self.queries:
            block += self.align
        return min(self.own, self.back + block)


def _kernel(plan: _Plan, *refs) -> None:
    refs = list(refs)
    layer, start, count = refs.pop(0)[0], *(refs.pop(0)[pl.program_id(0)] for _ in range(2))
    first = refs.pop(0)[pl.program_id(0)] if plan.width else None
    r, begin = pl.program_id(0), pl.program_id(1) * plan.queries
    q = refs.pop(0)
    sinks = refs.pop(0) if plan.sinks else None
    ring, own = (refs.pop(0), refs.pop(0)) if plan.width else (None, None)
    table, pages = None, []
    if plan.geometry:
        held = 2 if plan.geometry.unpack else 1
        table, pages = refs.pop(0), [refs.pop(0) for _ in range(held)]
    order, low, cut = (refs.pop(0) for _ in range(3)) if plan.chosen else (None,) * 3
    out, *state = (refs.pop(0) for _ in range(4))
    band, arrived = (refs.pop(0), refs.pop(0)) if plan.width else (None, None)
    acc, top, total = state
    runs = begin < count

    @pl.when(jnp.logical_not(runs))
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(runs)
    def _():
        acc[...] = jnp.zeros_like(acc)
        top[...] = sinks[...] if plan.sinks else jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.full(total.shape, 1.0 if plan.sinks else 0.0, jnp.float32)
        position = start + begin + _query(plan)
        add = functools.partial(_add, state, q, plan.rule.scale)
        if plan.width:
            _add_own(plan, add, own.at[r], band, arrived, start, begin, position)

            @pl.when(begin < plan.width - 1)
            def _():
                _add_ring(plan, add, ring, start, first, position)

        if plan.geometry:
            ratio = plan.rule.ratio
            stop = start + jnp.minimum(count, begin + plan.queries)
            visible = jnp.minimum(
                jax.lax.div(stop, ratio), plan.geometry.columns * plan.geometry.entries
            )
            fetch = Fetch(plan.geometry, layer, visible, table, pages, *refs[: plan.held])
            source = fetch
            if plan.chosen:
                keys = order.at[r, pl.ds(begin, plan.queries)]
                source = _WithOrder(fetch, keys, *refs[plan.held :])

            def body(t: jax.Array, _: int) -> int:
                size = plan.geometry.size
                index = t * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
                # `index < (position + 1) // ratio` without a division of vectors.
                seen = ((index + 1) * ratio <= position + 1) & (index < visible)
                if plan.chosen:
                    picked = _picked(source.order(t), index, low[...], cut[...])
                    seen = seen & (_each_head(plan, picked) != 0)
                add(_clean(fetch.rows(t), fetch.seen(t, 0)), seen)
                return 0

            fetch_tpu.each_tile(source, fetch.tiles, body, 0)
        whole = total[...]
        out[...] = acc[...] / jnp.where(whole > 0, whole, 1.0)


def _query(plan: _Plan) -> jax.Array:
    """i32[rows, 1]: which query of the block each row belongs to."""
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.queries * plan.heads, 1), 0)
    if plan.heads & (plan.heads - 1) == 0:
        return jax.lax.shift_right_logical(row, jnp.int32(plan.heads.bit_length() - 1))
    # Exact for fewer than 2**23 rows: the nearest multiple is half a head away.
    return ((row.astype(jnp.float32) + 0.5) * (1.0 / plan.heads)).astype(jnp.int32)


def _add_own(plan: _Plan, add, own, band, arrived, start, begin, position) -> None:
    """The call's own rows that the block's queries see."""
    offset = begin - (begin & (plan.align - 1)) - plan.back
    offset = pl.multiple_of(jnp.clip(offset, 0, plan.own - plan.band), plan.align)
    source = own if plan.band == plan.own else own.at[pl.ds(offset, plan.band)]
    copy = pltpu.make_async_copy(source, band, arrived)
    copy.start()
    copy.wait()

    def column(axis: int) -> jax.Array:
        shape = (plan.band, 1) if axis == 0 else (1, plan.band)
        return offset + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    # Rows after the last query of the block are of nobody's concern, whatever they hold.
    live = column(0) < begin + plan.queries
    gap = position - (start + column(1))
    add(_clean(band[...], live), (gap >= 0) & (gap < plan.width))


def _add_ring(plan: _Plan, add, ring, start, first, position) -> None:
    """Rows from before the call."""
    width = plan.width
    newest = jax.lax.rem(start, width)  # the slot of `start`, which still holds start - W

    def held(axis: int) -> jax.Array:
        slot = jax.lax.broadcasted_iota(jnp.int32, (width, 1) if axis == 0 else (1, width), axis)
        return start - newest + slot - jnp.where(slot >= newest, width, 0)

    def live(at: jax.Array) -> jax.Array:
        return (at >= jnp.maximum(first, 0)) & (at > start - width)

    gap = position - held(1)
    add(_clean(ring[...], live(held(0))), live(held(1)) & (gap < width))


class _WithOrder:
    """Tiles of entries and, at the same time, of the order keys of the block's queries."""

    def __init__(self, fetch: Fetch, keys, buffer, semaphores):
        self.fetch, self.keys, self.buffer, self.semaphores = fetch, keys, buffer, semaphores

    def _copy(self, t: jax.Array) -> Any:
        size, slot = self.fetch.geometry.size, jax.lax.rem(t, 2)
        source = self.keys
        if size < source.shape[1]:
            source = source.at[:, pl.ds(pl.multiple_of(t * size, LANES), size)]
        return pltpu.make_async_copy(source, self.buffer.at[slot], self.semaphores.at[slot])

    def start(self, t: jax.Array) -> None:
        self.fetch.start(t)
        self._copy(t).start()

    def wait(self, t: jax.Array) -> None:
        self.fetch.wait(t)
        self._copy(t).wait()

    def order(self, t: jax.Array) -> jax.Array:
        """u32[queries, size]."""
        return self.buffer[jax.lax.rem(t, 2)]


def _picked(order: jax.Array, index: jax.Array, low: jax.Array, cut: jax.Array) -> jax.Array:
    """As `selection.chosen`, i32[queries, n]: 1 where chosen."""

    def signed(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32) ^ SIGN

    keys, low = signed(order), signed(low)
    picked = (keys != SIGN) & ((keys > low) | ((keys == low) & (index < cut)))
    return jnp.where(picked, 1, 0)


def _each_head(plan: _Plan, x: jax.Array) -> jax.Array:
    """x [queries, n] for every row of the block."""
    if plan.queries == 1:
        return x
    wide = jnp.broadcast_to(x[:, None], (plan.queries, plan.heads, x.shape[1]))
    return wide.reshape(plan.queries * plan.heads, x.shape[1])


def _clean(rows: jax.Array, live: jax.Array) -> jax.Array:
    """Zeroes rows [T, c] that are not live: a weight of 0 times NaN is NaN. In float32, since not
    every chip selects narrower ones."""
    return jnp.where(live, rows.astype(jnp.float32), 0.0)


def _add(state: list, q_ref, scale: float, rows: jax.Array, seen: jax.Array) -> None:
    """Adds finite rows [T, c], bool[queries x heads, T] of them seen."""
    acc, top, total = state
    q = q_ref[...]
    rows = rows.astype(q.dtype)
    scores = _dot(q, rows, 1) * scale
    old = top[...]
    new = jnp.maximum(old, jnp.max(jnp.where(seen, scores, MASKED), axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
    shrink = jnp.exp(old - new)
    acc[...] = acc[...] * shrink + _dot(weights.astype(q.dtype), rows, 0)
    total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    top[...] = new


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a [m, k] contracted with axis `axis` of b, in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
