"""The whole decoder: embedding, layers, output norm, logits."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracle import hyper
from tests.oracle.attention import attention
from tests.oracle.maths import Array, Weights, linear, rms_norm
from tests.oracle.moe import feed_forward
from tests.oracle.trace import LayerTrace, Trace


def forward(
    config: Any,
    weights: Weights,
    tokens: Array,
    forced_selection: Mapping[int, Array] | None = None,
) -> tuple[Array, Trace]:
    """Logits of a whole sequence from an empty state.

    Args:
        config: anything with the fields of `DecoderConfig`.
        weights: tensors by Hugging Face name, [out, in]; read as float64.
        tokens: i[T].
        forced_selection: by layer, bool[T, T // m]: the entries to attend to in place of the
            indexer's choice (visibility still holds).

    Returns:
        float64[T, vocab_size], and the internals of every layer.
    """
    tokens = np.asarray(tokens)
    embedding = np.asarray(weights["model.embed_tokens.weight"], np.float64)
    state = embedding[tokens]
    if config.hc_streams:
        state = np.repeat(state[:, None, :], config.hc_streams, axis=1)
    trace = Trace()
    for i in range(len(config.layer_types)):
        record = LayerTrace()
        forced = None if forced_selection is None else forced_selection.get(i)
        state = layer(config, weights, i, state, tokens, forced, record)
        trace.layers.append(record)
    if config.hc_streams:
        state = hyper.collapse(config, weights, "model.hc_head.", state)
    trace.hidden = state
    normed = rms_norm(state, config.norm_eps, weights["model.norm.weight"])
    head = embedding if config.tie_embeddings else weights["lm_head.weight"]
    return linear(normed, head), trace


def layer(
    config: Any,
    weights: Weights,
    index: int,
    state: Array,
    tokens: Array,
    forced: Array | None,
    trace: LayerTrace,
) -> Array:
    """One layer: attention and then feed-forward, each on a norm of what it reads.

    State is [T, N, d] with hyper-connections and [T, d], a plain residual, without.
    """

    def attend(x: Array) -> Array:
        trace.attention_out = attention(config, weights, index, x, forced, trace)
        return trace.attention_out

    def feed(x: Array) -> Array:
        trace.mlp_out = feed_forward(config, weights, index, x, tokens, trace)
        return trace.mlp_out

    prefix = f"model.layers.{index}."
    blocks = ((attend, "input_layernorm", "attn_hc"), (feed, "post_attention_layernorm", "ffn_hc"))
    for block, norm, connection in blocks:
        norm_weight = weights[f"{prefix}{norm}.weight"]
        if config.hc_streams:
            mixed = hyper.mix(config, weights, f"{prefix}{connection}.", state)
            out = block(rms_norm(mixed.read, config.norm_eps, norm_weight))
            state = hyper.write(state, mixed, out)
        else:
            state = state + block(rms_norm(state, config.norm_eps, norm_weight))
    return state
