"""The lightning indexer: scores entries by index keys and picks the top k (V4 report, 2.3).

`I[t, i] = sum_h w[t, h] * relu(q[t, h] . key[i]) / sqrt(dim)`, with w scaled by heads^-1/2. The
scores gate visibility only; they do not enter the attention.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool, selection
from hetero_kv.attention.call import Call, View
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.attention.when import when
from hetero_kv.kernels.chunk_attention.operands import Chosen
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamTree, matrix

WITH_INDEXER = "there is an indexer: set indexer=True and index_topk >= 1"  # see Fields.idle


class Picker:
    """Picks the top k of what index keys score; a base of indexers, which say heads and topk."""

    heads: int
    topk: int

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
            lambda order: selection.thresholds(order, self.topk, tiles, size),
            everything,
            order,
        )
        return order, low, cut

    def choose(
        self,
        q: jax.Array,
        weights: jax.Array,
        keys: EntryPool,
        view: View,
        call: Call,
        entries: EntryPool,
    ) -> Chosen:
        """What each query [R, S, heads, dim] of a call picks of the entries, by their index keys.

        In pages of other spans a row has room for more keys than entries, or for fewer: no query
        sees what is beyond its tokens, but order keys are as many as the entries.
        """
        order, low, cut = self.select_many(
            q,
            weights,
            view.leaves[keys.name],
            view.layer,
            keys.visible(call.positions),
            keys.tiles(call),
            keys.tile,
        )
        rows = pool.rows(view.leaves[entries.name])
        more = max(rows - order.shape[-1], 0)
        return Chosen(jnp.pad(order[..., :rows], ((0, 0), (0, 0), (0, more))), low, cut)

    def mask(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """bool[R, S, N]: the top k of f32[R, S, N] scores among those that are visible."""
        chosen = self.picks(scores, visible)
        index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        return selection.chosen(chosen.order, index, chosen.low, chosen.cut)

    def picks(self, scores: jax.Array, visible: jax.Array) -> Chosen:
        """The same as order keys and thresholds; no gradient flows through them."""
        keys = selection.order_keys(jax.lax.stop_gradient(scores), visible)
        return Chosen(keys, *selection.thresholds(keys, self.topk, jnp.int32(1), scores.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Indexer(Picker):
    """heads, dim: of index queries; topk: entries picked; compressor: makes the index keys."""

    d_model: int
    d_query: int  # width of what index queries are projected from
    heads: int
    dim: int
    topk: int
    compressor: Compressor

    def __post_init__(self):
        check(self.topk, self.heads)

    @property
    def rope(self) -> Rope:
        """The frequencies of index queries and keys."""
        return self.compressor.rope

    def params(self) -> ParamTree:
        """Query projection, per-head weights, and the compressor of index keys."""
        return {
            "q": matrix(self.d_query, self.heads * self.dim, reads="latent"),
            "weights": matrix(self.d_model, self.heads, reads="x"),
            "compressor": self.compressor.params(),
        }

    def queries(
        self, params: Params, x: jax.Array, latent: jax.Array, turn: Table
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated index queries [R, S, heads, dim] and weights f32[R, S, heads]."""
        q = linear(latent, params["q"]).reshape(*latent.shape[:-1], self.heads, self.dim)
        q = rotate(q, Table(turn.cos[..., None, :], turn.sin[..., None, :]))
        weights = linear(x, params["weights"], jnp.float32)
        return q, weights * (self.heads * self.dim) ** -0.5


def check(topk: int, heads: int) -> None:
    """Raises ValueError where nothing could be picked."""
    if topk < 1 or heads < 1:
        raise ValueError(f"index_topk={topk} and index_heads={heads} must be >= 1")


def teach(
    scores: jax.Array,
    state: attend.State,
    q: jax.Array,
    entries: jax.Array,
    mask: jax.Array,
    scale: float,
) -> dict[str, jax.Array]:
    """The indexer's loss: KL(head-mean attention over the mask's entries || its softmax).

    As in DeepSeek-V3.2's indexer training: target detached and renormalised over entries.
    """
    dots = jnp.einsum(
        "rshc,rkc->rshk", q, entries.astype(q.dtype), preferred_element_type=jnp.float32
    )
    logits = jnp.where(mask[:, :, None], dots * scale, attend.MASKED)
    share = jnp.exp(logits - state.top[..., None]) / state.total[..., None]
    target = jnp.where(mask, jnp.mean(share, axis=2), 0.0)
    norm = jnp.sum(target, axis=-1, keepdims=True)
    target = jax.lax.stop_gradient(target / jnp.maximum(norm, 1e-30))
    log_q = jax.nn.log_softmax(jnp.where(mask, scores, attend.MASKED), axis=-1)
    log_p = jnp.log(jnp.maximum(target, 1e-30))
    kl = jnp.sum(jnp.where(mask, target * (log_p - log_q), 0.0), axis=-1)
    some = jnp.any(mask, axis=-1)
    loss = jnp.sum(jnp.where(some, kl, 0.0)) / jnp.maximum(jnp.sum(some), 1)
    return {"indexer_kl": loss, "targets": target, "index_scores": scores}
