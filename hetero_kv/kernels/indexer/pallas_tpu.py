"""The indexer for Mosaic TPU: one grid step per sequence, scores stay in on-chip memory.

Index keys are streamed in tiles; 4 bytes per entry are kept until the last tile has been scored,
and the top k is taken of these (see `topk_tpu`). Only picks leave the chip.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.kernels import checks, fetch_tpu, paging, tuning
from hetero_kv.kernels.fetch_tpu import Fetch, Geometry
from hetero_kv.kernels.indexer import topk_tpu
from hetero_kv.kernels.indexer.operands import Operands
from hetero_kv.kernels.indexer.topk_tpu import BLOCK, LANES

MOST = 1 << 21  # entries: 8 MiB of order keys


@dataclasses.dataclass(frozen=True)
class Tiles:
    """entries: scored at a time."""

    entries: int = 1024

    def __post_init__(self):
        checks.counts("tiles", self, LANES)
        if self.entries & (self.entries - 1):
            raise ValueError(f"tiles.entries={self.entries} must be a power of two")


def key(operands: Operands) -> str:
    """The bucket of these shapes in the tuning table."""
    _, heads, dim = operands.q.shape
    return tuning.bucket(heads=heads, dim=dim, dtype=paging.dtype(operands.keys).name)


def choose(operands: Operands) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    # The products of a tile are [heads, entries] float32: 256 KiB at most.
    entries = max(LANES, min(1024, 65536 // max(1, operands.q.shape[1])))
    entries = 1 << (entries.bit_length() - 1)
    return tuning.pick("indexer/pallas_tpu", "tpu", key(operands), Tiles(entries))


def _geometry(operands: Operands, tiles: Tiles) -> tuple[Geometry, int]:
    """Of the pages, in tiles that are whole rows of 128 entries; and the pool's capacity."""
    geometry = Geometry.of(operands.keys, tiles.entries)
    # A tile may have more pages than a table has columns: those are not there.
    many = max(1, tiles.entries // geometry.entries)
    return dataclasses.replace(geometry, many=many), geometry.columns * geometry.entries


def check(operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    checks.tiles(tiles, Tiles)
    packed = paging.packing(operands.keys) is not None
    for dtype in (operands.q.dtype, *(() if packed else (paging.dtype(operands.keys),))):
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"indexer/pallas_tpu: {dtype}; float32 and bfloat16 only")
    geometry, capacity = _geometry(operands, tiles or choose(operands))
    if geometry.size % LANES:
        raise NotImplementedError(
            f"indexer/pallas_tpu: pages of {geometry.entries} entries; tiles of whole pages must "
            f"be multiples of {LANES} entries: use pages of a power of two"
        )
    if capacity > MOST:
        raise NotImplementedError(
            f"indexer/pallas_tpu: {capacity} entries a sequence; {MOST} at most, since order keys "
            "stay on the chip"
        )


def run(
    operands: Operands, *, k: int, tiles: Tiles | None = None, interpret: Any = False
) -> jax.Array:
    """See `api.select`; entries come by ascending index."""
    tiles = tiles or choose(operands)
    rows, heads, dim = operands.q.shape
    geometry, capacity = _geometry(operands, tiles)
    view = paging.view(operands.keys, tiles.entries)
    scalars = [
        jnp.asarray(operands.layer, jnp.int32).reshape(1),
        jnp.minimum(operands.visible, capacity),
    ]
    constants, blocks = geometry.constants()
    lines = -(-k // LANES)
    entries = -(-capacity // geometry.size) * geometry.size
    order_keys = pltpu.VMEM((-(-entries // LANES // BLOCK) * BLOCK, LANES), jnp.int32)
    out = pl.pallas_call(
        functools.partial(_kernel, geometry, k, capacity),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[
                pl.BlockSpec((None, heads, dim), lambda r, *_: (r, 0, 0)),
                pl.BlockSpec((None, heads, 1), lambda r, *_: (r, 0, 0)),
                fetch_tpu.table_spec(view.table.shape[1]),
                pl.BlockSpec(memory_space=pl.ANY),
                *blocks,
            ],
            out_specs=pl.BlockSpec((None, lines, LANES), lambda r, *_: (r, 0, 0)),
            scratch_shapes=[order_keys, *geometry.scratch()],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, lines, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="lightning_indexer",
    )(
        *scalars,
        operands.q,
        operands.weights.astype(jnp.float32)[..., None],
        view.table[:, None],
        view.pages,
        *constants,
    )
    return out.reshape(rows, -1)[:, :k]


def _kernel(
    geometry: Geometry,
    k: int,
    capacity: int,
    layer: Any,
    visible: Any,
    q: Any,
    weights: Any,
    table: Any,
    *refs: Any,
) -> None:
    held = 2 if geometry.unpack else 1
    pages, (out, order_keys, *scratch) = refs[:held], refs[held:]
    visible = visible[pl.program_id(0)]
    fetch = Fetch(geometry, layer[0], visible, table, pages, *scratch)
    step = geometry.size // LANES

    def score(t: jax.Array, _: int) -> int:
        keys = fetch.rows(t).astype(q.dtype)
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dots = jax.lax.dot_general(
            q[...],
            keys,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.sum(jnp.maximum(dots, 0.0) * weights[...], axis=0, keepdims=True)
        ordered = topk_tpu.order_keys(scores, fetch.seen(t, 1))
        for i in range(step):
            order_keys[pl.ds(t * step + i, 1), :] = ordered[:, i * LANES : (i + 1) * LANES]
        return 0

    fetch_tpu.each_tile(fetch, fetch.tiles, score, 0)
    low, cut = topk_tpu.thresholds(order_keys, k, fetch.tiles, step, capacity)
    entries = BLOCK * LANES
    blocks = jax.lax.div(visible + entries - 1, entries)
    topk_tpu.line_up(order_keys, out, low, cut, visible, blocks)
