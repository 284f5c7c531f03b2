"""Scores of the entries for every query, and the set of entries that each query attends to."""

from typing import Any

import numpy as np

from tests.oracle.maths import Array, Weights, linear, top_k
from tests.oracle.rope import rotate


def scores(
    config: Any, weights: Weights, prefix: str, x: Array, latent: Array, keys: Array, omega: Array
) -> Array:
    """`I[t,i] = Σ_h w[t,h] · relu(q[t,h] · K_i) · c_I^(-1/2)`; float64[T, n].

    x [T, d] is the layer's normed input, latent [T, q_lora_rank] the query latent (x itself where
    the model has none), keys [n, c_I] the index keys. `w = x · W_wᵀ · H_I^(-1/2)` may be negative.
    """
    shape = (x.shape[0], config.index_heads, config.index_dim)
    query = linear(latent, weights[prefix + "q_b_proj.weight"]).reshape(shape)
    query = rotate(query, np.arange(x.shape[0]), omega)
    head_weight = linear(x, weights[prefix + "scorer.weights_proj.weight"])
    head_weight = head_weight * config.index_heads**-0.5
    similarity = np.maximum(np.einsum("thc,nc->thn", query, keys), 0.0)
    return np.einsum("th,thn->tn", head_weight, similarity) * config.index_dim**-0.5


def select(scored: Array, visible: Array, k: int) -> tuple[Array, Array]:
    """Top-k of the visible entries of each query, all of them where no more are visible.

    Args:
        scored: float64[T, n].
        visible: bool[T, n].
        k: number of entries, >= 0.

    Returns:
        selected bool[T, n], and gap float64[T]: by how much the k-th score exceeds the next one,
        inf where nothing was left out. Equal scores prefer the lower index.
    """
    masked = np.where(visible, scored, -np.inf)
    order = top_k(masked, masked.shape[-1])
    selected = np.zeros_like(visible)
    np.put_along_axis(selected, order[:, :k], True, axis=-1)
    gap = np.full(len(scored), np.inf)
    if 0 < k < masked.shape[-1]:
        ranked = np.take_along_axis(masked, order, axis=-1)
        more = visible.sum(axis=-1) > k
        gap[more] = ranked[more, k - 1] - ranked[more, k]
    return selected & visible, gap
