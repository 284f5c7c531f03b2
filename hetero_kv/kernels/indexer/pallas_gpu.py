"""The indexer for Mosaic GPU (Hopper and later): a block picks the top k of a chunk of entries.

Index keys are streamed by TMA, unpacked where they are packed, and scored, see `scores_gpu`; the
scores of a chunk stay in shared memory, where its top k is found by bisection, ties cut at an
index. What leaves a block are the at most k candidates of its chunk, of which XLA takes the top k
again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import checks, hopper, paging, tuning, unpack_gpu
from hetero_kv.kernels.hopper import GROUP, ROWS
from hetero_kv.kernels.indexer import scores_gpu
from hetero_kv.kernels.indexer.operands import Operands
from hetero_kv.kernels.unpack_gpu import PIECE, Unpack
from hetero_kv.packing import Packing

STAGES = 2
TYPES = [  # of queries and keys
    (jnp.float32, jnp.float32),
    (jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, jnp.bfloat16),
]
HIDDEN = -(2**31)  # order key of an entry that is not visible


@dataclasses.dataclass(frozen=True)
class Tiles:
    """chunk: entries of a block."""

    chunk: int = 2048

    def __post_init__(self):
        checks.counts("tiles", self, 128)
        if self.chunk & (self.chunk - 1) or self.chunk > 16384:
            raise ValueError(f"tiles.chunk={self.chunk} must be a power of two up to 16384")


def key(operands: Operands, k: int) -> str:
    """The bucket of these shapes in the tuning table."""
    batch, heads, dim = operands.q.shape
    capacity = jax.eval_shape(lambda x: paging.view(x, ROWS), operands.keys).capacity
    dtype = str(operands.q.dtype)
    return tuning.bucket(batch=batch, heads=heads, dim=dim, k=k, entries=capacity, dtype=dtype)


def choose(operands: Operands, k: int) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    # Candidates are at most a quarter of what is scored.
    chunk = max(2048, min(16384, 4 << (k - 1).bit_length()))
    return tuning.pick("indexer/pallas_gpu", "cuda", key(operands, k), Tiles(chunk))


def check(operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    checks.tiles(tiles, Tiles)
    keys, packing = operands.keys, paging.packing(operands.keys)
    dtype = jnp.dtype(packing.dtype) if packing else paging.dtype(keys)
    if (operands.q.dtype, dtype) not in TYPES:
        raise NotImplementedError(
            f"indexer/pallas_gpu: queries of {operands.q.dtype}, keys of {dtype}; float32 queries "
            "of float32 or bfloat16 keys, or both bfloat16"
        )
    _, heads, dim = operands.q.shape
    if dim % 64 or dim > 256 or heads > 256:
        raise NotImplementedError(
            f"indexer/pallas_gpu: {heads} heads of {dim}; at most 256 heads of a multiple of 64 up "
            "to 256"
        )
    if packing:
        unpack_gpu.check("indexer/pallas_gpu", packing)
    page = jax.eval_shape(lambda x: paging.view(x, ROWS), keys).entries
    exact = operands.q.dtype == jnp.float32
    if math.gcd(page, ROWS) % (1 if exact or packing else GROUP):
        raise NotImplementedError(
            f"indexer/pallas_gpu: pages of {page} entries are not made of equal groups of {GROUP} "
            f"to {ROWS}"
        )
    chunk = (tiles or Tiles()).chunk
    plan = _Plan(heads, 1, chunk, ROWS, exact, dtype, packing)
    need = hopper.size(_memory(plan, dim))
    if need > hopper.SHARED:
        raise NotImplementedError(
            f"indexer/pallas_gpu: {heads} heads of {dim} in {operands.q.dtype} and chunks of "
            f"{chunk} need {need} bytes of shared memory, of {hopper.SHARED}"
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    heads: int
    k: int  # candidates of a chunk
    chunk: int
    copy: int  # rows of one TMA copy
    exact: bool  # float32 queries
    keys: Any  # dtype of keys, as they are read
    packing: Packing | None


def run(
    operands: Operands, *, k: int, tiles: Tiles | None = None, interpret: Any = None
) -> jax.Array:
    """See `api.select`; entries come by descending score."""
    tiles = tiles or choose(operands, k)
    view = paging.view(operands.keys, ROWS)
    batch, heads, dim = operands.q.shape
    packing = paging.packing(operands.keys)
    visible = jnp.minimum(operands.visible, view.capacity)
    chunks = -(-view.capacity // tiles.chunk)
    plan = _Plan(
        -(-heads // GROUP) * GROUP,
        min(k, tiles.chunk),
        tiles.chunk,
        math.gcd(view.entries, ROWS),
        operands.q.dtype == jnp.float32,
        jnp.dtype(packing.dtype) if packing else view.pages.dtype,
        packing,
    )
    pad = plan.heads - heads
    q = jnp.pad(operands.q, ((0, 0), (0, pad), (0, 0)))
    if packing and (order := Unpack(packing).order) is not None:
        q = q[..., order]
    weights = jnp.pad(operands.weights.astype(jnp.float32), ((0, 0), (0, pad)))
    places, missing = _places(plan, view, chunks, visible)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan, dim),
        out_type=(
            jax.ShapeDtypeStruct((batch, chunks, plan.k), jnp.float32),
            jax.ShapeDtypeStruct((batch, chunks, plan.k), jnp.int32),
        ),
        grid=(batch, chunks),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    layer = jnp.asarray(operands.layer, jnp.int32).reshape(1)
    scores, index = kernel(layer, visible, q, weights, places, view.pages)
    scores, index = scores.reshape(batch, -1), index.reshape(batch, -1)
    if scores.shape[1] < k:
        scores = jnp.pad(scores, ((0, 0), (0, k - scores.shape[1])), constant_values=-jnp.inf)
        index = jnp.pad(index, ((0, 0), (0, k - index.shape[1])), constant_values=-1)
    _, at = jax.lax.top_k(scores, k)
    picked = jnp.take_along_axis(index, at, axis=1)
    # A page that is none reads as NaN, which stands out: its entries are picked first.
    first = missing[:, None] + jnp.arange(k, dtype=jnp.int32)
    first = jnp.where(first < visible[:, None], first, -1)
    return jnp.where(missing[:, None] < visible[:, None], first, picked)


def _places(
    plan: _Plan, view: paging.PageView, chunks: int, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Page and first row of every copy, i32[R, copies, 2], valid ones all; and the first visible
    entry whose page is none, i32[R]."""
    steps = chunks * plan.chunk // plan.copy
    index = jnp.arange(steps, dtype=jnp.int32) * plan.copy
    column = jnp.broadcast_to(index // view.entries, (view.table.shape[0], steps))
    page = jnp.take_along_axis(view.table, column, axis=1, mode="fill", fill_value=-1)
    found = (page >= 0) & (page < view.pages.shape[1])
    row = jnp.broadcast_to(index % view.entries, page.shape)
    lost = ~found & (index < visible[:, None])
    missing = jnp.min(jnp.where(lost, index, 2**30), axis=1)
    return jnp.stack([jnp.where(found, page, 0), row], axis=-1), missing


def _memory(plan: _Plan, dim: int) -> tuple:
    """Shared memory of a block: queries, keys, packed keys and what they need, scores, flags."""
    many = 1 if plan.packing else STAGES
    packed = ()
    if plan.packing:
        packed = (
            unpack_gpu.memory(plan.packing, ROWS, STAGES),
            unpack_gpu.scratch(plan.packing, ROWS),
        )
    form = plgpu.SMEM if plan.exact else lambda shape, _: hopper.swizzled(*shape)
    return (
        form((plan.heads, dim), jnp.float32),
        form((many, ROWS, dim), plan.keys),
        packed,
        plgpu.SMEM((plan.chunk,), jnp.float32),
        plgpu.SMEM((plan.chunk,), jnp.int32),
    )


def _kernel(plan: _Plan, dim: int, *refs: Any) -> None:
    copies = plan.packing.bytes // unpack_gpu.BOX if plan.packing else 1
    pl.run_scoped(
        functools.partial(_body, plan, refs),
        *_memory(plan, dim),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=copies * (ROWS // plan.copy), num_barriers=STAGES),
    )


def _body(plan, refs, q, keys, packed, scores, flags, arrived, full) -> None:
    layer, visible, q_all, weights, places, pages, out_scores, out_index = refs
    row, chunk = jax.lax.axis_index("row"), jax.lax.axis_index("chunk")
    base = chunk * plan.chunk
    here = jnp.clip(visible[row] - base, 0, plan.chunk)  # entries of the chunk that are seen
    tiles = jax.lax.div(here + ROWS - 1, ROWS)

    def fetch(t: jax.Array) -> None:
        slot, many = jax.lax.rem(t, STAGES), ROWS // plan.copy
        for j in range(many):
            at = jax.lax.div(base, plan.copy) + t * many + j
            first = pl.multiple_of(places[row, at, 1], plan.copy)
            source = pages.at[layer[0], places[row, at, 0], pl.ds(first, plan.copy), :]
            rows = pl.ds(j * plan.copy, plan.copy)
            if plan.packing:
                target = packed[0].at[slot, :, rows, :]
                unpack_gpu.boxes(source, target, plan.packing, full.at[slot])
            else:
                plgpu.copy_gmem_to_smem(source, keys.at[slot, rows, :], full.at[slot])

    def unpack(slot: jax.Array) -> Any:
        raw, scratch = packed
        for c in range(0, plan.packing.width, PIECE):
            values = Unpack(plan.packing).piece(raw.at[slot], c, scratch)
            there = keys.at[0, :, pl.ds(c, PIECE)]
            hopper.store(there, values.astype(plan.keys))
        plgpu.commit_smem()
        return keys.at[0]

    @pl.when(tiles > 0)
    def _score():
        plgpu.copy_gmem_to_smem(q_all.at[row], q, arrived)
        fetch(jnp.int32(0))
        plgpu.barrier_wait(arrived)
        score = scores_gpu.on_cuda_cores if plan.exact else scores_gpu.on_tensor_cores
        score = score(q, weights.at[row])

        @pl.loop(0, tiles)
        def _(t):
            slot = jax.lax.rem(t, STAGES)

            @pl.when(t + 1 < tiles)
            def _():
                fetch(t + 1)

            plgpu.barrier_wait(full.at[slot])

            first = pl.multiple_of(t * ROWS, ROWS)
            scores[pl.ds(first, ROWS)] = score(unpack(slot) if plan.packing else keys.at[slot])
            if plan.exact:
                plgpu.commit_smem()  # loads are over before a copy may write there

    plgpu.commit_smem()
    flags[...] = _chosen(plan, scores, here)
    plgpu.commit_smem()

    def emit(i: jax.Array, count: jax.Array) -> jax.Array:
        flag = flags[i]

        @pl.when(flag == 1)
        def _():
            out_scores[row, chunk, count] = scores[i]
            out_index[row, chunk, count] = base + i

        return count + flag

    count = jax.lax.fori_loop(0, here, emit, jnp.int32(0))

    @pl.loop(count, plan.k)
    def _(i):
        out_scores[row, chunk, i] = jnp.float32(-jnp.inf)
        out_index[row, chunk, i] = jnp.int32(-1)


def _chosen(plan: _Plan, scores: Any, here: jax.Array) -> jax.Array:
    """i32[chunk]: 1 for the top k of the first `here` scores; of equals, the lower index."""
    layout = plgpu.Layout.WG_STRIDED((plan.chunk,), vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, (plan.chunk,), 0, layout=layout)
    values = hopper.load(scores, layout)
    values = jnp.where(values == 0.0, 0.0, values)  # -0 equals +0
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    order = jnp.where(index < here, order, jnp.int32(HIDDEN))

    def count(test: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(test, 1.0, 0.0))

    def raise_bit(b: jax.Array, low: jax.Array) -> jax.Array:
        trial = low | jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - b)
        return jnp.where(count(order >= (trial ^ HIDDEN)) >= plan.k, trial, low)

    low = jax.lax.fori_loop(0, 32, raise_bit, jnp.int32(0)) ^ HIDDEN
    spare = plan.k - count(order > low)

    def lower_cut(b: jax.Array, cut: jax.Array) -> jax.Array:
        trial = cut + jax.lax.shift_left(jnp.int32(1), jnp.int32(bits_of_chunk - 1) - b)
        return jnp.where(count((order == low) & (index < trial)) <= spare, trial, cut)

    bits_of_chunk = plan.chunk.bit_length()
    cut = jax.lax.fori_loop(0, bits_of_chunk, lower_cut, jnp.int32(0))
    chosen = (order > low) | ((order == low) & (index < cut))
    return jnp.where(chosen & (order != HIDDEN), 1, 0)
