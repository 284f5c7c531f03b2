"""Scores of a tile of 64 index keys on a GPU, `sum_h w_h * relu(q_h . key)`: f32[64].

bfloat16 is multiplied on tensor cores. These round float32 to 10 bits, so float32 queries are
multiplied without them, from registers that hold the tile's keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import hopper
from hetero_kv.kernels.hopper import ROWS

STEP = 8  # channels that are multiplied at a time


def on_tensor_cores(q: Any, weights: Any) -> Callable[[Any], jax.Array]:
    """The function of a tile bf16[64, dim] in shared memory, for q bf16[heads, dim] there."""
    heads = q.shape[0]
    weight = hopper.load(weights, plgpu.Layout.WGMMA.reduce(0))
    weight = jax.lax.broadcast_in_dim(weight, (ROWS, heads), [1])

    def score(keys: Any) -> jax.Array:
        def product(acc):
            plgpu.wgmma(acc, keys, q.transpose((1, 0)))
            return acc[...]

        dots = pl.run_scoped(product, plgpu.ACC((ROWS, heads), jnp.float32))
        return jnp.sum(jnp.maximum(dots, 0.0) * weight, axis=1)

    return score


def on_cuda_cores(q: Any, weights: Any) -> Callable[[Any], jax.Array]:
    """The function of a tile [64, dim] in shared memory, for q f32[heads, dim] there."""
    heads, dim = q.shape
    matrix, across = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)

    def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

    def score(keys: Any) -> jax.Array:
        pieces = [pl.ds(c, STEP) for c in range(0, dim, STEP)]
        own = [hopper.load(keys.at[:, piece], matrix).astype(jnp.float32) for piece in pieces]

        def add(h: jax.Array, total: jax.Array) -> jax.Array:
            dots = zeros((ROWS, STEP), matrix)
            for key, piece in zip(own, pieces, strict=True):
                query = hopper.load(q.at[h, piece], across)
                dots += key * jax.lax.broadcast_in_dim(query, (ROWS, STEP), [1])
            return total + jnp.maximum(jnp.sum(dots, axis=1), 0.0) * weights[h]

        return jax.lax.fori_loop(0, heads, add, zeros((ROWS,), matrix.reduce(1)))

    return score
