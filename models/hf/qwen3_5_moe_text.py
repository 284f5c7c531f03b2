"""Qwen3.5 directories with experts in every layer, without a vision tower: see `qwen`."""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import qwen
from models.hf.qwen3_5_text import GATED, projections


def parse_mlps(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], qwen.Mlps]:
    """See `qwen.Kind`."""
    json_fields.fixed(fields, {"mlp_only_layers": []})
    return ("moe",) * fields["num_hidden_layers"], {
        "moe": qwen.routed(fields, router_normalise=True)
    }


def write_mlps(config: DecoderConfig) -> dict[str, Any]:
    """See `qwen.Kind`."""
    return {qwen.SHARED: config.mlps["moe"]["shared_ff"]}


FAMILY = qwen.Kind(
    "Qwen3.5 with experts",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    qwen.EXPERTS,
    projections,
    parse_mlps,
    write_mlps,
    {"moe": ({"shared_ff"}, qwen.ROUTED | {"router_normalise": True})},
    by_key_head=False,
    fixed=GATED,
).family()
