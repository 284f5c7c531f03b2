"""Gated pooling of m rows into one entry, with or without the overlap with the block before."""

from typing import Any, NamedTuple

import numpy as np

from tests.oracle.maths import Array, Weights, linear, rms_norm, softmax
from tests.oracle.rope import rotate


class Compressed(NamedTuple):
    """What one compressor makes of a sequence; C is c, or 2c with overlap."""

    raw_kv: Array  # [T, C], before pooling: no bias, no norm, no rotation
    raw_gate: Array  # [T, C], without the position bias
    entries: Array  # [T // m, c], normed and rotated


def pool(kv: Array, gate: Array, bias: Array, ratio: int, overlap: bool) -> Array:
    """Per-channel softmax pooling of complete blocks; kv, gate [T, C], bias [m, C] -> [T // m, c].

    With overlap, block i pools the right halves of its own rows and the left halves of block i-1.
    """
    count = kv.shape[0] // ratio
    width = kv.shape[1] // 2 if overlap else kv.shape[1]
    out = np.zeros((count, width))
    for i in range(count):
        own = slice(ratio * i, ratio * (i + 1))
        rows, logits = kv[own, -width:], gate[own, -width:] + bias[:, -width:]
        if overlap and i > 0:
            before = slice(ratio * (i - 1), ratio * i)
            rows = np.concatenate([kv[before, :width], rows])
            logits = np.concatenate([gate[before, :width] + bias[:, :width], logits])
        out[i] = np.sum(softmax(logits, axis=0) * rows, axis=0)
    return out


def compress(
    config: Any, weights: Weights, prefix: str, x: Array, ratio: int, overlap: bool, omega: Array
) -> Compressed:
    """Entries of a layer from its normed input x [T, d]; `prefix` names the compressor's tensors.

    Order: pool, weighted norm, rotation at the position of the block's first token, `m·i`.
    """
    raw_kv = linear(x, weights[prefix + "kv_proj.weight"])
    raw_gate = linear(x, weights[prefix + "gate_proj.weight"])
    bias = np.asarray(weights[prefix + "position_bias"], np.float64)
    pooled = pool(raw_kv, raw_gate, bias, ratio, overlap)
    normed = rms_norm(pooled, config.norm_eps, weights[prefix + "kv_norm.weight"])
    return Compressed(raw_kv, raw_gate, rotate(normed, ratio * np.arange(len(pooled)), omega))


def visible(length: int, count: int, ratio: int) -> Array:
    """Entry i is visible to query t iff `i < (t + 1) // m`; bool[T, n]."""
    return np.arange(count)[None, :] < ((np.arange(length) + 1) // ratio)[:, None]
