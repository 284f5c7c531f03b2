"""Kimi Delta Attention: a delta rule whose state decays by key channel (arXiv 2510.26692).

Short convolutions on queries, keys and values; decays and the output's gate are of low rank.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm, unit
from hetero_kv.attention.recurrence import Operands
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.attention.short_conv import ShortConv
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


@dataclasses.dataclass(frozen=True)
class KimiDelta:
    """heads of dim channels, in keys as in values."""

    d_model: int
    heads: int
    dim: int
    eps: float

    @property
    def state(self) -> tuple[int, int, int]:
        """See `Form`."""
        return self.heads, self.dim, self.dim

    def params(self) -> ParamTree:
        """f: decays, b: strengths, g: the output's gate; a and b: down to `dim`, and up again."""
        d, wide = self.d_model, self.heads * self.dim
        tree = {name: matrix(d, wide) for name in "qkv"}
        for name in "fg":
            tree |= {
                f"{name}_a": matrix(d, self.dim),
                f"{name}_b": matrix(self.dim, wide),
            }
        return tree | {
            "b": matrix(d, self.heads),
            "dt_bias": ParamSpec((wide,), "zeros", dtype="float32"),
            "a_log": ParamSpec((self.heads,), "zeros", dtype="float32"),
            "norm": ParamSpec((self.dim,), "ones", dtype="float32"),
            "o": matrix(wide, d),
        }

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, self.dim)

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """See `Form`."""
        return jnp.concatenate([linear(x, params[name]) for name in "qkv"], axis=-1)

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """See `Form`."""
        q, k, v = (self._heads(y) for y in jnp.split(mixed, 3, axis=-1))
        rate = linear(linear(x, params["f_a"]), params["f_b"]).astype(jnp.float32)
        rate = self._heads(jax.nn.softplus(rate + params["dt_bias"]))
        decay = -jnp.exp(params["a_log"])[:, None] * rate
        beta = jax.nn.sigmoid(linear(x, params["b"], jnp.float32))
        return Operands(unit(q) * self.dim**-0.5, unit(k), v, decay, beta)

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """See `Form`."""
        gate = linear(linear(x, params["g_a"]), params["g_b"]).astype(jnp.float32)
        out = rms_norm(out, params["norm"], self.eps) * jax.nn.sigmoid(self._heads(gate))
        return linear(out.astype(x.dtype).reshape(*x.shape[:-1], -1), params["o"])


def build(fields: Fields) -> Recurrent:
    """From a layer type's fields.

    Its own: linear_heads and linear_dim, which it must say; conv_width (4).
    """
    heads, dim = fields.sizes("linear_heads", "linear_dim")
    form = KimiDelta(fields.d_model, heads, dim, fields.norm_eps)
    channels, width = 3 * form.heads * form.dim, fields.get("conv_width", 4)
    conv = ShortConv(f"{fields.kind} convolution", width, channels, fields.dtype)
    return Recurrent(fields.kind, form, conv)
