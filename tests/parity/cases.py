"""Named tiny DeepSeek-V4 configurations, each long enough to reach what it is there for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"


@dataclasses.dataclass(frozen=True)
class Case:
    """One random model and one random batch.

    `length` is at least `m·(k + 1)` tokens, below which the indexer drops nothing, at least
    `2·m' + 1`, so that an entry follows the second closed group, and no multiple of a ratio.
    """

    name: str
    hf: Mapping[str, Any]  # overrides of `BASE`, fields of DeepseekV4Config
    batch: int = 1
    length: int = 61
    seed: int = 0


def ratios(csa: int, hca: int) -> dict[str, dict[str, int]]:
    """The `compress_rates` field."""
    return {"compress_rates": {SPARSE: csa, HEAVY: hca}}


# 71,515 parameters. Two sparse layers, so that an error in one reaches another; index heads >= 8,
# because with fewer many scores are exactly 0 and ties decide the selection.
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=16,
    partial_rotary_factor=0.5,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    layer_types=[SLIDING, SPARSE, HEAVY, SPARSE],
    mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    compress_rates={SPARSE: 4, HEAVY: 8},
    sliding_window=8,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=3,
    hc_mult=2,
    hc_sinkhorn_iters=20,
    max_position_embeddings=4096,
    initializer_range=0.3,
)

# About 3,000 parameters: the smallest model that has one layer of each kind.
SMALLEST: Mapping[str, Any] = dict(
    vocab_size=16,
    hidden_size=8,
    moe_intermediate_size=4,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=4,
    q_lora_rank=4,
    o_lora_rank=2,
    layer_types=[SLIDING, SPARSE, HEAVY],
    mlp_layer_types=["hash_moe", "moe", "moe"],
    sliding_window=4,
    index_n_heads=8,
    index_head_dim=4,
    **ratios(2, 4),
)

# About 16,000 parameters, all mechanisms.
SMALL: Mapping[str, Any] = dict(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    head_dim=8,
    q_lora_rank=8,
    o_lora_rank=4,
    index_n_heads=8,
    index_head_dim=8,
)

# Frequencies blended over channels 1 to 4 of 4, with angles of order 1 within the test's length.
YARN: Mapping[str, Any] = dict(
    compress_rope_theta=100.0,
    rope_parameters=dict(
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=256,
        beta_fast=8.0,
        beta_slow=1.0,
    ),
)

# The released Flash model's frequencies.
FLASH_YARN: Mapping[str, Any] = dict(
    max_position_embeddings=1048576,
    rope_parameters=dict(
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=65536,
        beta_fast=32.0,
        beta_slow=1.0,
    ),
)

# Two sliding layers, then sparse and heavy in turns; hash routing in the first three.
FLASH: Mapping[str, Any] = dict(
    num_hidden_layers=7,
    layer_types=[SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY, SPARSE],
    mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 4,
    hc_mult=4,
    **FLASH_YARN,
)

# No layer without entries.
PRO: Mapping[str, Any] = dict(
    num_hidden_layers=5,
    layer_types=[HEAVY, HEAVY, SPARSE, HEAVY, SPARSE],
    mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 2,
    hc_mult=4,
    **FLASH_YARN,
)

CASES: tuple[Case, ...] = (
    Case("smallest", SMALLEST, length=27),
    Case("ratios_4_8", {}, length=61),
    Case("batch_3", {}, batch=3, length=45),
    Case("ratios_4_128", {**SMALL, **ratios(4, 128), "sliding_window": 128}, length=275),
    Case("ratios_3_7", {**SMALL, **ratios(3, 7), "sliding_window": 6}, batch=3, length=50),
    Case("ratios_5_2", {**SMALL, **ratios(5, 2), "sliding_window": 3}, length=53),
    Case("window_2", {**SMALL, "sliding_window": 2}, batch=3, length=45),
    Case("window_is_ratio", {**SMALL, "sliding_window": 4}, length=45),
    Case("yarn", {**SMALL, **YARN}, length=61),
    Case("hash_only", {**SMALL, "mlp_layer_types": ["hash_moe"] * 4}, length=45),
    Case(
        "topk_only_clamped",
        {**SMALL, "mlp_layer_types": ["moe"] * 4, "swiglu_limit": 0.5, "n_routed_experts": 6},
        length=45,
    ),
    Case("streams_1", {**SMALL, "hc_mult": 1}, length=45),
    Case("streams_4", {**SMALL, "hc_mult": 4}, length=45),
    Case("select_one", {**SMALL, "index_topk": 1}, length=45),
    Case("select_all", {**SMALL, "index_topk": 1024}, length=45),
    Case("flash", {**SMALL, **FLASH}, length=61),
    Case("pro", {**SMALL, **PRO}, batch=3, length=45),
)


def named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
