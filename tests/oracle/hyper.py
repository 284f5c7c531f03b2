"""Hyper-connections: N residual streams, mixed by a matrix made nearly doubly stochastic."""

from typing import Any, NamedTuple

import numpy as np

from tests.oracle.maths import Array, Weights, linear, rms_norm, sigmoid, softmax


class Mix(NamedTuple):
    """How a block reads and writes the streams of each token."""

    post: Array  # [T, N], weight of the block's output in each stream
    comb: Array  # [T, N, N], weight of stream j in new stream k at [j, k]
    read: Array  # [T, d], the block's input


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Row softmax, then one column pass and `iterations - 1` row and column passes; [..., N, N]."""
    m = softmax(logits, axis=-1) + eps
    m = m / (m.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=-1, keepdims=True) + eps)
        m = m / (m.sum(axis=-2, keepdims=True) + eps)
    return m


def mix(config: Any, weights: Weights, prefix: str, streams: Array) -> Mix:
    """Weights of one hyper-connection for streams [T, N, d]; `prefix` names its tensors."""
    n, eps = streams.shape[1], config.hc_eps
    flat = rms_norm(streams.reshape(len(streams), -1), config.norm_eps)
    z = linear(flat, weights[prefix + "fn"])
    base = np.asarray(weights[prefix + "base"], np.float64)
    s_pre, s_post, s_comb = np.asarray(weights[prefix + "scale"], np.float64)
    pre = sigmoid(s_pre * z[:, :n] + base[:n]) + eps
    post = 2.0 * sigmoid(s_post * z[:, n : 2 * n] + base[n : 2 * n])
    logits = (s_comb * z[:, 2 * n :] + base[2 * n :]).reshape(-1, n, n)
    comb = sinkhorn(logits, config.hc_sinkhorn_iters, eps)
    return Mix(post, comb, np.einsum("tn,tnd->td", pre, streams))


def write(streams: Array, mixed: Mix, block_out: Array) -> Array:
    """`X[k] = post[k] · y + Σ_j comb[j, k] · X[j]`: the matrix acts transposed; [T, N, d]."""
    carried = np.einsum("tjk,tjd->tkd", mixed.comb, streams)
    return mixed.post[:, :, None] * block_out[:, None, :] + carried


def collapse(config: Any, weights: Weights, prefix: str, streams: Array) -> Array:
    """Weighted sum of the streams before the output norm; [T, N, d] -> [T, d]."""
    flat = rms_norm(streams.reshape(len(streams), -1), config.norm_eps)
    z = linear(flat, weights[prefix + "hc_fn"])
    scale = float(np.asarray(weights[prefix + "hc_scale"]).reshape(()))
    base = np.asarray(weights[prefix + "hc_base"], np.float64)
    pre = sigmoid(scale * z + base) + config.hc_eps
    return np.einsum("tn,tnd->td", pre, streams)
