"""Gated DeltaNet: a delta rule whose state decays, behind a short convolution (arXiv 2412.06464).

As in Qwen3-Next: `key_heads` heads of normed queries and keys, each for some of the `value_heads`;
a gated norm of what the state gives.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm, unit
from hetero_kv.attention.recurrence import Operands
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.attention.short_conv import ShortConv
from hetero_kv.params import Params, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """key_heads of key_dim channels; value_heads, a multiple of them, of value_dim channels."""

    d_model: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.key_heads=} must divide {self.value_heads=}")

    @property
    def state(self) -> tuple[int, int, int]:
        """See `Form`."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def each(self) -> int:
        """Value heads of one key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def params(self) -> ParamTree:
        """qkvz, ba: by key head its query, key, values and gates, and strengths and decays."""
        wide = self.value_heads * self.value_dim
        return {
            "qkvz": ParamSpec((self.d_model, self.channels + wide)),
            "ba": ParamSpec((self.d_model, 2 * self.value_heads)),
            "dt_bias": ParamSpec((self.value_heads,), "zeros", dtype="float32"),
            "a_log": ParamSpec((self.value_heads,), "zeros", dtype="float32"),
            "norm": ParamSpec((self.value_dim,), "ones", dtype="float32"),
            "o": ParamSpec((wide, self.d_model)),
        }

    def _split(self, params: Params, x: jax.Array) -> list[jax.Array]:
        """Queries, keys, values, gates: [R, S, key_heads, ...]."""
        both = jnp.matmul(x, params["qkvz"]).reshape(*x.shape[:-1], self.key_heads, -1)
        wide = self.each * self.value_dim
        return jnp.split(both, [self.key_dim, 2 * self.key_dim, 2 * self.key_dim + wide], axis=-1)

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """See `Form`."""
        parts = self._split(params, x)[:3]
        return jnp.concatenate([y.reshape(*x.shape[:-1], -1) for y in parts], axis=-1)

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """See `Form`."""
        wide = self.key_heads * self.key_dim
        q, k, v = jnp.split(mixed, [wide, 2 * wide], axis=-1)
        q, k = (y.reshape(*x.shape[:-1], self.key_heads, -1) for y in (q, k))
        q, k = (jnp.repeat(unit(y), self.each, axis=-2) for y in (q, k))
        ba = jnp.matmul(x, params["ba"], preferred_element_type=jnp.float32)
        ba = ba.reshape(*x.shape[:-1], self.key_heads, 2, self.each)
        b, a = (ba[..., i, :].reshape(*x.shape[:-1], -1) for i in range(2))
        decay = -jnp.exp(params["a_log"]) * jax.nn.softplus(a + params["dt_bias"])
        v = v.reshape(*x.shape[:-1], self.value_heads, -1)
        return Operands(q * self.key_dim**-0.5, k, v, decay[..., None], jax.nn.sigmoid(b))

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """See `Form`."""
        gate = self._split(params, x)[3].reshape(out.shape).astype(jnp.float32)
        out = rms_norm(out, params["norm"], self.eps) * jax.nn.silu(gate)
        return jnp.matmul(out.astype(x.dtype).reshape(*x.shape[:-1], -1), params["o"])


def build(fields: Fields) -> Recurrent:
    """From a layer type's fields; its own: key_heads and value_heads of key_dim and
    value_dim channels, conv_width.
    """
    form = GatedDelta(
        fields.d_model,
        fields.key_heads,
        fields.value_heads,
        fields.key_dim,
        fields.value_dim,
        fields.norm_eps,
    )
    width, name = fields.get("conv_width", 4), f"{fields.kind} convolution"
    return Recurrent(fields.kind, form, ShortConv(name, width, form.channels, fields.dtype))
