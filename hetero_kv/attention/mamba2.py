"""Mamba-2: a selective state space as a linear recurrence (arXiv 2405.21060).

With a step `dt` per token and head: `S <- exp(-A dt) S + B (dt x)^T`, `y = S^T C + D x`; keys B and
queries C are shared by the heads of a group. x, B and C pass a short convolution.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.recurrence import Operands
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.attention.short_conv import ShortConv
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """heads of dim channels in `groups` groups, `states` channels of state; dt_min: least step."""

    d_model: int
    heads: int
    dim: int
    groups: int
    states: int
    dt_min: float
    eps: float

    def __post_init__(self):
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"ssm_groups={self.groups} must divide ssm_heads={self.heads}")

    @property
    def state(self) -> tuple[int, int, int]:
        """See `Form`."""
        return self.heads, self.states, self.dim

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.states

    def params(self) -> ParamTree:
        """in: the gate, then x, B and C, then steps."""
        per_head = ParamSpec((self.heads,), "zeros", dtype="float32")
        return {
            "in": matrix(self.d_model, self.inner + self.channels + self.heads),
            "dt_bias": per_head,
            "a_log": per_head,
            "skip": ParamSpec((self.heads,), "ones", dtype="float32"),
            "norm": ParamSpec((self.inner,), "ones", dtype="float32"),
            "o": matrix(self.inner, self.d_model),
        }

    def _split(self, params: Params, x: jax.Array) -> list[jax.Array]:
        """Gate, what is convolved, steps."""
        cuts = [self.inner, self.inner + self.channels]
        return jnp.split(linear(x, params["in"]), cuts, axis=-1)

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """See `Form`."""
        return self._split(params, x)[1]

    def _value(self, mixed: jax.Array) -> jax.Array:
        """x by head: f32[R, S, H, dim]."""
        return mixed[..., : self.inner].reshape(*mixed.shape[:-1], self.heads, self.dim)

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """See `Form`."""
        step = self._split(params, x)[2].astype(jnp.float32)
        step = jnp.maximum(jax.nn.softplus(step + params["dt_bias"]), self.dt_min)[..., None]
        k, q = jnp.split(mixed[..., self.inner :], 2, axis=-1)
        each = self.heads // self.groups
        q, k = (y.reshape(*y.shape[:-1], self.groups, self.states) for y in (q, k))
        q, k = (jnp.repeat(y, each, axis=-2) for y in (q, k))
        return Operands(q, k, step * self._value(mixed), -jnp.exp(params["a_log"])[:, None] * step)

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """See `Form`. The norm is of each group, after the gate."""
        out = out + params["skip"][:, None] * self._value(mixed)
        gate = self._split(params, x)[0].astype(jnp.float32)
        out = out.reshape(gate.shape) * jax.nn.silu(gate)
        parts = out.reshape(*gate.shape[:-1], self.groups, -1)
        out = rms_norm(parts, None, self.eps).reshape(gate.shape) * params["norm"]
        return linear(out.astype(x.dtype), params["o"])


def build(fields: Fields) -> Recurrent:
    """From a layer type's fields.

    Its own: ssm_heads, ssm_dim and ssm_states, which it must say; ssm_groups (1), ssm_dt_min (0),
    conv_width (4), conv_bias (True).
    """
    heads, dim, states = fields.sizes("ssm_heads", "ssm_dim", "ssm_states")
    groups, least = fields.get("ssm_groups", 1), fields.get("ssm_dt_min", 0.0)
    form = Mamba2(fields.d_model, heads, dim, groups, states, least, fields.norm_eps)
    width, bias = fields.get("conv_width", 4), fields.get("conv_bias", True)
    conv = ShortConv(f"{fields.kind} convolution", width, form.channels, fields.dtype, bias)
    return Recurrent(fields.kind, form, conv)
