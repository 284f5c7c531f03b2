"""Shared-latent heads: one row per token is both key and value of all heads (V4 report, 2.3).

Queries through an optional low-rank latent, partial interleaved rotation, the conjugate rotation
on the output (values are rotated, since they are the keys), and a grouped low-rank output
projection. Sliding, CSA and HCA layers have these in common.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.linear import grouped, linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


class Heads(NamedTuple):
    """q [R, S, H, c] rotated; kv [R, S, c] rotated, in the cache's dtype; latent [R, S, q_in]."""

    q: jax.Array
    kv: jax.Array | None
    latent: jax.Array


@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """Sizes of the shared-latent form; 0 switches a low-rank part off."""

    d_model: int
    heads: int
    dim: int
    rope: Rope
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sinks: bool
    eps: float
    cache_dtype: str
    own_rows: bool = True  # False: no window branch, so no kv row per token
    kernels: str = "auto"  # implementation of decoding's and training's ops: `kernels.dispatch`

    def __post_init__(self):
        if self.rope.dim > self.dim:
            raise ValueError(f"rope dim {self.rope.dim} exceeds head_dim {self.dim}")
        if self.o_groups and (self.heads % self.o_groups or not self.o_lora_rank):
            raise ValueError(
                f"o_groups={self.o_groups} must divide n_heads={self.heads} and needs "
                f"o_lora_rank > 0 (got {self.o_lora_rank})"
            )

    @classmethod
    def of(cls, fields: Fields, rope: Rope) -> "LatentHeads":
        """From a layer type's fields."""
        return cls(
            fields.d_model,
            fields.n_heads,
            fields.head_dim,
            rope,
            fields.q_lora_rank,
            fields.o_groups,
            fields.o_lora_rank,
            fields.sinks,
            fields.norm_eps,
            fields.cache_dtype,
            own_rows=fields.window > 0,
            kernels=fields.get("kernels", "auto"),
        )

    @property
    def trains_with_kernels(self) -> bool:
        """Whether training runs a kernel: only one that is named, since "auto" keeps autodiff."""
        return self.kernels not in ("auto", "reference")

    @property
    def scale(self) -> float:
        """Of logits."""
        return self.dim**-0.5

    @property
    def d_query(self) -> int:
        """Width of the latent that queries (and index queries) are projected from."""
        return self.q_lora_rank or self.d_model

    def params(self) -> ParamTree:
        """Weights; `o_a` is [groups, heads / groups * dim, rank]."""
        wide = self.heads * self.dim
        tree: dict = {}
        if self.q_lora_rank:
            tree["q_a"] = matrix(self.d_model, self.q_lora_rank, reads="x")
            tree["q_a_norm"] = ParamSpec((self.q_lora_rank,), "ones", dtype="float32")
            tree["q_b"] = matrix(self.q_lora_rank, wide, reads="latent")
        else:
            tree["q"] = matrix(self.d_model, wide, reads="x")
        if self.own_rows:
            tree["kv"] = matrix(self.d_model, self.dim, reads="x")
            tree["kv_norm"] = ParamSpec((self.dim,), "ones", dtype="float32")
        if self.o_groups:
            tree["o_a"] = matrix(self.o_groups, wide // self.o_groups, self.o_lora_rank)
            tree["o_b"] = matrix(self.o_groups * self.o_lora_rank, self.d_model)
        else:
            tree["o"] = matrix(wide, self.d_model)
        if self.sinks:
            tree["sinks"] = ParamSpec((self.heads,), "zeros", dtype="float32")
        return tree

    def project(self, params: Params, x: jax.Array, turn: Table) -> Heads:
        """Queries and the token's own key-value row of x [R, S, d]."""
        latent = x
        if self.q_lora_rank:
            latent = rms_norm(linear(x, params["q_a"]), params["q_a_norm"], self.eps)
        q = linear(latent, params["q_b" if self.q_lora_rank else "q"])
        q = rms_norm(q.reshape(*x.shape[:-1], self.heads, self.dim), None, self.eps)
        q = rotate(q, Table(turn.cos[..., None, :], turn.sin[..., None, :]))
        kv = None
        if self.own_rows:
            kv = rms_norm(linear(x, params["kv"]), params["kv_norm"], self.eps)
            kv = rotate(kv, turn).astype(self.cache_dtype)
        return Heads(q, kv, latent)

    def output(self, params: Params, out: jax.Array, turn: Table, dtype: jnp.dtype) -> jax.Array:
        """Attention output f32[R, S, H, c] to [R, S, d]."""
        out = out.astype(dtype)
        turn = Table(turn.cos[..., None, :], turn.sin[..., None, :])
        out = rotate(out, turn, inverse=True)
        lead = out.shape[:-2]
        if not self.o_groups:
            return linear(out.reshape(*lead, -1), params["o"])
        out = out.reshape(*lead, self.o_groups, -1)
        low = grouped(out, params["o_a"])
        return linear(low.reshape(*lead, -1), params["o_b"])
