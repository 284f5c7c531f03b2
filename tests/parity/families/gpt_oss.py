"""gpt-oss: window and full layers in turns, sinks, YaRN, experts with biases.

The library is right in every split. It initialises biases of experts and of projections to 0 and
clamps at 7, beyond what tiny models reach: both are changed here, or a wrong path would pass.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

LOCAL, FULL = "sliding_attention", "full_attention"
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    swiglu_limit=1.0,
    sliding_window=8,
    max_position_embeddings=4096,
    initializer_range=0.3,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=100.0,
        factor=8.0,
        beta_fast=8.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=256,
    ),
)
RELEASED = dict(
    rope_type="yarn",
    rope_theta=150000.0,
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)

CASES = (
    FamilyCase("turns", {}),
    FamilyCase("window_3", {"sliding_window": 3, "num_hidden_layers": 3}, batch=3, length=41),
    FamilyCase(
        "released_frequencies",
        {"rope_parameters": RELEASED, "sliding_window": 70, "num_hidden_layers": 2},
        length=150,
    ),
    FamilyCase(
        "many_experts_no_bias",
        {
            "num_local_experts": 12,
            "num_experts_per_tok": 4,
            "attention_bias": False,
            "swiglu_limit": 7.0,
            "layer_types": [FULL, FULL, LOCAL],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
        length=37,
    ),
)
GOLDENS = ("turns", "window_3")
