"""DeepSeek-V3.2 directories: MLA with a token indexer, experts in groups (arXiv 2512.02556).

The shared key is rotated in neighbouring pairs, index keys in halves and on their first channels.
Further-token heads (layers beyond the last) are left out: this model has none.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import TOP, Layout, feed_forward, listed

TYPES = {"indexed_attention": "mla"}
MLPS = {"dense": "dense", "sparse": "moe"}
THETA = 10_000.0
FIRST_DENSE = 3
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "moe_intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "q_lora_rank": "q_lora_rank",
    "qk_rope_head_dim": "rope_dim",
    "index_n_heads": "index_heads",
    "index_head_dim": "index_dim",
    "index_topk": "index_topk",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scale",
}
OWN = {"kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "nope_dim", "v_head_dim": "v_dim"}
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# Fields of every configuration of this family.
OURS = {
    "indexer": True,
    **json_fields.PLAIN_BLOCK,
    "swiglu_limit": 0.0,
}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "mlp_norm": ("post_attention_layernorm.weight", "same"),
    "attn/q_a": ("self_attn.q_a_proj.weight", "swap"),
    "attn/q_a_norm": ("self_attn.q_a_layernorm.weight", "same"),
    "attn/q_b": ("self_attn.q_b_proj.weight", "swap"),
    "attn/kv_a": ("self_attn.kv_a_proj_with_mqa.weight", "swap"),
    "attn/kv_a_norm": ("self_attn.kv_a_layernorm.weight", "same"),
    "attn/kv_b": ("self_attn.kv_b_proj.weight", "swap"),
    "attn/o": ("self_attn.o_proj.weight", "swap"),
    "attn/indexer/q": ("self_attn.indexer.wq_b.weight", "swap"),
    "attn/indexer/k": ("self_attn.indexer.wk.weight", "swap"),
    "attn/indexer/k_norm": ("self_attn.indexer.k_norm.weight", "same"),
    "attn/indexer/k_norm_bias": ("self_attn.indexer.k_norm.bias", "same"),
    "attn/indexer/weights": ("self_attn.indexer.weights_proj.weight", "swap"),
    "mlp/router": ("mlp.gate.weight", "swap"),
    "mlp/bias": ("mlp.gate.e_score_correction_bias", "same"),
}


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`. Experts are packed, or one by one as in the released checkpoint."""
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    prefix = f"model.layers.{layer}."
    leaf = path.rpartition("/")[2]
    if leaf not in ("gate_up", "down"):
        yield listed(LAYER, prefix, path, shape, *index)
    else:
        yield from feed_forward(prefix, path, shape, *index, shared="shared_experts")


def left_out(config: DecoderConfig, name: str) -> bool:
    """Whether the tensor is of a layer beyond the last."""
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= len(config.layer_types)


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    json_fields.need(fields, [*PLAIN, *OWN, "num_hidden_layers", "intermediate_size"])
    json_fields.fixed(fields, FIXED)
    count = fields["num_hidden_layers"]
    given = fields.get("rope_parameters") or {
        "rope_theta": fields.get("rope_theta"),
        **(fields.get("rope_scaling") or {}),
    }
    turned = rope.rope(given, THETA)
    scale = (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]) ** -0.5
    if "yarn" in turned and given.get("mscale_all_dim"):
        scale *= rope.mscale(turned["yarn"]["factor"], given["mscale_all_dim"]) ** 2
    dense = fields.get("first_k_dense_replace", FIRST_DENSE)
    own = {ours: fields[theirs] for theirs, ours in OWN.items()}
    mlp_types = json_fields.mlp_types(fields, MLPS, dense)
    mlps = {
        "dense": {"d_ff": fields["intermediate_size"]},
        "moe": {
            "router_score": "sigmoid",
            "router_groups": fields.get("n_group", 8),
            "router_groups_kept": fields.get("topk_group", 4),
            "router_normalise": fields.get("norm_topk_prob", True),
        },
    }
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **copy.deepcopy(OURS),
        layer_types=json_fields.schedule(fields, TYPES, ["indexed_attention"] * count),
        mlp_types=mlp_types,
        attention={"mla": {"mechanism": "mla", "rope": turned, "attn_scale": scale, **own}},
        mlps=json_fields.used(mlps, mlp_types),
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    own = config.attention.get("mla", {})
    # Types that no layer has are written as if they had the model's width.
    mlps = {"dense": {"d_ff": config.d_ff}, "moe": {"router_score": "sigmoid"}} | config.mlps
    wrong = json_fields.unlike(config, OURS)
    known = {"layer_types": set(TYPES.values()), "mlp_types": set(MLPS.values())}
    wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
    if not {*OWN.values(), "rope", "attn_scale"} <= set(own):
        wrong["attention"] = config.attention
    if mlps["moe"].get("router_score") != "sigmoid" or "d_ff" not in mlps["dense"]:
        wrong["mlps"] = config.mlps
    json_fields.refuse(wrong, "DeepSeek-V3.2")
    theirs = {ours: name for name, ours in MLPS.items()}
    parameters = rope.parameters(own["rope"])
    plain = (own["nope_dim"] + config.rope_dim) ** -0.5
    if own["attn_scale"] != plain:
        parameters["mscale_all_dim"] = rope.mscale_weight(
            (own["attn_scale"] / plain) ** 0.5, parameters.get("factor", 1.0)
        )
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": ["indexed_attention"] * len(config.layer_types),
        "mlp_layer_types": [theirs[kind] for kind in config.mlp_types],
        "intermediate_size": mlps["dense"]["d_ff"],
        "num_key_value_heads": config.n_heads,
        "n_group": mlps["moe"].get("router_groups", 1),
        "topk_group": mlps["moe"].get("router_groups_kept", 1),
        "norm_topk_prob": mlps["moe"].get("router_normalise", True),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": parameters,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **{name: own[ours] for name, ours in OWN.items()},
        **{k: v for k, v in FIXED.items() if k not in ("scoring_func", "topk_method")},
    }


FAMILY = Family(parse, write, layouts, left_out=left_out)
