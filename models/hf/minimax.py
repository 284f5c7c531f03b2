"""MiniMax-01 directories: lightning attention, and softmax attention in every eighth layer.

A layer adds to its *normed* input, times factors of its own (arXiv 2501.08313). Tables of decays,
which follow from the slopes, are left out of what is read and written.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import TOP, Layout, experts, listed, part

TYPES = {"linear_attention": "lightning", "full_attention": "full"}
THETA = 1_000_000.0
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
FIXED = {"hidden_act": "silu", "sliding_window": None}
# Of a layer type or the MLPs: the prefix of the two factors in `config.json`.
FACTORS = {"lightning": "linear_attn", "full": "full_attn", "moe": "mlp"}
BOTH = {"alpha": "residual_factor", "beta": "output_factor"}
OURS = {
    "qk_norm": False,
    "sinks": False,
    "n_shared_experts": 0,
    "routed_scale": 1.0,
    **json_fields.PLAIN_BLOCK,
    "normed_residual": True,
    "swiglu_limit": 0.0,
}
ROUTED = {"router_score": "softmax", "router_choice_bias": False}
TABLES = ("query_decay", "key_decay", "diagonal_decay")

LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "mlp_norm": ("post_attention_layernorm.weight", "same"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in "qkvo"},
    "mlp/router": ("mlp.gate.weight", "swap"),
}
LIGHTNING = {
    "attn/qkv": ("self_attn.qkv_proj.weight", "swap"),
    "attn/gate": ("self_attn.output_gate.weight", "swap"),
    "attn/norm": ("self_attn.norm.weight", "same"),
    "attn/o": ("self_attn.out_proj.weight", "swap"),
}
NAMES = ("w1", "w3", "w2")


def canonical(name: str) -> str:
    """The library's name for a tensor that is called as in the released files."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """See `Family`."""
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    prefix, leaf = f"model.layers.{layer}.", path.rpartition("/")[2]
    if path == "attn/slope":
        yield (part(f"{prefix}self_attn.slope_rate", "flat", (*shape, 1, 1), *index),)
    elif leaf in ("gate_up", "down"):
        yield from experts(f"{prefix}mlp.experts.", NAMES, leaf, shape, *index)
    else:
        linear = config.layer_types[layer] == "lightning"
        yield listed(LAYER | LIGHTNING if linear else LAYER, prefix, path, shape, *index)


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    sizes = dict(fields)
    if sizes.get("head_dim") is None and sizes.get("hidden_size"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    json_fields.need(sizes, [*PLAIN, "num_hidden_layers"])
    json_fields.fixed(fields, FIXED)
    given = fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta")}
    default = ["linear_attention", "full_attention"] * fields["num_hidden_layers"]
    default = default[1 : fields["num_hidden_layers"] + 1]
    layer_types = json_fields.schedule(fields, TYPES, default)
    factors = {
        kind: {
            ours: float(fields.get(f"{name}_{which}_factor", 1.0)) for which, ours in BOTH.items()
        }
        for kind, name in FACTORS.items()
    }
    full = {"mechanism": "full", "rope": rope.rope(given, THETA) | {"halves": True}}
    attention = {
        "lightning": {"mechanism": "lightning", **factors["lightning"]},
        "full": full | factors["full"],
    }
    return DecoderConfig(
        **{ours: sizes[theirs] for theirs, ours in PLAIN.items()},
        **json_fields.dtypes(fields),
        **OURS,
        layer_types=layer_types,
        mlp_types=("moe",) * fields["num_hidden_layers"],
        attention=json_fields.used(attention, layer_types),
        mlps={"moe": ROUTED | factors["moe"]},
        rope_dim=sizes["head_dim"],
        norm_eps=fields.get("rms_norm_eps", 1e-5),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json`; ValueError where the family has no place for the model."""
    theirs = {ours: name for name, ours in TYPES.items()}
    own = copy.deepcopy(config.attention | config.mlps)
    wrong = json_fields.unlike(config, OURS)
    known = {"layer_types": set(theirs), "mlp_types": {"moe"}}
    wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
    expected = {
        "lightning": {"mechanism", *BOTH.values()},
        "full": {"mechanism", "rope", *BOTH.values()},
        "moe": {*ROUTED, *BOTH.values()},
    }
    wrong |= {
        kind: own.get(kind)
        for kind, names in expected.items()
        if kind in (*config.layer_types, *config.mlp_types) and set(own.get(kind, ())) != names
    }
    json_fields.refuse(wrong, "MiniMax-01")
    written: dict[str, Any] = {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **{
            f"{name}_{which}_factor": own[kind][ours]
            for kind, name in FACTORS.items()
            for which, ours in BOTH.items()
            if kind in own
        },
        **{name: getattr(config, ours) for name, ours in PLAIN.items()},
        **FIXED,
    }
    if "full" in own:
        written["rope_parameters"] = rope.parameters(own["full"]["rope"])
    return written


FAMILY = Family(
    parse,
    write,
    layouts,
    canonical,
    left_out=lambda config, name: name.rpartition(".")[2] in TABLES,
)
