"""The compressor's store for GPUs (Mosaic GPU, Hopper and later).

One block of 128 threads makes one entry, a few channels a thread, and ends at once where none
closes. Rows stream from global memory through registers with a running softmax per channel; the
rotation exchanges neighbouring channels through shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.kernels.compressor import plan as plans
from hetero_kv.kernels.compressor.reference import Pooling

THREADS = 128
LOWEST = -1e30  # below every gate, and finite


def check(how: Pooling, *_: Any) -> None:
    """Raises NotImplementedError for what the kernel cannot take."""
    if how.width % THREADS or how.rope.dim > THREADS or how.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(
            f"{how.dtype} entries of {how.width} channels, {how.rope.dim} of them rotated; a block "
            f"takes float32 or bfloat16, a multiple of {THREADS}, and {THREADS} at most"
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
    size = 1 if raw is None else raw.shape[1]
    plan = plans.plan(how, pool, start, count, size, tile=1)
    held = start if raw is not None else start + 1
    cos, sin = (x[:, :, 0] for x in plans.turns(how, plan.first, 1, THREADS))
    target = jax.new_ref(pages)
    mesh = plgpu.Mesh(grid=plan.first.shape, grid_names=("row", "entry"))

    def body(*refs):
        pl.run_scoped(
            functools.partial(_body, how, pages.shape[1], raw is not None, *refs),
            plgpu.SMEM((how.width + 2 * THREADS,), jnp.float32),
        )

    scalars = (layer.reshape(1), start, held, plan.first, plan.high - plan.low)
    arrays = (norm.astype(jnp.float32), cos, sin, tail, *(() if raw is None else (raw,)))
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    pl.kernel(body, out_type=(), mesh=mesh, compiler_params=params, interpret=interpret)(
        *scalars, plan.page, plan.place, *arrays, target
    )
    new = jax.freeze(target)
    return pool._replace(pages=new) if isinstance(pool, Paged) else new


def _layout(width: int) -> Any:
    """Of `width` channels in registers."""
    each = width // THREADS
    vector = next(x for x in (4, 2, 1) if each % x == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


def _body(how: Pooling, pages: int, has_raw: bool, *refs):
    layer, start, held, first, closes, page, place, norm, cos, sin, tail = refs[:11]
    raw = refs[11] if has_raw else None
    pool, shared = refs[-2:]
    r, j = jax.lax.axis_index("row"), jax.lax.axis_index("entry")

    @pl.when((closes[r, j] > 0) & (page[r, j] < pages))
    def _():
        width, rest = how.width, how.width - THREADS
        layout, last = _layout(width), plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        pooled = _pool(how, layer[0], r, first[r, j], start[r], held[r], tail, raw)
        scale = jax.lax.rsqrt(jnp.sum(pooled * pooled) * (1.0 / width) + how.eps)
        normed = pooled * scale * plgpu.layout_cast(norm[...], layout)
        shared[pl.ds(THREADS, width)] = normed

        # Of the rotated channels, the two of a pair are side by side.
        def channels(shift: int) -> jax.Array:
            return plgpu.layout_cast(shared[pl.ds(width + shift, THREADS)], last)

        lane = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=last)
        even = (lane - (THREADS - how.rope.dim)) & 1 == 0
        other = jnp.where(even, channels(1), channels(-1))
        turned = channels(0) * plgpu.layout_cast(cos[r, j], last)
        turned += other * plgpu.layout_cast(sin[r, j], last)
        there = pool.at[layer[0], page[r, j], place[r, j]]
        there[pl.ds(rest, THREADS)] = turned.astype(how.dtype)
        if rest:
            still = plgpu.layout_cast(shared[pl.ds(THREADS, rest)], _layout(rest))
            there[pl.ds(0, rest)] = still.astype(how.dtype)


def _pool(how: Pooling, layer, r, entry, start, held, tail, raw) -> jax.Array:
    """The entry before its norm, f32[width]: a running softmax over the rows of its groups."""
    layout = _layout(how.width)

    def absorb(ref, place, channel: int, state):
        """Adds the row at `place`; channel: the first of its kv."""
        top, total, summed = state
        kv = plgpu.layout_cast(ref[*place, pl.ds(channel, how.width)], layout)
        gate = plgpu.layout_cast(ref[*place, pl.ds(how.series + channel, how.width)], layout)
        new = jnp.maximum(top, gate)
        shrink, weight = jnp.exp(top - new), jnp.exp(gate - new)
        return new, total * shrink + weight, summed * shrink + weight * kv

    def full(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((how.width,), value, jnp.float32), layout)

    state = full(LOWEST), full(0.0), full(0.0)
    for back, channel in ((1, 0), (0, how.width)) if how.overlap else ((0, 0),):
        block = entry - back
        begin = block * how.ratio
        end = jnp.where(block < 0, begin, begin + how.ratio)  # nothing before the first
        middle = jnp.clip(held, begin, end) if raw is not None else end

        def old(position, state, channel=channel):
            place = layer, r, jax.lax.rem(position, how.held)
            return absorb(tail, place, channel, state)

        def new(position, state, channel=channel):
            return absorb(raw, (r, position - start), channel, state)

        state = jax.lax.fori_loop(begin, middle, old, state)
        if raw is not None:
            state = jax.lax.fori_loop(middle, end, new, state)
    return state[2] / state[1]
