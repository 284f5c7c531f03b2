"""Kimi Linear directories: Kimi Delta Attention, and MLA without positions in every fourth layer.

Files are read in either of two forms: as released, or with the names that the library uses inside.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf.family import Family
from models.hf.parts import TOP, Layout, feed_forward, listed, part

TYPES = {"linear_attention": "kda", "full_attention": "mla"}
MLPS = {"dense": "dense", "sparse": "moe"}
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "moe_intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_experts": "n_experts",
    "num_experts_per_token": "experts_per_token",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scale",
}
LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "shared_dim",
    "v_head_dim": "v_dim",
}
LINEAR = {
    "linear_num_heads": "linear_heads",
    "linear_head_dim": "linear_dim",
    "linear_conv_kernel_dim": "conv_width",
}
RELEASED = {"num_heads": "linear_heads", "head_dim": "linear_dim"}
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
}
# Fields of every configuration of this family.
OURS = {
    "indexer": False,
    "rope_dim": 0,
    **json_fields.PLAIN_BLOCK,
    "swiglu_limit": 0.0,
}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "mlp_norm": ("post_attention_layernorm.weight", "same"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in ("q", "k", "v", "o", "b")},
    **{f"attn/g_{x}": (f"self_attn.g_{x}_proj.weight", "swap") for x in "ab"},
    **{f"attn/f_{x}": (f"self_attn.forget_gate.f_{x}_proj.weight", "swap") for x in "ab"},
    "attn/dt_bias": ("self_attn.forget_gate.dt_bias", "same"),
    "attn/norm": ("self_attn.o_norm.weight", "same"),
    "attn/q_a": ("self_attn.q_a_proj.weight", "swap"),
    "attn/q_a_norm": ("self_attn.q_a_layernorm.weight", "same"),
    "attn/q_b": ("self_attn.q_b_proj.weight", "swap"),
    "attn/kv_a": ("self_attn.kv_a_proj_with_mqa.weight", "swap"),
    "attn/kv_a_norm": ("self_attn.kv_a_layernorm.weight", "same"),
    "attn/kv_b": ("self_attn.kv_b_proj.weight", "swap"),
    "mlp/router": ("mlp.gate.weight", "swap"),
    "mlp/bias": ("mlp.gate.e_score_correction_bias", "same"),
}
OLD_NAMES = ("w1", "w3", "w2")


def canonical(name: str) -> str:
    """The library's name for a tensor that is called as in the released files."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    inside = r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)\b"
    return re.sub(inside, r"self_attn.forget_gate.\1", name)


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`. Convolutions and experts are packed, or apart as released."""
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    prefix = f"model.layers.{layer}."
    leaf = path.rpartition("/")[2]
    if path == "attn/a_log":
        heads = part(f"{prefix}self_attn.forget_gate.A_log", "flat", (1, 1, *shape, 1), *index)
        yield (heads,)
    elif path == "attn/conv":
        yield (part(f"{prefix}self_attn.conv1d.weight", "taps", shape, *index),)
        taps, wide = shape[0], shape[1] // 3
        yield tuple(
            part(
                f"{prefix}self_attn.{x}_conv1d.weight",
                "taps",
                (taps, wide),
                *index,
                slice(None),
                slice(i * wide, (i + 1) * wide),
            )
            for i, x in enumerate("qkv")
        )
    elif leaf not in ("gate_up", "down"):
        yield listed(LAYER, prefix, path, shape, *index)
    else:
        yield from feed_forward(
            prefix, path, shape, *index, shared="shared_experts", each=OLD_NAMES
        )


def _layer_types(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Ours; released files count layers from 1."""
    linear = fields.get("linear_attn_config") or {}
    full = [i - 1 for i in linear.get("full_attn_layers", ())]
    count = fields["num_hidden_layers"]
    if not full:
        full = range(4, count, 4)
    return json_fields.schedule(fields, TYPES, [list(TYPES)[i in full] for i in range(count)])


def _linear(fields: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a linear layer."""
    released = fields.get("linear_attn_config") or {}
    if not released:
        json_fields.need(fields, LINEAR)
        return {ours: fields[theirs] for theirs, ours in LINEAR.items()}
    sizes = {ours: released[theirs] for theirs, ours in RELEASED.items()}
    return sizes | {"conv_width": released.get("short_conv_kernel_size", 4)}


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    json_fields.need(fields, [*PLAIN, "num_hidden_layers", "intermediate_size"])
    json_fields.fixed(fields, FIXED)
    dense = fields.get("first_k_dense_replace", 1)
    layer_types = _layer_types(fields)
    attention: dict[str, dict[str, Any]] = {}
    if "kda" in layer_types:
        attention["kda"] = {"mechanism": "kda", **_linear(fields)}
    if "mla" in layer_types:
        json_fields.need(fields, LATENT)
        latent = {ours: fields[theirs] for theirs, ours in LATENT.items()}
        attention["mla"] = {"mechanism": "mla", **latent}
    mlp_types = json_fields.mlp_types(fields, MLPS, dense)
    mlps = {
        "dense": {"d_ff": fields["intermediate_size"]},
        "moe": {
            "router_score": "sigmoid",
            "router_groups": fields.get("num_expert_group", 1),
            "router_groups_kept": fields.get("topk_group", 1),
            "router_normalise": fields.get("moe_renormalize", True),
        },
    }
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **OURS,
        q_lora_rank=fields.get("q_lora_rank") or 0,
        layer_types=layer_types,
        mlp_types=mlp_types,
        attention=attention,
        mlps=json_fields.used(mlps, mlp_types),
        norm_eps=fields.get("rms_norm_eps", 1e-5),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in TYPES.items()}
    mlp_names = {ours: name for name, ours in MLPS.items()}
    attention = copy.deepcopy(config.attention)
    # Types that no layer has are written as if they had the model's width.
    mlps = {"dense": {"d_ff": config.d_ff}, "moe": {"router_score": "sigmoid"}} | config.mlps
    wrong = json_fields.unlike(config, OURS)
    known = {"layer_types": set(theirs), "mlp_types": set(mlp_names)}
    wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
    for kind, names in (("kda", LINEAR), ("mla", LATENT)):
        own = set(attention.get(kind, ()))
        if kind in config.layer_types and own != {"mechanism", *names.values()}:
            wrong["attention"] = attention
    moe = mlps["moe"]
    if moe.get("router_score") != "sigmoid" or "d_ff" not in mlps["dense"]:
        wrong["mlps"] = config.mlps
    json_fields.refuse(wrong, "Kimi Linear")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": config.param_dtype,
        "pad_token_id": None,  # the library's default is beyond small vocabularies
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "mlp_layer_types": [mlp_names[kind] for kind in config.mlp_types],
        "intermediate_size": mlps["dense"]["d_ff"],
        "num_key_value_heads": config.n_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "num_expert_group": moe.get("router_groups", 1),
        "topk_group": moe.get("router_groups_kept", 1),
        "moe_renormalize": moe.get("router_normalise", True),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **{
            name: attention[kind][ours]
            for kind, names in (("kda", LINEAR), ("mla", LATENT))
            for name, ours in names.items()
            if kind in attention
        },
        "hidden_act": "silu",
        "attention_bias": False,
    }


FAMILY = Family(parse, write, layouts, canonical)
