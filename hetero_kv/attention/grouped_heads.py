"""Grouped-query heads: several query heads share one key and one value head (arXiv 2305.13245).

Optional norms of queries and keys, biases, sinks, a cap on the logits, a scale of its own, a
sigmoid gate on the output (as in Qwen3-Next). A cached row of a token is its keys and then its
values, keys rotated. Used by full and local layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


@dataclasses.dataclass(frozen=True)
class GroupedHeads:
    """heads query heads share kv_heads keys and values of `dim` channels."""

    d_model: int
    heads: int
    kv_heads: int
    dim: int
    rope: Rope
    qk_norm: bool
    sinks: bool
    eps: float
    scale: float  # of logits
    cache_dtype: str
    bias: bool = False
    softcap: float = 0.0
    gate: bool = False  # columns of `q` are then, by head, the query's and the gate's
    rope_first: bool = False  # the first channels of a head are rotated, not the last

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} must divide n_heads={self.heads}")
        if self.rope.dim > self.dim:
            raise ValueError(f"rope dim {self.rope.dim} exceeds head_dim {self.dim}")
        if self.softcap < 0 or not self.scale > 0:
            raise ValueError(f"need softcap >= 0 and scale > 0: {self.softcap=}, {self.scale=}")

    @classmethod
    def of(cls, fields: Fields) -> "GroupedHeads":
        """From a layer type's fields; its own: rope, rope_first, attn_scale, attn_softcap,
        attn_bias, attn_gate."""
        return cls(
            d_model=fields.d_model,
            heads=fields.n_heads,
            kv_heads=fields.n_kv_heads,
            dim=fields.head_dim,
            rope=fields.rope_of(fields.rope_theta),
            qk_norm=fields.qk_norm,
            sinks=fields.sinks,
            eps=fields.norm_eps,
            scale=fields.get("attn_scale", fields.head_dim**-0.5),
            cache_dtype=fields.cache_dtype,
            bias=fields.get("attn_bias", False),
            softcap=fields.get("attn_softcap", 0.0),
            gate=fields.get("attn_gate", False),
            rope_first=fields.get("rope_first", False),
        )

    @property
    def width(self) -> int:
        """Channels of a cached row."""
        return 2 * self.kv_heads * self.dim

    @property
    def form(self) -> attend.Form:
        """What a cached row is."""
        return attend.Form(self.kv_heads, self.softcap)

    def params(self) -> ParamTree:
        """Projections, optional biases, optional norms of q and k, optional sinks."""
        wide, narrow = self.heads * self.dim, self.kv_heads * self.dim
        sizes = {"q": 2 * wide if self.gate else wide, "k": narrow, "v": narrow}
        tree = {name: matrix(self.d_model, size, reads="x") for name, size in sizes.items()}
        tree["o"] = matrix(wide, self.d_model)
        if self.bias:
            sizes["o"] = self.d_model
            tree |= {f"{name}_bias": ParamSpec((size,), "zeros") for name, size in sizes.items()}
        if self.qk_norm:
            tree |= {
                name: ParamSpec((self.dim,), "ones", dtype="float32")
                for name in ("q_norm", "k_norm")
            }
        return tree | (
            {"sinks": ParamSpec((self.heads,), "zeros", dtype="float32")} if self.sinks else {}
        )

    def _linear(self, params: Params, name: str, x: jax.Array) -> jax.Array:
        y = linear(x, params[name])
        return y + params[f"{name}_bias"] if self.bias else y

    def _queries(self, params: Params, x: jax.Array) -> jax.Array:
        """[R, S, H, c], or [R, S, H, 2 c] with gates."""
        return self._linear(params, "q", x).reshape(*x.shape[:-1], self.heads, -1)

    def _turn(self, x: jax.Array, turn: Table) -> jax.Array:
        if not self.rope_first:
            return rotate(x, turn, halves=self.rope.halves)
        first, rest = x[..., : self.rope.dim], x[..., self.rope.dim :]
        return jnp.concatenate([rotate(first, turn, halves=self.rope.halves), rest], axis=-1)

    def project(self, params: Params, x: jax.Array, turn: Table) -> tuple[jax.Array, jax.Array]:
        """q [R, S, G, h, c] and the rows to cache [R, S, 2 * G * c] of x [R, S, d]."""
        lead = x.shape[:-1]
        q = self._queries(params, x)[..., : self.dim]
        k = self._linear(params, "k", x).reshape(*lead, self.kv_heads, self.dim)
        v = self._linear(params, "v", x)
        if self.qk_norm:
            q = rms_norm(q, params["q_norm"], self.eps)
            k = rms_norm(k, params["k_norm"], self.eps)
        turn = Table(turn.cos[..., None, :], turn.sin[..., None, :])
        q, k = self._turn(q, turn), self._turn(k, turn)
        q = q.reshape(*lead, self.kv_heads, self.heads // self.kv_heads, self.dim)
        row = jnp.concatenate([k.reshape(*lead, -1), v], axis=-1)
        return q, row.astype(self.cache_dtype)

    def begin(self, params: Params, q: jax.Array) -> attend.State:
        """The softmax before any key: sinks alone."""
        sinks = params.get("sinks")
        sinks = None if sinks is None else sinks.reshape(q.shape[-3:-1])
        return attend.begin(q.shape[:-1], self.dim, sinks)

    def output(self, params: Params, state: attend.State, x: jax.Array) -> jax.Array:
        """The attention's output [R, S, d], in the dtype of its input x [R, S, d]."""
        out = attend.finish(state).astype(x.dtype)
        if self.gate:
            gate = self._queries(params, x)[..., self.dim :]
            out = out * jax.nn.sigmoid(gate).reshape(out.shape)
        return self._linear(params, "o", out.reshape(*x.shape[:-1], -1))
