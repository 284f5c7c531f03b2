"""The lightning indexer: scores entries by index keys and picks the top k (V4 report, 2.3).

`I[t, i] = sum_h w[t, h] * relu(q[t, h] . key[i]) / sqrt(dim)`, with w scaled by heads^-1/2. The
scores gate visibility only; they do not enter the attention.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import pool, selection
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.attention.when import when
from hetero_kv.params import Params, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Indexer:
    """heads, dim: of index queries; topk: entries picked; compressor: makes the index keys."""

    d_model: int
    d_query: int  # width of what index queries are projected from
    heads: int
    dim: int
    topk: int
    compressor: Compressor

    @property
    def rope(self) -> Rope:
        """The frequencies of index queries and keys."""
        return self.compressor.rope

    def params(self) -> ParamTree:
        """Query projection, per-head weights, and the compressor of index keys."""
        return {
            "q": ParamSpec((self.d_query, self.heads * self.dim)),
            "weights": ParamSpec((self.d_model, self.heads)),
            "compressor": self.compressor.params(),
        }

    def queries(
        self, params: Params, x: jax.Array, latent: jax.Array, turn: Table
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated index queries [R, S, heads, dim] and weights f32[R, S, heads]."""
        q = jnp.matmul(latent, params["q"]).reshape(*latent.shape[:-1], self.heads, self.dim)
        q = rotate(q, Table(turn.cos[..., None, :], turn.sin[..., None, :]))
        weights = jnp.matmul(x, params["weights"], preferred_element_type=jnp.float32)
        return q, weights * (self.heads * self.dim) ** -0.5

    def scores(self, q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """f32[R, S, n] scores of index keys [R, n, dim]."""
        return selection.index_scores(q, weights, keys)

    def select_many(
        self,
        q: jax.Array,
        weights: jax.Array,
        keys: pool.Pool,
        layer: int | jax.Array,
        visible: jax.Array,
        tiles: jax.Array,
        size: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Order keys u32[R, S, N] of a call's queries and the thresholds of their top k.

        keys: the pool, N entries a row; visible: i32[R, S] entries visible to each query; the
        first `tiles` tiles of `size` entries are read.
        """

        def body(t: jax.Array, out: jax.Array) -> jax.Array:
            index = t * size + jnp.arange(size, dtype=jnp.int32)
            part = self.scores(q, weights, pool.tile(keys, layer, t, size))
            part = selection.order_keys(part, index < visible[..., None])
            return jax.lax.dynamic_update_slice_in_dim(out, part, t * size, axis=2)

        rows = pool.rows(keys)
        empty = jnp.zeros((*q.shape[:2], rows), jnp.uint32)
        order = jax.lax.fori_loop(0, tiles, body, empty)
        everything = (
            jnp.zeros(visible.shape, jnp.uint32),
            jnp.full(visible.shape, rows, jnp.int32),
        )
        low, cut = when(
            jnp.max(visible) > self.topk,
            lambda: selection.thresholds(order, self.topk, tiles, size),
            everything,
        )
        return order, low, cut
