"""Random tensors for any configuration of the reference, made on first use.

A forward pass asks only for the tensors that its configuration has, so the dictionary then holds
exactly those.
"""

from typing import Any

import numpy as np

from tests.oracle.maths import Array


class RandomWeights(dict[str, Array]):
    """Tensors by Hugging Face name; each depends on the seed and its own name only."""

    def __init__(self, config: Any, seed: int = 0, scale: float = 0.5):
        super().__init__()
        self.config, self.seed, self.scale = config, seed, scale

    def __missing__(self, name: str) -> Array:
        rng = np.random.default_rng([self.seed, *name.encode()])
        if name.endswith("tid2eid"):
            c = self.config
            rows = [rng.permutation(c.n_experts) for _ in range(c.vocab_size)]
            self[name] = np.stack(rows)[:, : c.experts_per_token]
        else:
            around = 1.0 if "norm" in name else 0.0
            self[name] = around + self.scale * rng.normal(size=shape(self.config, name))
        return self[name]


def shape(config: Any, name: str) -> tuple[int, ...]:
    """Shape of the tensor of that name."""
    if not name.startswith("model.layers."):
        return _top(config)[name]
    _, _, layer, leaf = name.split(".", 3)
    part, _, rest = leaf.partition(".")
    if part == "self_attn":
        return _attention(config, config.layer_types[int(layer)])[rest]
    if part == "mlp":
        return _feed_forward(config)[rest]
    if part in ("attn_hc", "ffn_hc"):
        n = config.hc_streams
        size = (2 + n) * n
        return {"fn": (size, n * config.d_model), "base": (size,), "scale": (3,)}[rest]
    return (config.d_model,)  # the two norms


def _top(c: Any) -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (c.vocab_size, c.d_model),
        "lm_head.weight": (c.vocab_size, c.d_model),
        "model.norm.weight": (c.d_model,),
        "model.hc_head.hc_fn": (c.hc_streams, c.hc_streams * c.d_model),
        "model.hc_head.hc_base": (c.hc_streams,),
        "model.hc_head.hc_scale": (1,),
    }


def _attention(c: Any, kind: str) -> dict[str, tuple[int, ...]]:
    heads = c.n_heads * c.head_dim
    out = {
        "q_proj.weight": (heads, c.d_model),
        "o_proj.weight": (c.d_model, heads),
        "sinks": (c.n_heads,),
    }
    if kind == "full":
        rows = (c.n_kv_heads * c.head_dim, c.d_model)
        norm = (c.head_dim,)
        out |= {"k_proj.weight": rows, "v_proj.weight": rows}
        return out | {"q_norm.weight": norm, "k_norm.weight": norm}
    groups = max(c.o_groups, 1)
    out |= {
        "q_a_proj.weight": (c.q_lora_rank, c.d_model),
        "q_a_norm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (heads, c.q_lora_rank),
        "kv_proj.weight": (c.head_dim, c.d_model),
        "kv_norm.weight": (c.head_dim,),
        "o_a_proj.weight": (c.o_groups * c.o_lora_rank, heads // groups),
        "o_b_proj.weight": (c.d_model, c.o_groups * c.o_lora_rank),
        "compressor.indexer.q_b_proj.weight": (
            c.index_heads * c.index_dim,
            c.q_lora_rank or c.d_model,
        ),
        "compressor.indexer.scorer.weights_proj.weight": (c.index_heads, c.d_model),
    }
    ratio = c.csa_ratio if kind == "csa" else c.hca_ratio
    halves = 2 if kind == "csa" and c.csa_overlap else 1
    for prefix, width in (("compressor.", c.head_dim), ("compressor.indexer.", c.index_dim)):
        out |= {
            prefix + "kv_proj.weight": (halves * width, c.d_model),
            prefix + "gate_proj.weight": (halves * width, c.d_model),
            prefix + "kv_norm.weight": (width,),
            prefix + "position_bias": (ratio, halves * width),
        }
    return out


def _feed_forward(c: Any) -> dict[str, tuple[int, ...]]:
    out = {
        "gate.weight": (c.n_experts, c.d_model),
        "gate.e_score_correction_bias": (c.n_experts,),
        "gate.tid2eid": (c.vocab_size, c.experts_per_token),
        "experts.gate_up_proj": (c.n_experts, 2 * c.d_ff, c.d_model),
        "experts.down_proj": (c.n_experts, c.d_model, c.d_ff),
    }
    for prefix, width in (("", c.d_ff), ("shared_experts.", c.n_shared_experts * c.d_ff)):
        out |= {
            prefix + "gate_proj.weight": (width, c.d_model),
            prefix + "up_proj.weight": (width, c.d_model),
            prefix + "down_proj.weight": (c.d_model, width),
        }
    return out
