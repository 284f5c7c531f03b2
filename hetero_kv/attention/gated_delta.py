"""Gated DeltaNet: a delta rule whose state decays, behind a short convolution (arXiv 2412.06464).

As in Qwen3-Next and Qwen3.5: `key_heads` heads of normed queries and keys, each for some of the
`value_heads`; a gated norm of what the state gives.
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
class GatedDelta:
    """key_heads of key_dim channels; value_heads, a multiple of them, of value_dim channels.

    by_key_head: projections hold, for one key head after the other, all that belongs to it (as
    Qwen3-Next's), and not one kind of thing after the other (as Qwen3.5's).
    """

    d_model: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_key_head: bool
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
        """qkvz: queries, keys, values and gates; ba: strengths and decays."""
        wide = self.value_heads * self.value_dim
        return {
            "qkvz": matrix(self.d_model, self.channels + wide),
            "ba": matrix(self.d_model, 2 * self.value_heads),
            "dt_bias": ParamSpec((self.value_heads,), "zeros", dtype="float32"),
            "a_log": ParamSpec((self.value_heads,), "zeros", dtype="float32"),
            "norm": ParamSpec((self.value_dim,), "ones", dtype="float32"),
            "o": matrix(wide, self.d_model),
        }

    def _split(self, params: Params, x: jax.Array) -> list[jax.Array]:
        """What is convolved, and gates."""
        both = linear(x, params["qkvz"])
        if not self.by_key_head:
            return jnp.split(both, [self.channels], axis=-1)
        both = both.reshape(*x.shape[:-1], self.key_heads, -1)
        cuts = [self.key_dim, 2 * self.key_dim, 2 * self.key_dim + self.each * self.value_dim]
        parts = [y.reshape(*x.shape[:-1], -1) for y in jnp.split(both, cuts, axis=-1)]
        return [jnp.concatenate(parts[:3], axis=-1), parts[3]]

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """See `Form`."""
        return self._split(params, x)[0]

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """See `Form`."""
        wide = self.key_heads * self.key_dim
        q, k, v = jnp.split(mixed, [wide, 2 * wide], axis=-1)
        q, k = (y.reshape(*x.shape[:-1], self.key_heads, -1) for y in (q, k))
        q, k = (jnp.repeat(unit(y), self.each, axis=-2) for y in (q, k))
        ba = linear(x, params["ba"], jnp.float32)
        if self.by_key_head:
            ba = ba.reshape(*x.shape[:-1], self.key_heads, 2, self.each).swapaxes(-2, -3)
            ba = ba.reshape(*x.shape[:-1], -1)
        b, a = jnp.split(ba, 2, axis=-1)
        decay = -jnp.exp(params["a_log"]) * jax.nn.softplus(a + params["dt_bias"])
        v = v.reshape(*x.shape[:-1], self.value_heads, -1)
        return Operands(q * self.key_dim**-0.5, k, v, decay[..., None], jax.nn.sigmoid(b))

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """See `Form`."""
        gate = self._split(params, x)[1].reshape(out.shape).astype(jnp.float32)
        out = rms_norm(out, params["norm"], self.eps) * jax.nn.silu(gate)
        return linear(out.astype(x.dtype).reshape(*x.shape[:-1], -1), params["o"])


def build(fields: Fields) -> Recurrent:
    """From a layer type's fields.

    Its own: key_heads of key_dim channels and value_heads of value_dim channels, which it must say;
    conv_width (4); by_key_head (True), the order of columns.
    """
    sizes = fields.sizes("key_heads", "value_heads", "key_dim", "value_dim")
    form = GatedDelta(fields.d_model, *sizes, fields.get("by_key_head", True), fields.norm_eps)
    width, name = fields.get("conv_width", 4), f"{fields.kind} convolution"
    return Recurrent(fields.kind, form, ShortConv(name, width, form.channels, fields.dtype))
