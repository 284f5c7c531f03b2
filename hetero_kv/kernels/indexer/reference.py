"""The indexer in jnp: what the CPU runs, and what the kernels are compared with."""

import jax
import jax.numpy as jnp

from hetero_kv.attention import pool, selection
from hetero_kv.kernels.indexer.operands import Operands


def run(operands: Operands, *, k: int, tile: int) -> jax.Array:
    """See `api.select`; entries come by descending score. Scores are written, f32[R, N]."""
    q, weights, layer, keys, visible = operands
    rows = pool.rows(keys)

    def body(t: jax.Array, out: jax.Array) -> jax.Array:
        part = pool.tile(keys, layer, t, tile)
        part = selection.index_scores(q[:, None], weights[:, None], part)[:, 0]
        part = jnp.where(part == 0, 0.0, part)
        return jax.lax.dynamic_update_slice_in_dim(out, part, t * tile, axis=1)

    tiles = -(-jnp.max(visible) // tile)
    scores = jax.lax.fori_loop(0, tiles, body, jnp.zeros((q.shape[0], rows), jnp.float32))
    seen = jnp.arange(rows, dtype=jnp.int32) < visible[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if rows < k:  # the same k whatever the capacity, so that sums have one order
        scores = jnp.pad(scores, ((0, 0), (0, k - rows)), constant_values=-jnp.inf)
    _, index = jax.lax.top_k(scores, k)
    return jnp.where(index < visible[:, None], index, -1)
