"""Qwen3-Next directories: gated DeltaNet, and gated full attention in every fourth layer.

Experts beside a gated shared one. Heads of further tokens (`mtp`) are left out.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import Layout, feed_forward, listed

TYPES = {"linear_attention": "gated_delta", "full_attention": "full"}
THETA = 10_000.0
PARTIAL = "partial_rotary_factor"
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "moe_intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "num_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
}
LINEAR = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}
FIXED = {"hidden_act": "silu"}
# Fields of every configuration of this family.
OURS = {
    "qk_norm": True,
    "sinks": False,
    "n_shared_experts": 1,
    "routed_scale": 1.0,
    **json_fields.PLAIN_BLOCK,
    "swiglu_limit": 0.0,
}
GATED = {"rope_first": True, "attn_gate": True}
ROUTED = {"router_score": "softmax", "router_choice_bias": False, "shared_gate": True}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "plus_one"),
    "mlp_norm": ("post_attention_layernorm.weight", "plus_one"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in "qkvo"},
    **{f"attn/{x}_bias": (f"self_attn.{x}_proj.bias", "same") for x in "qkvo"},
    **{f"attn/{x}_norm": (f"self_attn.{x}_norm.weight", "plus_one") for x in "qk"},
    "mlp/router": ("mlp.gate.weight", "swap"),
    "mlp/shared/gate": ("mlp.shared_expert_gate.weight", "swap"),
}
DELTA = {
    "attn/qkvz": ("linear_attn.in_proj_qkvz.weight", "swap"),
    "attn/ba": ("linear_attn.in_proj_ba.weight", "swap"),
    "attn/conv": ("linear_attn.conv1d.weight", "taps"),
    "attn/dt_bias": ("linear_attn.dt_bias", "same"),
    "attn/a_log": ("linear_attn.A_log", "same"),
    "attn/norm": ("linear_attn.norm.weight", "same"),
    "attn/o": ("linear_attn.out_proj.weight", "swap"),
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
        return
    prefix = f"model.layers.{layer}."
    leaf = path.rpartition("/")[2]
    if leaf not in ("gate_up", "down"):
        delta = config.layer_types[layer] == "gated_delta"
        yield listed(LAYER | DELTA if delta else LAYER, prefix, path, shape, *index)
    else:
        yield from feed_forward(prefix, path, shape, *index, shared="shared_expert")


def _sparse(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer's MLP has experts."""
    dense = layer in (fields.get("mlp_only_layers") or ())
    return not dense and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    names = [*PLAIN, *LINEAR, "num_hidden_layers", "intermediate_size"]
    json_fields.need(fields, [*names, "shared_expert_intermediate_size"])
    json_fields.fixed(fields, FIXED)
    count, every = fields["num_hidden_layers"], fields.get("full_attention_interval", 4)
    default = [list(TYPES)[(i + 1) % every == 0] for i in range(count)]
    layer_types = json_fields.schedule(fields, TYPES, default)
    given = dict(fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta")})
    partial = given.pop(PARTIAL, None) or fields.get(PARTIAL) or 0.25
    turned = int(fields["head_dim"] * partial)
    full = {
        "mechanism": "full",
        "rope": rope.rope(given, THETA) | {"halves": True, "dim": turned},
        "attn_bias": fields.get("attention_bias", False),
        **GATED,
    }
    linear = {ours: fields[theirs] for theirs, ours in LINEAR.items()}
    attention = {"gated_delta": {"mechanism": "gated_delta", **linear}, "full": full}
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **OURS,
        layer_types=layer_types,
        mlp_types=tuple("moe" if _sparse(fields, i) else "dense" for i in range(count)),
        attention=attention,
        mlps={
            "dense": {"d_ff": fields["intermediate_size"]},
            "moe": {
                **ROUTED,
                "router_normalise": fields.get("norm_topk_prob", True),
                "shared_ff": fields["shared_expert_intermediate_size"],
            },
        },
        rope_dim=turned,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in TYPES.items()}
    attention, mlps = copy.deepcopy(config.attention), copy.deepcopy(config.mlps)
    wrong = json_fields.unlike(config, OURS)
    known = {"layer_types": set(theirs), "mlp_types": {"dense", "moe"}}
    wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
    full, linear = attention.get("full", {}), attention.get("gated_delta", {})
    if not {"rope", *GATED}.issubset(full) or not set(LINEAR.values()).issubset(linear):
        wrong["attention"] = attention
    moe = mlps.get("moe", {})
    if "d_ff" not in mlps.get("dense", {}) or any(moe.get(k) != v for k, v in ROUTED.items()):
        wrong["mlps"] = mlps
    json_fields.refuse(wrong, "Qwen3-Next")
    partial = full["rope"]["dim"] / config.head_dim
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "mlp_only_layers": [i for i, kind in enumerate(config.mlp_types) if kind == "dense"],
        "intermediate_size": mlps["dense"]["d_ff"],
        "shared_expert_intermediate_size": moe["shared_ff"],
        "norm_topk_prob": moe.get("router_normalise", True),
        "attention_bias": full.get("attn_bias", False),
        "rope_parameters": rope.parameters(full["rope"]) | {PARTIAL: partial},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **{name: linear[ours] for name, ours in LINEAR.items()},
        **FIXED,
    }


FAMILY = Family(parse, write, layouts, left_out=lambda config, name: name.startswith("mtp."))
