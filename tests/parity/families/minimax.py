"""MiniMax-01: lightning attention and softmax attention.

Right in every split with a `MiniMaxCache`; with a `DynamicCache` it fails, and what follows the
first call on a cache is a loop over tokens. Its state has the activations' dtype, ours is float32.
Its rope turns whole heads, where the released model turns half of each (`rotary_dim`). Blocks are
shorter here than the batches, so that its own blocks are crossed.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

LINEAR, FULL = "linear_attention", "full_attention"
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=4,
    layer_types=[LINEAR, LINEAR, LINEAR, FULL],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    block_size=16,
    max_position_embeddings=4096,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)
TURNS: Mapping[str, Any] = dict(num_hidden_layers=2, layer_types=[LINEAR, FULL])

TOLERANCE = 2e-4
CASES = (
    FamilyCase("three_to_one", {}),
    FamilyCase(
        "factors",
        {
            **TURNS,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.75,
            "full_attn_alpha_factor": 2.0,
            "full_attn_beta_factor": 1.25,
            "mlp_alpha_factor": 0.5,
            "mlp_beta_factor": 1.75,
        },
        batch=3,
        length=41,
    ),
    FamilyCase(
        "softmax_first",
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, LINEAR, LINEAR],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        length=37,
    ),
    FamilyCase("long", {**TURNS, "block_size": 256}, length=150),
)
GOLDENS = ("three_to_one", "factors")
