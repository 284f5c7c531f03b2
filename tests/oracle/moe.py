"""Feed-forward layers: dense, mixture of experts, mixture of experts chosen by token id."""

from typing import Any

import numpy as np

from tests.oracle.maths import Array, Weights, linear, sigmoid, top_k
from tests.oracle.trace import LayerTrace


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """`silu(min(g, L)) · clip(u, -L, L)`: the gate is clipped above only; L = 0 clips nothing."""
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(gate) * up


def dense(config: Any, weights: Weights, prefix: str, x: Array) -> Array:
    """One SwiGLU block whose three tensors start with `prefix`; [T, d] -> [T, d]."""
    gate = linear(x, weights[prefix + "gate_proj.weight"])
    up = linear(x, weights[prefix + "up_proj.weight"])
    return linear(swiglu(gate, up, config.swiglu_limit), weights[prefix + "down_proj.weight"])


def route(
    config: Any, weights: Weights, prefix: str, x: Array, tokens: Array, hashed: bool
) -> tuple[Array, Array, Array]:
    """Experts of each token i64[T, k], their weights float64[T, k], and the gap of the choice [T].

    `s = sqrt(softplus(x · Wᵀ))`. A learned bias enters the choice but not the weights; a hash
    layer looks its experts up by token id.
    """
    score = np.sqrt(np.logaddexp(0.0, linear(x, weights[prefix + "weight"])))
    k, gap = config.experts_per_token, np.full(len(x), np.inf)
    if hashed:
        chosen = np.asarray(weights[prefix + "tid2eid"])[tokens]
    else:
        biased = score + np.asarray(weights[prefix + "e_score_correction_bias"], np.float64)
        order = top_k(biased, biased.shape[-1])
        chosen = order[:, :k]
        if k < biased.shape[-1]:
            ranked = np.take_along_axis(biased, order, axis=-1)
            gap = ranked[:, k - 1] - ranked[:, k]
    weight = np.take_along_axis(score, chosen, axis=-1)
    weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20) * config.routed_scale
    return chosen, weight, gap


def mixture(
    config: Any,
    weights: Weights,
    prefix: str,
    x: Array,
    tokens: Array,
    hashed: bool,
    trace: LayerTrace,
) -> Array:
    """Weighted sum of the chosen experts, plus the shared expert; [T, d] -> [T, d]."""
    chosen, weight, gap = route(config, weights, prefix + "gate.", x, tokens, hashed)
    trace.experts, trace.router_gap = chosen, gap
    gate_up, down = weights[prefix + "experts.gate_up_proj"], weights[prefix + "experts.down_proj"]
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(chosen[t], weight[t], strict=True):
            gate, up = np.split(linear(x[t], gate_up[e]), 2)
            out[t] += w * linear(swiglu(gate, up, config.swiglu_limit), down[e])
    if config.n_shared_experts:
        out = out + dense(config, weights, prefix + "shared_experts.", x)
    return out


def feed_forward(
    config: Any, weights: Weights, layer: int, x: Array, tokens: Array, trace: LayerTrace
) -> Array:
    """Feed-forward block of layer `layer` on its normed input x [T, d] -> [T, d]."""
    prefix, kind = f"model.layers.{layer}.mlp.", config.mlp_types[layer]
    if kind == "dense":
        return dense(config, weights, prefix, x)
    return mixture(config, weights, prefix, x, tokens, kind == "hash_moe", trace)
