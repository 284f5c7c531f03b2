"""Qwen3-Next directories: see `qwen`. Dense MLPs, or experts beside a gated shared one.

A linear layer has two projections, in which all of a key head lies together.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import qwen
from models.hf.parts import Layout, part


def projections(
    linear: Mapping[str, Any], prefix: str, path: str, shape: tuple[int, ...], *index: int
) -> Layout:
    """See `qwen.Kind`."""
    name = f"{prefix}linear_attn.in_proj_{path.removeprefix('attn/')}.weight"
    return (part(name, "swap", shape, *index),)


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
    by_key_head=True,
).family()
