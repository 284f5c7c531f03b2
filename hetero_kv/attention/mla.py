"""MLA: heads over one low-rank latent row a token, whole or with the top k tokens of an indexer.

A cached row is the normed latent and a rotated key that all heads share (DeepSeek-V2, arXiv
2405.04434, section 2.1). Keys and values are projections of the latent; they are absorbed into
queries and outputs, so that attention reads the rows as they are. With an indexer it is the sparse
attention of DeepSeek-V3.2: `I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])` picks the tokens, whose
index keys are layer-normed and rotated on their *first* channels, pairs in halves.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.entries import TILE, EntryPool
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.indexer import WITH_INDEXER, Picker, check, teach
from hetero_kv.attention.norm import layer_norm, rms_norm
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.contract import LayerSpec
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.kernels.decode_attention.operands import Entries
from hetero_kv.kernels.indexer.api import select
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix

EPS = 1e-6  # of the norms of latents (unless `latent_eps` says otherwise) and of index keys


@dataclasses.dataclass(frozen=True)
class TokenIndexer(Picker):
    """heads, dim: of index queries; topk: tokens picked; rope: of the first channels, in halves."""

    d_model: int
    d_query: int
    heads: int
    dim: int
    topk: int
    rope: Rope
    keys: EntryPool

    def __post_init__(self):
        check(self.topk, self.heads)
        if self.dim < self.rope.dim:
            raise ValueError(f"index_dim={self.dim} must be at least rope_dim={self.rope.dim}")

    def params(self) -> ParamTree:
        """Projections of queries, keys and weights; the keys' norm."""
        return {
            "q": matrix(self.d_query, self.heads * self.dim),
            "k": matrix(self.d_model, self.dim),
            "k_norm": ParamSpec((self.dim,), "ones", dtype="float32"),
            "k_norm_bias": ParamSpec((self.dim,), "zeros", dtype="float32"),
            "weights": matrix(self.d_model, self.heads),
        }

    def _turn(self, x: jax.Array, turn: Table) -> jax.Array:
        first = rotate(x[..., : self.rope.dim], turn, halves=self.rope.halves)
        return jnp.concatenate([first, x[..., self.rope.dim :]], axis=-1)

    def queries(
        self, params: Params, x: jax.Array, latent: jax.Array, turn: Table
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated index queries [R, S, heads, dim] and weights f32[R, S, heads]."""
        q = linear(latent, params["q"]).reshape(*latent.shape[:-1], self.heads, self.dim)
        q = self._turn(q, Table(turn.cos[..., None, :], turn.sin[..., None, :]))
        weights = linear(x, params["weights"], jnp.float32)
        return q, weights * (self.heads * self.dim) ** -0.5

    def rows(self, params: Params, x: jax.Array, turn: Table) -> jax.Array:
        """Index keys [R, S, dim] of x [R, S, d]."""
        k = linear(x, params["k"])
        k = layer_norm(k, params["k_norm"], params["k_norm_bias"], EPS)
        return self._turn(k, turn).astype(self.keys.dtype)


@dataclasses.dataclass(frozen=True)
class Mla:
    """heads of nope_dim + shared channels, values of v_dim; latent: of a row; q_latent: 0, none.

    shared: channels of the key that all heads share, rotated (rope.dim = shared) or not (0).

    Leaves: latent (ratio 1), and with an indexer index_keys (ratio 1).
    """

    kind: str
    d_model: int
    heads: int
    nope_dim: int
    v_dim: int
    latent: int
    q_latent: int
    rope: Rope
    scale: float
    eps: float
    cache: EntryPool
    indexer: TokenIndexer | None
    shared: int
    kernels: str = "auto"  # implementation of the decode step's ops, see `kernels.dispatch`

    def __post_init__(self):
        if self.rope.dim not in (0, self.shared):
            raise ValueError(f"rope dim {self.rope.dim} must be 0 or shared_dim={self.shared}")

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Of the shared key, and of index keys."""
        return (self.rope, self.indexer.rope) if self.indexer else (self.rope,)

    def params(self) -> ParamTree:
        """kv_b: [latent, heads * (nope_dim + v_dim)], a head's key and then its value."""
        wide = self.heads * (self.nope_dim + self.shared)
        tree: dict = {
            "kv_a": matrix(self.d_model, self.latent + self.shared),
            "kv_a_norm": ParamSpec((self.latent,), "ones", dtype="float32"),
            "kv_b": ParamSpec((self.latent, self.heads * (self.nope_dim + self.v_dim))),
            "o": matrix(self.heads * self.v_dim, self.d_model),
        }
        if self.q_latent:
            tree["q_a"] = matrix(self.d_model, self.q_latent)
            tree["q_a_norm"] = ParamSpec((self.q_latent,), "ones", dtype="float32")
            tree["q_b"] = matrix(self.q_latent, wide)
        else:
            tree["q"] = matrix(self.d_model, wide)
        return tree | ({"indexer": self.indexer.params()} if self.indexer else {})

    def spec(self) -> LayerSpec:
        """One row a token, and one index key."""
        leaves = self.cache.leaves() | (self.indexer.keys.leaves() if self.indexer else {})
        return LayerSpec(self.kind, tuple(leaves.items()))

    def _project(
        self, params: Params, x: jax.Array, call: Call
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [R, S, H, latent + r] absorbed and rotated, rows [R, S, latent + r], query latent."""
        turn, latent = call.tables[self.rope], x
        if self.q_latent:
            latent = rms_norm(linear(x, params["q_a"]), params["q_a_norm"], self.eps)
        q = linear(latent, params["q_b" if self.q_latent else "q"])
        q = q.reshape(*x.shape[:-1], self.heads, -1)
        keys = self._kv_b(params)[..., : self.nope_dim]
        own = jnp.einsum("rshn,lhn->rshl", q[..., : self.nope_dim], keys)
        q = jnp.concatenate([own, q[..., self.nope_dim :]], axis=-1)
        wide = Table(turn.cos[..., None, :], turn.sin[..., None, :])
        q = rotate(q, wide, halves=self.rope.halves)
        row = linear(x, params["kv_a"])
        low = rms_norm(row[..., : self.latent], params["kv_a_norm"], self.eps)
        row = jnp.concatenate([low, row[..., self.latent :]], axis=-1)
        row = rotate(row, turn, halves=self.rope.halves).astype(self.cache.dtype)
        return q, row, latent

    def _kv_b(self, params: Params) -> jax.Array:
        return params["kv_b"].reshape(self.latent, self.heads, self.nope_dim + self.v_dim)

    def _output(self, params: Params, out: jax.Array, x: jax.Array) -> jax.Array:
        low = out[..., : self.latent].astype(x.dtype)
        out = jnp.einsum("rshl,lhv->rshv", low, self._kv_b(params)[..., self.nope_dim :])
        return linear(out.reshape(*x.shape[:-1], -1), params["o"])

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`. Auxiliaries with `train.aux`: see `indexer.teach`."""
        q, rows, latent = self._project(params, x, call)
        rows = self.cache.settled(rows)
        mask = call.positions[:, None, :] <= call.positions[:, :, None]
        scores = None
        if self.indexer:
            # Detached, so that only the indexer's weights learn from its loss.
            own, frozen = params["indexer"], jax.lax.stop_gradient((x, latent))
            turn = call.tables[self.indexer.rope]
            index_q, weights = self.indexer.queries(own, *frozen, turn)
            keys = self.indexer.keys.settled(self.indexer.rows(own, frozen[0], turn))
            scores = self.indexer.scores(index_q, weights, keys)
            if train.select == "topk":
                mask = self.indexer.mask(scores, mask)
        state = attend.begin(q.shape[:-1], q.shape[-1], None)
        state = attend.add(state, q, rows, mask, self.scale)
        y = self._output(params, attend.finish(state), x)
        if not (train.aux and self.indexer):
            return y, {}
        return y, teach(scores, state, q, rows, mask, self.scale)

    def _write(self, params: Params, x: jax.Array, rows: jax.Array, view: View, call: Call) -> View:
        view = self.cache.append(view, call, call.start, rows, call.count)
        if not self.indexer:
            return view
        keys = self.indexer.rows(params["indexer"], x, call.tables[self.indexer.rope])
        return self.indexer.keys.append(view, call, call.start, keys, call.count)

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`. Rows are written first, so that queries see their own."""
        q, rows, latent = self._project(params, x, call)
        view, chosen = self._write(params, x, rows, view, call), None
        if self.indexer:
            keys, turn = self.indexer.keys, call.tables[self.indexer.rope]
            index_q, weights = self.indexer.queries(params["indexer"], x, latent, turn)
            chosen = self.indexer.choose(index_q, weights, keys, view, call, self.cache)
        state = attend.begin(q.shape[:-1], q.shape[-1], None)
        state = self.cache.attend(state, q, view, call, self.scale, chosen)
        return self._output(params, attend.finish(state), x), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`: with an indexer only the rows that it picks are read."""
        if not self.indexer:
            return self.prefill(params, x, view, call)
        q, rows, latent = self._project(params, x, call)
        view = self._write(params, x, rows, view, call)
        keys, turn = self.indexer.keys, call.tables[self.indexer.rope]
        index_q, weights = self.indexer.queries(params["indexer"], x, latent, turn)
        visible = keys.visible(call.stop - 1)  # of a row that does not run: what is written
        picked = select(
            index_q[:, 0],
            weights[:, 0],
            view.leaves[keys.name],
            layer=view.layer,
            visible=visible,
            k=self.indexer.topk,
            tile=keys.tile,
            implementation=self.kernels,
        )
        out = decode_attention(
            q[:, 0],
            layer=view.layer,
            entries=Entries(view.leaves[self.cache.name], visible, picked),
            scale=self.scale,
            tile=self.cache.tile,
            implementation=self.kernels,
        )
        return self._output(params, out[:, None], x), view


def build(fields: Fields) -> Mla:
    """From a layer type's fields.

    Its own: kv_lora_rank, nope_dim and v_dim, which it must say; shared_dim (that of its rope),
    attn_scale ((nope_dim + shared_dim)^-0.5), latent_eps (1e-6); and rope: of the shared key, while
    index keys have the same with pairs in halves. `indexer` off or `index_topk` < 0: every token is
    attended.
    """
    latent, nope_dim, v_dim = fields.sizes("kv_lora_rank", "nope_dim", "v_dim")
    kind, rope, dtype = fields.kind, fields.rope_of(fields.rope_theta), fields.cache_dtype
    d_query, shared = fields.q_lora_rank or fields.d_model, fields.get("shared_dim", rope.dim)
    indexer, topk = None, fields.index_topk
    if not (fields.indexer and topk >= 0):
        fields.idle(WITH_INDEXER, "index_heads", "index_dim")
    else:
        indexer = TokenIndexer(
            fields.d_model,
            d_query,
            fields.index_heads,
            fields.index_dim,
            topk,
            dataclasses.replace(rope, halves=True),
            EntryPool(
                "index_keys",
                f"{kind} index keys",
                1,
                fields.index_dim,
                dtype,
                2 * TILE,
                packing=fields.packing("index_keys", fields.index_dim),
            ),
        )
    return Mla(
        kind,
        fields.d_model,
        fields.n_heads,
        nope_dim,
        v_dim,
        latent,
        fields.q_lora_rank,
        rope,
        fields.get("attn_scale", (nope_dim + shared) ** -0.5),
        fields.get("latent_eps", EPS),
        EntryPool(
            "latent",
            f"{kind} latent",
            1,
            latent + shared,
            dtype,
            2 * TILE,
            packing=fields.packing("latent", latent + shared, shared),
        ),
        indexer,
        shared,
        fields.get("kernels", "auto"),
    )
