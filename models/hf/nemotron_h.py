"""Nemotron-H directories: Mamba-2, attention without positions, MLPs of squared ReLUs or experts.

There a layer has one part; here an MLP belongs to the Mamba-2 or attention layer before it. Heads
of further tokens (`mtp`) are left out.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf.family import Family
from models.hf.parts import Layout, listed, part

MIXERS = {"linear_attention": "mamba2", "full_attention": "full"}
MLPS = {"mlp": "dense", "moe": "moe"}
OLD = {"mamba": "linear_attention", "attention": "full_attention"}
PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "moe_intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "routed_scaling_factor": "routed_scale",
}
STATE = {
    "mamba_num_heads": "ssm_heads",
    "mamba_head_dim": "ssm_dim",
    "n_groups": "ssm_groups",
    "ssm_state_size": "ssm_states",
    "conv_kernel": "conv_width",
    "time_step_min": "ssm_dt_min",
    "use_conv_bias": "conv_bias",
}
DEFAULTS = {
    "moe_intermediate_size": 7688,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "time_step_min": 0.001,
    "use_conv_bias": True,
}
FIXED = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "moe_latent_size": None,
    "sliding_window": None,
}
# Fields of every configuration of this family.
OURS = {
    "qk_norm": False,
    "sinks": False,
    "rope_dim": 0,
    "n_shared_experts": 1,
    **json_fields.PLAIN_BLOCK,
    "swiglu_limit": 0.0,
}

MIXER = {
    "attn_norm": ("norm.weight", "same"),
    **{f"attn/{x}": (f"mixer.{x}_proj.weight", "swap") for x in "qkvo"},
}
MAMBA = {
    "attn/in": ("mixer.in_proj.weight", "swap"),
    "attn/conv": ("mixer.conv1d.weight", "taps"),
    "attn/conv_bias": ("mixer.conv1d.bias", "same"),
    "attn/dt_bias": ("mixer.dt_bias", "same"),
    "attn/a_log": ("mixer.A_log", "same"),
    "attn/skip": ("mixer.D", "same"),
    "attn/norm": ("mixer.norm.weight", "same"),
    "attn/o": ("mixer.out_proj.weight", "swap"),
}
MLP = {
    "mlp_norm": ("norm.weight", "same"),
    "mlp/gate_up": ("mixer.up_proj.weight", "swap"),
    "mlp/down": ("mixer.down_proj.weight", "swap"),
    "mlp/router": ("mixer.gate.weight", "swap"),
    "mlp/bias": ("mixer.gate.e_score_correction_bias", "same"),
    "mlp/shared/gate_up": ("mixer.shared_experts.up_proj.weight", "swap"),
    "mlp/shared/down": ("mixer.shared_experts.down_proj.weight", "swap"),
}
TOP = {
    "embed": ("model.embeddings.weight", "same"),
    "norm": ("model.norm_f.weight", "same"),
    "head": ("lm_head.weight", "swap"),
}


def canonical(name: str) -> str:
    """The library's name for a tensor that is called as in the released files."""
    return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`. Experts are packed, or one by one as released."""
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    number = sum(1 + (kind != "none") for kind in config.mlp_types[:layer])
    if not path.startswith("mlp"):
        mamba = config.layer_types[layer] == "mamba2"
        prefix = f"model.layers.{number}."
        yield listed(MIXER | MAMBA if mamba else MIXER, prefix, path, shape, *index)
        return
    prefix = f"model.layers.{number + 1}."
    if len(shape) < 3:
        yield listed(MLP, prefix, path, shape, *index)
        return
    name = {"mlp/gate_up": "up_proj", "mlp/down": "down_proj"}[path]
    inner = f"{prefix}mixer.experts."
    yield (part(inner + name, "swap", shape, *index),)
    yield tuple(
        part(f"{inner}{e}.{name}.weight", "swap", shape[1:], *index, e) for e in range(shape[0])
    )


def _pairs(fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Our layer types and MLP types."""
    types = fields.get("layers_block_type") or fields.get("layer_types")
    if types is None:
        types = [PATTERN.get(x, x) for x in fields["hybrid_override_pattern"]]
    layers: list[str] = []
    mlps: list[str] = []
    for i, kind in enumerate(OLD.get(x, x) for x in types):
        if kind in MIXERS:
            layers.append(MIXERS[kind])
            mlps.append("none")
        elif kind in MLPS and mlps and mlps[-1] == "none":
            mlps[-1] = MLPS[kind]
        else:
            raise ValueError(
                f"config.json: layer {i} is {kind!r}; layers are {list(MIXERS)}, each with at most "
                f"one of {list(MLPS)} behind it"
            )
    return layers, mlps


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    fields = {**DEFAULTS, **fields}
    if not any(fields.get(x) for x in ("layers_block_type", "layer_types")):
        json_fields.need(fields, ["hybrid_override_pattern"])
    json_fields.need(fields, [*PLAIN, "intermediate_size"])
    json_fields.fixed(fields, FIXED)
    layers, mlp_types = _pairs(fields)
    attention: dict[str, dict[str, Any]] = {"full": {"mechanism": "full"}}
    if "mamba2" in layers:
        json_fields.need(fields, STATE)
        state = {ours: fields[theirs] for theirs, ours in STATE.items()}
        attention["mamba2"] = {"mechanism": "mamba2", **state}
    mlps = {
        "dense": {"d_ff": fields["intermediate_size"], "activation": "relu2"},
        "moe": {
            "activation": "relu2",
            "shared_ff": fields.get("moe_shared_expert_intermediate_size", 7688),
            "router_score": "sigmoid",
            "router_groups": fields.get("n_group", 1),
            "router_groups_kept": fields.get("topk_group", 1),
            "router_normalise": fields.get("norm_topk_prob", True),
        },
    }
    return DecoderConfig(
        **{ours: fields[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **OURS,
        layer_types=tuple(layers),
        mlp_types=tuple(mlp_types),
        attention=json_fields.used(attention, layers),
        mlps=json_fields.used(mlps, mlp_types),
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in (MIXERS | MLPS).items()}
    attention, mlps = copy.deepcopy(config.attention), copy.deepcopy(config.mlps)
    used = {*config.layer_types, *config.mlp_types}
    wrong = json_fields.unlike(config, OURS)
    known = {"layer_types": set(MIXERS.values()), "mlp_types": {*MLPS.values(), "none"}}
    wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
    expected = {"mamba2": {"mechanism", *STATE.values()}, "full": {"mechanism"}}
    if any(set(attention.get(kind, ())) != expected[kind] for kind in used & set(expected)):
        wrong["attention"] = attention
    if any(mlps.get(x, {}).get("activation") != "relu2" for x in used & {"dense", "moe"}):
        wrong["mlps"] = mlps
    json_fields.refuse(wrong, "Nemotron-H")
    types = [
        theirs[kind]
        for both in zip(config.layer_types, config.mlp_types, strict=True)
        for kind in both
        if kind != "none"
    ]
    written: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": config.param_dtype,
        "layers_block_type": types,
        "intermediate_size": mlps.get("dense", {}).get("d_ff", config.d_ff),
        "n_shared_experts": 1,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **FIXED,
    }
    if state := attention.get("mamba2"):
        written |= {name: state[ours] for name, ours in STATE.items()}
    if moe := mlps.get("moe"):
        written |= {
            "moe_shared_expert_intermediate_size": moe["shared_ff"],
            "n_group": moe["router_groups"],
            "topk_group": moe["router_groups_kept"],
            "norm_topk_prob": moe["router_normalise"],
        }
    return written


FAMILY = Family(
    parse,
    write,
    layouts,
    canonical,
    left_out=lambda config, name: name.startswith("mtp."),
)
