"""Lightning attention: a linear recurrence with a fixed decay per head and layer.

MiniMax-01 (arXiv 2501.08313), after TransNormerLLM (arXiv 2307.14995): `S <- exp(-s) S + k v^T`,
`o = S^T q`, with SiLU on queries, keys and values, and a norm over all heads under a gate.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.recurrence import Operands
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix

EPS = 1e-6  # of the norm, whatever that of the model is


@dataclasses.dataclass(frozen=True)
class Lightning:
    """heads of dim channels, in keys as in values."""

    d_model: int
    heads: int
    dim: int

    @property
    def state(self) -> tuple[int, int, int]:
        """See `Form`."""
        return self.heads, self.dim, self.dim

    def params(self) -> ParamTree:
        """qkv: by head its query, key and value. slope: s, which is not learned."""
        wide = self.heads * self.dim
        return {
            "qkv": matrix(self.d_model, 3 * wide),
            "gate": matrix(self.d_model, wide),
            "norm": ParamSpec((wide,), "ones", dtype="float32"),
            "o": matrix(wide, self.d_model),
            "slope": ParamSpec((self.heads,), "slopes", dtype="float32"),
        }

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """See `Form`."""
        return jax.nn.silu(linear(x, params["qkv"]))

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """See `Form`."""
        q, k, v = jnp.split(mixed.reshape(*mixed.shape[:-1], self.heads, -1), 3, axis=-1)
        slope = jax.lax.stop_gradient(params["slope"])[:, None]
        return Operands(q, k, v, jnp.broadcast_to(-slope, (*q.shape[:-1], 1)))

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """See `Form`."""
        out = rms_norm(out.reshape(*x.shape[:-1], -1).astype(x.dtype), params["norm"], EPS)
        return linear(out * jax.nn.sigmoid(linear(x, params["gate"])), params["o"])


def build(fields: Fields) -> Recurrent:
    """From a layer type's fields: n_heads of head_dim channels. It must say nothing of its own."""
    form = Lightning(fields.d_model, fields.n_heads, fields.head_dim)
    return Recurrent(fields.kind, form, None)
