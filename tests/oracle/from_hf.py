"""Reads a Hugging Face directory (state-dict names) for the reference; no torch, no jax."""

import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
from safetensors import safe_open

from tests.oracle.maths import Array

LAYER_TYPES = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


def config_of(fields: Mapping[str, Any]) -> types.SimpleNamespace:
    """The reference's configuration from the fields of a `config.json` with explicit schedules."""
    main, compress = fields["rope_parameters"]["main"], fields["rope_parameters"]["compress"]
    yarn = None
    if compress["rope_type"] == "yarn":
        yarn = types.SimpleNamespace(
            factor=compress["factor"],
            original_max=compress["original_max_position_embeddings"],
            beta_fast=compress["beta_fast"],
            beta_slow=compress["beta_slow"],
        )
    rates = fields["compress_rates"]
    return types.SimpleNamespace(
        vocab_size=fields["vocab_size"],
        d_model=fields["hidden_size"],
        layer_types=tuple(LAYER_TYPES[kind] for kind in fields["layer_types"]),
        mlp_types=tuple(fields["mlp_layer_types"]),
        n_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        n_kv_heads=fields["num_key_value_heads"],
        rope_dim=int(fields["head_dim"] * main["partial_rotary_factor"]),
        q_lora_rank=fields["q_lora_rank"],
        o_groups=fields["o_groups"],
        o_lora_rank=fields["o_lora_rank"],
        window=fields["sliding_window"],
        csa_ratio=rates["compressed_sparse_attention"],
        hca_ratio=rates["heavily_compressed_attention"],
        csa_overlap=True,
        index_heads=fields["index_n_heads"],
        index_dim=fields["index_head_dim"],
        index_topk=fields["index_topk"],
        indexer=True,
        sinks=True,
        qk_norm=False,
        rope_theta=main["rope_theta"],
        compress_rope_theta=compress["rope_theta"],
        yarn=yarn,
        d_ff=fields["moe_intermediate_size"],
        n_experts=fields["n_routed_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        n_shared_experts=fields["n_shared_experts"],
        routed_scale=fields["routed_scaling_factor"],
        swiglu_limit=fields["swiglu_limit"],
        hc_streams=fields["hc_mult"],
        hc_sinkhorn_iters=fields["hc_sinkhorn_iters"],
        hc_eps=fields["hc_eps"],
        norm_eps=fields["rms_norm_eps"],
        tie_embeddings=fields["tie_word_embeddings"],
    )


def load(directory: str | pathlib.Path) -> tuple[types.SimpleNamespace, dict[str, Array]]:
    """Configuration and tensors by name of a directory with one safetensors file."""
    directory = pathlib.Path(directory)
    config = config_of(json.loads((directory / "config.json").read_text()))
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
