"""The online softmax of a GPU's tensor cores: what decode and chunk attention do with a tile.

A warpgroup has 64 queries (rows of `q`) and its own channels of the result. Tiles are of 64 rows,
which are keys and values: scores are of all their channels, so every warpgroup has all scores.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels.hopper import ROWS

VECTOR, ACROSS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class State(NamedTuple):
    """f32[64, n] weighted sums, one of each piece; f32[64] largest logits and sums of weights."""

    sums: list[jax.Array]
    top: jax.Array
    total: jax.Array


def pieces(first: Any, columns: int) -> list[Any]:
    """A warpgroup's channels in parts: a product and its sum must fit the registers."""
    width = 128 if columns % 128 == 0 else 64
    return [pl.ds(pl.multiple_of(first + j, 64), width) for j in range(0, columns, width)]


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """f32 of one value, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def begin(sizes: list[int], top: jax.Array | None = None, total: float = 0.0) -> State:
    """Nothing seen. sizes: channels of each piece; top, total: of sinks, f32[64] and 1."""
    sums = [filled(0.0, (ROWS, size), plgpu.Layout.WGMMA) for size in sizes]
    top = filled(MASKED, (ROWS,), VECTOR) if top is None else top
    return State(sums, top, filled(total, (ROWS,), VECTOR))


def spread(x: jax.Array, axis: int, width: int = ROWS) -> jax.Array:
    """[64, width] of a vector along `axis`."""
    return jax.lax.broadcast_in_dim(x, (ROWS, width), [axis])


def add(
    state: State, q: Any, rows: Any, weights: Any, parts: list[Any], live: jax.Array, scale: float
) -> State:
    """Attends to a tile.

    Args:
        q, rows: bf16[64, c] in shared memory; what no query sees of `rows` is finite.
        weights: bf16[64, 64], shared memory of this warpgroup.
        parts: of `pieces`.
        live: bool[64, 64], which query sees which row.
        scale: of logits.
    """

    def score(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q, rows.transpose((1, 0)))
        return acc[...]

    def product(part: Any, acc: Any) -> jax.Array:
        plgpu.wgmma(acc, weights, rows.at[:, part])
        return acc[...]

    scores = pl.run_scoped(score, plgpu.ACC((ROWS, ROWS), jnp.float32)) * scale
    scores = jnp.where(live, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    p = jnp.where(live, jnp.exp(scores - spread(top, 0)), 0.0)
    shrink = jnp.exp(state.top - top)
    weights[...] = p.astype(jnp.bfloat16)
    plgpu.commit_smem()
    sums = [
        old * spread(shrink, 0, part.size)
        + pl.run_scoped(functools.partial(product, part), plgpu.ACC((ROWS, part.size), jnp.float32))
        for old, part in zip(state.sums, parts, strict=True)
    ]
    return State(sums, top, state.total * shrink + jnp.sum(p, axis=1))


def clean(rows: Any, parts: list[Any], seen: jax.Array) -> None:
    """Zeroes rows bf16[64, c] that are not seen (f32[64], 1: it is), in these channels.

    They may be NaN, and 0 times NaN is NaN.
    """
    for part in parts:
        own = rows.at[:, part]
        there = spread(seen, 0, part.size) > 0.5
        own[...] = jnp.where(there, own[...], jnp.bfloat16(0.0))
