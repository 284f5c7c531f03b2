"""Qwen3-Next directories: see `qwen`. Dense MLPs, or experts beside a gated shared one.

The two projections of a linear layer hold, key head by key head, its query, its key, and the values
and gates of its value heads; and its value heads' strengths and decays.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import qwen
from models.hf.parts import Layout, Part


def projections(
    linear: Mapping[str, Any], prefix: str, path: str, shape: tuple[int, ...], *index: int
) -> Layout:
    """See `qwen.Kind`."""
    heads, each = linear["key_heads"], linear["value_heads"] // linear["key_heads"]
    wide = each * linear["value_dim"]
    sizes, name = {
        "attn/qkvz": ((linear["key_dim"], linear["key_dim"], wide, wide), "in_proj_qkvz"),
        "attn/ba": ((each, each), "in_proj_ba"),
    }[path]
    name = f"{prefix}linear_attn.{name}.weight"
    return (Part(name, (shape[1], shape[0]), index, "heads", heads, sizes),)


def _sparse(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer's MLP has experts."""
    dense = layer in (fields.get("mlp_only_layers") or ())
    return not dense and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0


def parse_mlps(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], qwen.Mlps]:
    """See `qwen.Kind`."""
    json_fields.need(fields, ["intermediate_size"])
    count = fields["num_hidden_layers"]
    types = tuple("moe" if _sparse(fields, i) else "dense" for i in range(count))
    experts = qwen.routed(fields, router_normalise=fields.get("norm_topk_prob", True))
    return types, {"dense": {"d_ff": fields["intermediate_size"]}, "moe": experts}


def write_mlps(config: DecoderConfig) -> dict[str, Any]:
    """See `qwen.Kind`. Widths that no layer has are those of the other kind."""
    moe = config.mlps.get("moe", {})
    return {
        "mlp_only_layers": [i for i, kind in enumerate(config.mlp_types) if kind == "dense"],
        "intermediate_size": config.mlps.get("dense", {}).get("d_ff", config.d_ff),
        qwen.SHARED: moe.get("shared_ff", config.d_ff),
        "norm_topk_prob": moe.get("router_normalise", True),
    }


FAMILY = qwen.Kind(
    "Qwen3-Next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    qwen.EXPERTS,
    projections,
    parse_mlps,
    write_mlps,
    {"dense": ({"d_ff"}, {}), "moe": ({"shared_ff"}, qwen.ROUTED)},
).family()
