"""Qwen3-Next: gated DeltaNet and gated full attention.

The library is right in every split (its chunks are of 64 tokens, ours are other ones: rounding). It
keeps K columns of the convolution where K - 1 are read, and its decays within a chunk are
differences of sums from the chunk's start, which lose digits where a head decays fast. A cache of
linear layers alone has no length (`get_seq_length` raises): there must be a layer of attention.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

LINEAR, FULL = "linear_attention", "full_attention"
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=12,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    max_position_embeddings=4096,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
)

TOLERANCE = 2e-4
CASES = (
    FamilyCase("three_to_one", {}),
    FamilyCase(
        "dense_wide_taps",
        {
            "layer_types": [FULL, LINEAR],
            "num_hidden_layers": 2,
            "mlp_only_layers": [0],
            "linear_conv_kernel_dim": 6,
            "linear_num_key_heads": 1,
        },
        batch=3,
        length=41,
    ),
    FamilyCase(
        "every_second_sparse",
        {
            "layer_types": [LINEAR, FULL],
            "num_hidden_layers": 2,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
        length=37,
    ),
    FamilyCase("long", {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2}, length=150),
)
GOLDENS = ("three_to_one", "dense_wide_taps")
