"""Manifold-constrained hyper-connections: several residual streams (V4 report, section 2.2).

Each block reads one mixture of the streams and writes back to all of them, while a doubly
stochastic matrix (Sinkhorn) mixes the streams. Pointwise in the token axis: no cached state.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.norm import rms_norm
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Hyper:
    """streams: N; iters: Sinkhorn normalisations, columns first and last."""

    d_model: int
    streams: int
    iters: int
    eps: float
    norm_eps: float

    def __post_init__(self):
        if self.streams < 1 or self.iters < 1:
            raise ValueError(f"hyper-connections need streams, iters >= 1, got {self}")

    def params(self) -> ParamTree:
        """fn, base and the scales of its three parts (pre, post, mix)."""
        n = self.streams
        return {
            "fn": ParamSpec((n * self.d_model, (2 + n) * n), dtype="float32", product=True),
            "base": ParamSpec(((2 + n) * n,), "zeros", dtype="float32"),
            "scale": ParamSpec((3,), "ones", dtype="float32"),
        }

    def head_params(self) -> ParamTree:
        """The mixture in front of the output head."""
        n = self.streams
        return {
            "fn": ParamSpec((n * self.d_model, n), dtype="float32", product=True),
            "base": ParamSpec((n,), "zeros", dtype="float32"),
            "scale": ParamSpec((1,), "ones", dtype="float32"),
        }

    def expand(self, x: jax.Array) -> jax.Array:
        """Embeddings [..., d] to equal streams [..., N, d]."""
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.streams, x.shape[-1]))

    def _features(self, params: Params, streams: jax.Array) -> jax.Array:
        flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
        return linear(rms_norm(flat, None, self.norm_eps), params["fn"])

    def _mixture(self, weights: jax.Array, streams: jax.Array) -> jax.Array:
        """sum_j weights[..., j] * streams[..., j, :], unrolled (a CPU sum is slow otherwise)."""
        total = weights[..., 0, None] * streams[..., 0, :].astype(jnp.float32)
        for j in range(1, self.streams):
            total = total + weights[..., j, None] * streams[..., j, :].astype(jnp.float32)
        return total

    def read(
        self, params: Params, streams: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The block's input [..., d], and (post [..., N], mix [..., N, N]) for `write`."""
        n = self.streams
        z = self._features(params, streams)
        scale, base = params["scale"], params["base"]
        pre = jax.nn.sigmoid(scale[0] * z[..., :n] + base[:n]) + self.eps
        post = 2 * jax.nn.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
        mix = scale[2] * z[..., 2 * n :] + base[2 * n :]
        mix = self._sinkhorn(mix.reshape(*mix.shape[:-1], n, n))
        return self._mixture(pre, streams).astype(streams.dtype), (post, mix)

    def _sinkhorn(self, logits: jax.Array) -> jax.Array:
        """softmax over rows + eps, its columns normalised, then rows and columns in turns.

        The softmax's division is the first of the loop, in which XLA makes one kernel of all of it.
        """

        def step(i: jax.Array, m: jax.Array) -> jax.Array:
            within, after = jnp.where(i == 0, 0.0, self.eps), jnp.where(i == 0, self.eps, 0.0)
            m = m / (jnp.sum(m, axis=-1, keepdims=True) + within) + after
            return m / (jnp.sum(m, axis=-2, keepdims=True) + self.eps)

        most = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        return jax.lax.fori_loop(0, self.iters, step, jnp.exp(logits - most))

    def write(
        self, streams: jax.Array, y: jax.Array, gates: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """streams[k] = post[k] * y + sum_j mix[j, k] * streams[j]: [..., N, d]."""
        post, mix = gates
        y = y.astype(jnp.float32)
        out = [
            post[..., k, None] * y + self._mixture(mix[..., :, k], streams)
            for k in range(self.streams)
        ]
        return jnp.stack(out, axis=-2).astype(streams.dtype)

    def collapse(self, params: Params, streams: jax.Array) -> jax.Array:
        """The mixture [..., d] that the final norm and the head see."""
        z = self._features(params, streams)
        pre = jax.nn.sigmoid(params["scale"] * z + params["base"]) + self.eps
        return self._mixture(pre, streams).astype(streams.dtype)
