"""The four attention layers: sliding window, the two that also read entries, and full attention."""

from typing import Any

import numpy as np

from tests.oracle import packing
from tests.oracle.compressor import compress, visible
from tests.oracle.indexer import scores, select
from tests.oracle.maths import Array, Weights, linear, rms_norm
from tests.oracle.rope import frequencies, rotate
from tests.oracle.trace import LayerTrace


def attend(query: Array, keys: Array, values: Array, mask: Array, sinks: Array | None) -> Array:
    """Softmax attention of one head group over one context, with an optional sink per head.

    Args:
        query: float64[T, H, c].
        keys: float64[S, c].
        values: float64[S, c].
        mask: bool[T, S], what each query may see.
        sinks: float64[H], a logit without a value, or None.

    Returns:
        float64[T, H, c]; 0 where a query sees nothing.
    """
    out = np.zeros_like(query)
    logits = np.einsum("thc,sc->ths", query, keys) * query.shape[-1] ** -0.5
    for t in range(query.shape[0]):
        seen = np.flatnonzero(mask[t])
        if seen.size == 0:
            continue
        row = logits[t, :, seen].T  # [H, seen]
        top = row.max(axis=-1) if sinks is None else np.maximum(row.max(axis=-1), sinks)
        weight = np.exp(row - top[:, None])
        total = weight.sum(axis=-1)
        if sinks is not None:
            total = total + np.exp(sinks - top)
        out[t] = (weight / total[:, None]) @ values[seen]
    return out


def window_mask(length: int, window: int) -> Array:
    """Row j is visible to query t iff `0 <= t - j < W`; bool[T, T]."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return (distance >= 0) & (distance < window)


def query_latent(config: Any, weights: Weights, prefix: str, x: Array) -> tuple[Array, Array]:
    """The query latent and the heads' queries, normed but not rotated: [T, rank], [T, H, c].

    Without a low rank the latent is x itself.
    """
    latent, projection = x, "q_proj.weight"
    if config.q_lora_rank:
        latent = linear(x, weights[prefix + "q_a_proj.weight"])
        latent = rms_norm(latent, config.norm_eps, weights[prefix + "q_a_norm.weight"])
        projection = "q_b_proj.weight"
    query = linear(latent, weights[prefix + projection])
    query = query.reshape(x.shape[0], config.n_heads, config.head_dim)
    return latent, rms_norm(query, config.norm_eps)


def output(config: Any, weights: Weights, prefix: str, heads: Array) -> Array:
    """Output projection of [T, H, c] to [T, d]: per group of heads and then joint, or direct."""
    if not config.o_groups:
        return linear(heads.reshape(len(heads), -1), weights[prefix + "o_proj.weight"])
    groups = heads.reshape(len(heads), config.o_groups, -1)
    first = np.asarray(weights[prefix + "o_a_proj.weight"], np.float64)
    first = first.reshape(config.o_groups, config.o_lora_rank, -1)
    inner = np.einsum("tgi,goi->tgo", groups, first).reshape(len(heads), -1)
    return linear(inner, weights[prefix + "o_b_proj.weight"])


def sinks_of(config: Any, weights: Weights, prefix: str) -> Array | None:
    """Sink logits float64[H], or None where the model has none."""
    return np.asarray(weights[prefix + "sinks"], np.float64) if config.sinks else None


def entries_of(
    config: Any,
    weights: Weights,
    prefix: str,
    layer_type: str,
    x: Array,
    latent: Array,
    omega: Array,
    forced: Array | None,
    trace: LayerTrace,
) -> tuple[Array, Array]:
    """Entries [n, c] of a compressing layer and which of them each query attends to, bool[T, n]."""
    ratio = config.csa_ratio if layer_type == "csa" else config.hca_ratio
    overlap = layer_type == "csa" and config.csa_overlap
    name = prefix + "compressor."
    made = compress(config, weights, name, x, ratio, overlap, omega)
    trace.raw_kv, trace.raw_gate, entries = made
    trace.entries = packing.stored(config, "entries", entries, trace, config.rope_dim, ratio=ratio)
    seen = visible(len(x), len(entries), ratio)
    trace.selected = seen
    if layer_type == "csa" and config.indexer and config.index_topk >= 0:
        index = compress(config, weights, name + "indexer.", x, ratio, overlap, omega)
        trace.index_raw_kv, trace.index_raw_gate, keys = index
        trace.index_keys = keys = packing.stored(config, "index_keys", keys, trace, ratio=ratio)
        trace.index_scores = scores(config, weights, name + "indexer.", x, latent, keys, omega)
        trace.selected, trace.gap = select(trace.index_scores, seen, config.index_topk)
        if forced is not None:
            trace.selected = np.asarray(forced, bool) & seen
    return trace.entries, trace.selected


def shared_row_attention(
    config: Any,
    weights: Weights,
    prefix: str,
    layer_type: str,
    x: Array,
    forced: Array | None,
    trace: LayerTrace,
) -> Array:
    """Sliding, CSA and HCA layers: one row per token is key and value of all heads; [T, d].

    The context of a query is its window and then its entries; both may hold the same token. Values
    carry the rotation of their key, so the output is rotated back at the query's position.
    """
    positions, omega = np.arange(len(x)), frequencies(config, layer_type)
    latent, query = query_latent(config, weights, prefix, x)
    query = rotate(query, positions, omega)
    context = np.zeros((0, config.head_dim))
    mask = np.zeros((len(x), 0), bool)
    if config.window:
        rows = linear(x, weights[prefix + "kv_proj.weight"])
        rows = rms_norm(rows, config.norm_eps, weights[prefix + "kv_norm.weight"])
        rows = rotate(rows, positions, omega)
        trace.rows = context = packing.stored(config, "window", rows, trace, config.rope_dim)
        mask = window_mask(len(x), config.window)
    if layer_type != "swa":
        entries, selected = entries_of(
            config, weights, prefix, layer_type, x, latent, omega, forced, trace
        )
        context = np.concatenate([context, entries])
        mask = np.concatenate([mask, selected], axis=1)
    heads = attend(query, context, context, mask, sinks_of(config, weights, prefix))
    return output(config, weights, prefix, rotate(heads, -positions, omega))


def full_attention(
    config: Any, weights: Weights, prefix: str, x: Array, trace: LayerTrace
) -> Array:
    """Causal attention with keys and values of their own, shared by groups of heads; [T, d]."""
    length, positions, omega = len(x), np.arange(len(x)), frequencies(config, "full")
    query = linear(x, weights[prefix + "q_proj.weight"])
    query = query.reshape(length, config.n_heads, config.head_dim)
    keys = linear(x, weights[prefix + "k_proj.weight"])
    keys = keys.reshape(length, config.n_kv_heads, config.head_dim)
    values = linear(x, weights[prefix + "v_proj.weight"]).reshape(keys.shape)
    if config.qk_norm:
        query = rms_norm(query, config.norm_eps, weights[prefix + "q_norm.weight"])
        keys = rms_norm(keys, config.norm_eps, weights[prefix + "k_norm.weight"])
    query, keys = rotate(query, positions, omega), rotate(keys, positions, omega)
    both = np.concatenate([x.reshape(length, -1) for x in (keys, values)], axis=1)
    both = packing.stored(config, "kv", both, trace, group=config.head_dim)
    keys, values = (x.reshape(keys.shape) for x in np.split(both, 2, axis=1))
    trace.keys, trace.values = keys, values
    sinks = sinks_of(config, weights, prefix)
    mask, per_group = window_mask(length, length), config.n_heads // config.n_kv_heads
    heads = np.zeros_like(query)
    for g in range(config.n_kv_heads):
        own = slice(g * per_group, (g + 1) * per_group)
        group_sinks = None if sinks is None else sinks[own]
        heads[:, own] = attend(query[:, own], keys[:, g], values[:, g], mask, group_sinks)
    return linear(heads.reshape(length, -1), weights[prefix + "o_proj.weight"])


def attention(
    config: Any,
    weights: Weights,
    layer: int,
    x: Array,
    forced: Array | None,
    trace: LayerTrace,
) -> Array:
    """Attention of layer `layer` on its normed input x [T, d] -> [T, d]."""
    prefix, layer_type = f"model.layers.{layer}.self_attn.", config.layer_types[layer]
    if layer_type == "full":
        return full_attention(config, weights, prefix, x, trace)
    return shared_row_attention(config, weights, prefix, layer_type, x, forced, trace)
