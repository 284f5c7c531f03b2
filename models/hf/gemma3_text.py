"""Gemma 3 directories, the text model: local and global layers in turns (arXiv 2503.19786).

Two rope bases, pairs in halves; norms of queries and keys, and on both sides of each part; a norm's
tensor is what its factor exceeds 1 by; embeddings are scaled and tied.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import NAMES, Layout, gated, listed

TYPES = {"sliding_attention": "local", "full_attention": "global"}
THETAS = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
PATTERN = 6  # of layers, the last one global
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
}
FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
# Fields of every configuration of this family.
OURS = {
    "qk_norm": True,
    "sinks": False,
    "sandwich_norms": True,
    "mlps": {"dense": {"activation": "gelu_tanh"}},
    "swiglu_limit": 0.0,
    "hc_streams": 0,
    "normed_residual": False,
}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "plus_one"),
    "attn_post_norm": ("post_attention_layernorm.weight", "plus_one"),
    "mlp_norm": ("pre_feedforward_layernorm.weight", "plus_one"),
    "mlp_post_norm": ("post_feedforward_layernorm.weight", "plus_one"),
    "attn/q_norm": ("self_attn.q_norm.weight", "plus_one"),
    "attn/k_norm": ("self_attn.k_norm.weight", "plus_one"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in "qkvo"},
    **{f"attn/{x}_bias": (f"self_attn.{x}_proj.bias", "same") for x in "qkvo"},
}
TOP = {
    "embed": ("model.embed_tokens.weight", "same"),
    "norm": ("model.norm.weight", "plus_one"),
    "head": ("lm_head.weight", "swap"),
}


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`."""
    if layer is None:
        yield listed(TOP, "", path, shape)
    elif path in ("mlp/gate_up", "mlp/down"):
        leaf = path.removeprefix("mlp/")
        yield tuple(gated(f"model.layers.{layer}.mlp.", NAMES, leaf, shape, *index))
    else:
        yield listed(LAYER, f"model.layers.{layer}.", path, shape, *index)


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    json_fields.need(fields, [*PLAIN, "num_hidden_layers", "sliding_window"])
    json_fields.fixed(fields, FIXED)
    every = fields.get("sliding_window_pattern") or PATTERN
    default = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention"
        for i in range(fields["num_hidden_layers"])
    ]
    common = {
        "attn_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
        "attn_softcap": fields.get("attn_logit_softcapping") or 0.0,
        "attn_bias": fields.get("attention_bias", False),
    }
    ropes = _ropes(fields)
    attention = {
        "local": {
            "mechanism": "local",
            "window": fields["sliding_window"],
            "rope": ropes["sliding_attention"],
            **common,
        },
        "global": {"mechanism": "full", "rope": ropes["full_attention"], **common},
    }
    layer_types = json_fields.schedule(fields, TYPES, default)
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **copy.deepcopy(OURS),
        layer_types=layer_types,
        mlp_types=("dense",) * len(layer_types),
        attention=json_fields.used(attention, layer_types),
        rope_dim=fields["head_dim"],
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        embed_scale=math.sqrt(fields["hidden_size"]),
        final_softcap=fields.get("final_logit_softcapping") or 0.0,
        tie_embeddings=fields.get("tie_word_embeddings", True),
    )


def _ropes(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per layer type, also of older files: `rope_theta`, `rope_local_base_freq`, `rope_scaling`."""
    given = fields.get("rope_parameters") or {
        "sliding_attention": {"rope_theta": fields.get("rope_local_base_freq")},
        "full_attention": {
            "rope_theta": fields.get("rope_theta"),
            **(fields.get("rope_scaling") or {}),
        },
    }
    if set(given) - set(TYPES):
        raise ValueError(f"config.json: rope_parameters are per layer type {list(TYPES)}")
    return {
        name: rope.rope(given.get(name) or {}, theta) | {"halves": True}
        for name, theta in THETAS.items()
    }


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in TYPES.items()}
    kinds = {kind: config.attention.get(kind, {}) for kind in dict.fromkeys(config.layer_types)}
    common = {
        name: {x.get(name) for x in kinds.values()}
        for name in ("attn_scale", "attn_softcap", "attn_bias")
    }
    wrong = json_fields.unlike(config, OURS)
    wrong |= {kind: x for kind, x in kinds.items() if kind not in theirs or "rope" not in x}
    wrong |= {name: values for name, values in common.items() if len(values) > 1}
    if config.embed_scale != math.sqrt(config.d_model):
        wrong["embed_scale"] = config.embed_scale
    json_fields.refuse(wrong, "Gemma 3")
    (scale,), (softcap,), (bias,) = common.values()
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "sliding_window": kinds.get("local", {}).get("window", 4096),
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": softcap or None,
        "final_logit_softcapping": config.final_softcap or None,
        "attention_bias": bias,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {theirs[k]: rope.parameters(x["rope"]) for k, x in kinds.items()},
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **FIXED,
    }


FAMILY = Family(parse, write, layouts)
