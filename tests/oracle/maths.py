"""The few functions that every piece of the reference needs."""

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]


def linear(x: Array, weight: Array) -> Array:
    """`x · Wᵀ` for `W` of shape [out, in]; x [..., in] -> [..., out]."""
    return x @ np.asarray(weight, np.float64).T


def rms_norm(x: Array, eps: float, weight: Array | None = None) -> Array:
    """`x / sqrt(mean(x²) + eps)` over the last axis, times `weight` where there is one."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * np.asarray(weight, np.float64)


def sigmoid(x: Array) -> Array:
    """Logistic function, without overflow for large negative x."""
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x: Array, axis: int = -1) -> Array:
    """Softmax over `axis`; rows that are -inf throughout are not allowed."""
    exp = np.exp(x - x.max(axis=axis, keepdims=True))
    return exp / exp.sum(axis=axis, keepdims=True)


def top_k(scores: Array, k: int) -> Array:
    """Indices of the k largest along the last axis; among equal scores the lowest index first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
