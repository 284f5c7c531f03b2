"""Decode attention for Mosaic TPU: one grid step per sequence, entries by copies of its own.

The window is fetched by the grid's pipeline; entries follow in tiles, whole pages where all are
attended. One online softmax in float32 runs over everything.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import checks, fetch_tpu, paging, tuning
from hetero_kv.kernels.decode_attention.operands import Entries, Operands
from hetero_kv.kernels.decode_attention.picks_tpu import PickFetch, Picks
from hetero_kv.kernels.fetch_tpu import Fetch, Geometry
from hetero_kv.packing import Packed


@dataclasses.dataclass(frozen=True)
class Tiles:
    """entries, picks: attended at a time, where all are attended and where some are picked."""

    entries: int = 512
    picks: int = 128

    def __post_init__(self):
        checks.counts("tiles", self, 8)
        for name, value in dataclasses.asdict(self).items():
            if value & (value - 1):
                raise ValueError(f"tiles.{name}={value} must be a power of two")


def key(operands: Operands) -> str:
    """The bucket of these shapes in the tuning table."""
    heads, width = operands.q.shape[1:]
    return tuning.bucket(heads=heads, width=width, dtype=jnp.dtype(_dtypes(operands)[-1]).name)


def choose(operands: Operands) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    # Scores and weights of a tile are [heads, entries] float32: 256 KiB each at most.
    entries = max(64, min(512, 65536 // max(64, operands.q.shape[1])))
    return tuning.pick("decode_attention/pallas_tpu", "tpu", key(operands), Tiles(entries=entries))


def _dtypes(operands: Operands) -> list:
    """Of the query, the window and the pool, as far as they are there."""
    found = [operands.q.dtype]
    if operands.window is not None:
        found.append(operands.window.rows.dtype)
    if operands.entries is not None:
        found.append(paging.dtype(operands.entries.pool))
    return found


def check(operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    checks.tiles(tiles, Tiles)
    if operands.window is not None and isinstance(operands.window.rows, Packed):
        raise NotImplementedError(
            "decode_attention/pallas_tpu: packed rows of a window are for the reference"
        )
    packed = operands.entries is not None and paging.packing(operands.entries.pool)
    for dtype in _dtypes(operands)[: -1 if packed else None]:
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(
                f"decode_attention/pallas_tpu: {dtype}; float32 and bfloat16 only"
            )
    source = _source(operands.entries, tiles or Tiles())
    if isinstance(source, Picks):
        source.check()


def _source(entries: Entries | None, tiles: Tiles) -> Picks | Geometry | None:
    if entries is None:
        return None
    geometry = Geometry.of(entries.pool, tiles.entries)
    if entries.picked is None:
        return geometry
    wanted = entries.picked.shape[1]
    many = min(tiles.picks, -(-wanted // 8) * 8)
    return Picks(geometry, many, -(-wanted // many))


def run(
    operands: Operands, *, scale: float, tiles: Tiles | None = None, interpret: Any = False
) -> jax.Array:
    """See `api.decode_attention`."""
    tiles = tiles or choose(operands)
    rows, heads, width = operands.q.shape
    source = _source(operands.entries, tiles)
    scalars = [jnp.asarray(operands.layer, jnp.int32).reshape(1)]
    arrays, specs = [operands.q], [pl.BlockSpec((None, heads, width), lambda r, *_: (r, 0, 0))]
    if operands.sinks is not None:
        arrays.append(operands.sinks.astype(jnp.float32)[:, None])
        specs.append(pl.BlockSpec((heads, 1), lambda r, *_: (0, 0)))
    if (window := operands.window) is not None:
        scalars += [window.position, window.stop]
        arrays.append(window.rows)
        block = (None, None, window.rows.shape[2], width)
        specs.append(pl.BlockSpec(block, lambda r, layer, *_: (layer[0], r, 0, 0)))
    if (entries := operands.entries) is not None:
        view = paging.view(entries.pool, tiles.entries)
        scalars.append(jnp.minimum(entries.visible, view.capacity))
        geometry = source.geometry if isinstance(source, Picks) else source
        constants, blocks = geometry.constants()
        arrays += [view.table[:, None], view.pages, *constants]
        specs += [fetch_tpu.table_spec(view.table.shape[1]), pl.BlockSpec(memory_space=pl.ANY)]
        specs += blocks
    if isinstance(source, Picks):
        pad = source.tiles * source.many - entries.picked.shape[1]
        picked = jnp.pad(entries.picked, ((0, 0), (0, pad)), constant_values=-1)
        # Twice: as scalars, which say what to copy, and as lanes, which say what is there.
        arrays += [picked[:, None], picked.reshape(rows, source.tiles, source.many)]
        specs += [fetch_tpu.table_spec(picked.shape[1])]
        specs += [pl.BlockSpec((None, source.tiles, source.many), lambda r, *_: (r, 0, 0))]
    accumulator = pltpu.VMEM((heads, width), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, operands.sinks is not None, window is not None, source, scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows,),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, heads, width), lambda r, *_: (r, 0, 0)),
            scratch_shapes=[accumulator, *(source.scratch() if source else [])],
        ),
        out_shape=jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="hybrid_decode_attention",
    )(*scalars, *arrays)


def _kernel(
    has_sinks: bool, has_window: bool, source: Picks | Geometry | None, scale: float, *refs
) -> None:
    refs = list(refs)
    row, layer = pl.program_id(0), refs.pop(0)[0]
    if has_window:
        position, stop = refs.pop(0)[row], refs.pop(0)[row]
    visible = refs.pop(0)[row] if source else None
    q = refs.pop(0)[...]
    shape = (q.shape[0], 1)
    if has_sinks:
        state = refs.pop(0)[...], jnp.ones(shape, jnp.float32)
    else:
        state = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    window = refs.pop(0) if has_window else None
    table, pages = None, []
    if source:
        geometry = source.geometry if isinstance(source, Picks) else source
        table, pages = refs.pop(0), [refs.pop(0) for _ in range(2 if geometry.unpack else 1)]
    picked, lanes = (refs.pop(0), refs.pop(0)) if isinstance(source, Picks) else (None, None)
    out, acc, *scratch = refs
    acc[...] = jnp.zeros_like(acc)

    if has_window:
        size = window.shape[0]

        def seen(axis: int) -> jax.Array:
            slot = jax.lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
            newest = jax.lax.rem(position, size)  # the slot of `position`
            held = position - newest + slot - jnp.where(slot > newest, size, 0)
            return (held >= 0) & (held < stop)

        state = _add(state, acc, q, _clean(window[...], seen(0)), seen(1), scale)

    if isinstance(source, Picks):
        fetch = PickFetch(source, layer, table, pages, picked, *scratch)

        def body(t: jax.Array, state: tuple) -> tuple:
            return _add(state, acc, q, fetch.rows(t), lanes[pl.ds(t, 1), :] >= 0, scale)

        state = fetch_tpu.each_tile(fetch, source.tiles, body, state)
    elif source:
        fetch = Fetch(source, layer, visible, table, pages, *scratch)

        def body(t: jax.Array, state: tuple) -> tuple:
            rows = _clean(fetch.rows(t), fetch.seen(t, 0))
            return _add(state, acc, q, rows, fetch.seen(t, 1), scale)

        state = fetch_tpu.each_tile(fetch, fetch.tiles, body, state)
    total = state[1]
    out[...] = acc[...] / jnp.where(total > 0, total, 1.0)


def _clean(rows: jax.Array, live: jax.Array) -> jax.Array:
    """Zeroes rows [T, c] that are not live: a weight of 0 times NaN is NaN. In float32, since not
    every chip selects narrower ones."""
    return jnp.where(live, rows.astype(jnp.float32), 0.0)


def _add(
    state: tuple[jax.Array, jax.Array],
    acc: Any,
    q: jax.Array,
    rows: jax.Array,
    seen: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Adds finite rows [T, c], bool[1, T] of them seen; state: maximum and total, f32[H, 1]."""
    rows = rows.astype(q.dtype)
    scores = _dot(q, rows, 1) * scale
    top, total = state
    new = jnp.maximum(top, jnp.max(jnp.where(seen, scores, MASKED), axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
    shrink = jnp.exp(top - new)
    acc[...] = acc[...] * shrink + _dot(weights.astype(q.dtype), rows, 0)
    return new, total * shrink + jnp.sum(weights, axis=1, keepdims=True)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a [m, k] contracted with axis `axis` of b, in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
