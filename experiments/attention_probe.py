"""Where grouped-query attention falls: on the first token, on the sink; and how large streams grow.

Attention that has nothing to say gathers on the first tokens (StreamingLLM, arXiv 2309.17453); a
learned sink in the denominator takes it over (gpt-oss).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention import rope
from hetero_kv.attention.call import Call, Train
from hetero_kv.attention.full import Full
from hetero_kv.attention.local import Local
from hetero_kv.attention.norm import rms_norm
from models.decoder import Decoder
from models.layers import Layer


def masses(model: Decoder, params: dict, tokens: np.ndarray) -> dict[str, float]:
    """Means over heads and queries of tokens i32[B, T], and over the layers of each kind.

    first: attention on token 0, of queries in full layers behind it; sink: on the learned sink, of
    all queries and layers, by kind; largest: the largest magnitude in the residual stream.

    Raises:
        ValueError: A layer is of another kind than full and local.
    """
    for group in model.stack.groups:
        for layer in group.layers:
            if not isinstance(layer.attention, Full | Local):
                raise ValueError(
                    f"layer of kind {layer.attention.kind!r} is neither full nor local"
                )
    first, sink, largest = [], {"full": [], "local": []}, 0.0
    for layer, shares, lost, x in _layers(model, params, jnp.asarray(tokens)):
        kind = "full" if isinstance(layer.attention, Full) else "local"
        sink[kind].append(float(lost.mean()))
        if kind == "full":
            first.append(float(shares[:, 1:, ..., 0].mean()))
        largest = max(largest, float(jnp.abs(x).max()))
    means = {f"sink_{kind}": float(np.mean(values)) for kind, values in sink.items() if values}
    return {**({"first": float(np.mean(first))} if first else {}), **means, "largest": largest}


def _layers(
    model: Decoder, params: dict, tokens: jax.Array
) -> Iterator[tuple[Layer, jax.Array, jax.Array, jax.Array]]:
    """Of each layer: itself, attention [B, T, G, h, K], what the sink takes [B, T, G, h], and the
    stream behind it."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    layers = [layer for group in model.stack.groups for layer in group.layers]
    kinds = {kind for layer in layers for kind in layer.attention.ropes}
    tables = {kind: rope.table(kind, positions) for kind in kinds}
    zero = jnp.zeros(batch, jnp.int32)
    call = Call(zero, zero + length, positions, tables, zero, False)
    x = params["embed"][tokens] * model.stack.embed_scale
    for s, group in enumerate(model.stack.groups):
        for repeat in range(group.repeats):
            for i, layer in enumerate(group.layers):
                weights = jax.tree.map(lambda w: w[repeat], params["segments"][str(s)][str(i)])  # noqa: B023
                shares, lost = _attention(layer, weights, x, call)
                x, _ = layer.forward(weights, x, tokens, call, Train())
                yield layer, shares, lost, x


def _attention(
    layer: Layer, weights: dict, x: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array]:
    kind = layer.attention
    heads, params = kind.heads, weights["attn"]
    normed = rms_norm(x, weights["attn_norm"], layer.eps)
    q, rows = heads.project(params, normed, call.tables[heads.rope])
    k = rows.reshape(*rows.shape[:-1], 2, heads.kv_heads, -1)[..., 0, :, :]
    logits = jnp.einsum("rsghc,rkgc->rsghk", q, k) * heads.scale
    behind = call.positions[:, :, None] - call.positions[:, None, :]
    mask = behind >= 0
    if isinstance(kind, Local):
        mask &= behind < kind.window.width
    logits = jnp.where(mask[:, :, None, None], logits, -jnp.inf)
    sinks = params.get("sinks")
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1), jnp.zeros(logits.shape[:-1])
    sinks = jnp.broadcast_to(sinks.reshape(q.shape[-3:-1])[..., None], (*logits.shape[:-1], 1))
    shares = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)
    return shares[..., :-1], shares[..., -1]
