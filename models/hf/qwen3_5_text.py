"""Qwen3.5 directories without a vision tower: see `qwen`. Every MLP is dense.

A linear layer has four projections: of queries, keys and values; of gates, strengths and decays.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import qwen
from models.hf.parts import Layout, part

GATED = {**qwen.FIXED, "attn_output_gate": True}


def projections(
    linear: Mapping[str, Any], prefix: str, path: str, shape: tuple[int, ...], *index: int
) -> Layout:
    """See `qwen.Kind`."""
    wide = linear["value_heads"] * linear["value_dim"]
    first = {"attn/qkvz": shape[1] - wide, "attn/ba": linear["value_heads"]}[path]
    names = {"attn/qkvz": ("qkv", "z"), "attn/ba": ("b", "a")}[path]
    places = (slice(0, first), slice(first, shape[1]))
    return tuple(
        part(
            f"{prefix}linear_attn.in_proj_{name}.weight",
            "swap",
            (shape[0], place.stop - place.start),
            *index,
            slice(None),
            place,
        )
        for name, place in zip(names, places, strict=True)
    )


def parse_mlps(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], qwen.Mlps]:
    """See `qwen.Kind`."""
    return ("dense",) * fields["num_hidden_layers"], {}


def write_mlps(config: DecoderConfig) -> dict[str, Any]:
    """See `qwen.Kind`."""
    return {}


FAMILY = qwen.Kind(
    "Qwen3.5",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    {"intermediate_size": "d_ff"},
    projections,
    parse_mlps,
    write_mlps,
    {"dense": (set(), {})},
    by_key_head=False,
    fixed=GATED,
).family()
