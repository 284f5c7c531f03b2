"""gpt-oss directories: window and full layers in turns, sinks, YaRN on both (arXiv 2508.10925).

Biases everywhere; experts with a clamped gate of their own, chosen by logits.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import TOP, Layout, listed, part

TYPES = {"sliding_attention": "local", "full_attention": "full"}
THETA = 150_000.0
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "num_local_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
}
FIXED = {"hidden_act": "silu", "swiglu_alpha": 1.702}
# What `config.json` has without the field.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Fields of every configuration of this family.
OURS = {
    "qk_norm": False,
    "sinks": True,
    "n_shared_experts": 0,
    "routed_scale": 1.0,
    **json_fields.PLAIN_BLOCK,
    "mlps": {
        "moe": {
            "activation": "swish",
            "mlp_bias": True,
            "router_score": "logits",
            "router_choice_bias": False,
            "router_logit_bias": True,
        }
    },
}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "mlp_norm": ("post_attention_layernorm.weight", "same"),
    "attn/sinks": ("self_attn.sinks", "same"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in "qkvo"},
    **{f"attn/{x}_bias": (f"self_attn.{x}_proj.bias", "same") for x in "qkvo"},
    "mlp/router": ("mlp.router.weight", "swap"),
    "mlp/logit_bias": ("mlp.router.bias", "same"),
    "mlp/gate_up": ("mlp.experts.gate_up_proj", "woven"),
    "mlp/gate_up_bias": ("mlp.experts.gate_up_proj_bias", "woven"),
    "mlp/down": ("mlp.experts.down_proj", "same"),
    "mlp/down_bias": ("mlp.experts.down_proj_bias", "same"),
}
# In the released files experts' weights are codes and scales, and [E, out, in].
MXFP4 = {
    "mlp/gate_up": ("mlp.experts.gate_up_proj_blocks", "woven_rows"),
    "mlp/down": ("mlp.experts.down_proj_blocks", "swap"),
}


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`. Weights of experts are in one piece, or packed as MXFP4 in the release."""
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    prefix = f"model.layers.{layer}."
    yield listed(LAYER, prefix, path, shape, *index)
    if path in MXFP4:
        name, form = MXFP4[path]
        yield (part(prefix + name, form, shape, *index),)


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    json_fields.need(fields, [*PLAIN, "num_hidden_layers", "sliding_window"])
    json_fields.fixed(fields, FIXED)
    default = [list(TYPES)[i % 2] for i in range(fields["num_hidden_layers"])]
    layer_types = json_fields.schedule(fields, TYPES, default)
    given = fields.get("rope_parameters") or {
        "rope_theta": fields.get("rope_theta"),
        **(fields.get("rope_scaling") or YARN),
    }
    common = {
        "rope": rope.rope(given, THETA) | {"halves": True},
        "attn_bias": fields.get("attention_bias", True),
    }
    attention = {
        "local": {"mechanism": "local", "window": fields["sliding_window"], **common},
        "full": {"mechanism": "full", **common},
    }
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **copy.deepcopy(OURS),
        layer_types=layer_types,
        mlp_types=("moe",) * len(layer_types),
        attention=json_fields.used(attention, layer_types),
        rope_dim=fields["head_dim"],
        norm_eps=fields.get("rms_norm_eps", 1e-5),
        swiglu_limit=fields.get("swiglu_limit", 7.0),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in TYPES.items()}
    kinds = {kind: config.attention.get(kind, {}) for kind in dict.fromkeys(config.layer_types)}
    first = next(iter(kinds.values()))
    wrong = json_fields.unlike(config, OURS)
    for kind, x in kinds.items():
        same = all(x.get(name) == first.get(name) for name in ("rope", "attn_bias"))
        if kind not in theirs or not same or not x.get("rope"):
            wrong[kind] = x
    if not config.swiglu_limit:
        wrong["swiglu_limit"] = config.swiglu_limit
    json_fields.refuse(wrong, "gpt-oss")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "sliding_window": kinds.get("local", {}).get("window", 128),
        "swiglu_limit": config.swiglu_limit,
        "attention_bias": first["attn_bias"],
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope.parameters(first["rope"]),
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **FIXED,
    }


FAMILY = Family(parse, write, layouts)
