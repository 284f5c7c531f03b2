"""Gemma 3: five local layers to a global one.

The library reads `attn_logit_softcapping` and never applies it (`Gemma3Attention.forward` does not
hand it on): see `tests/parity/gemma3_test.py`. Its other paths are right in every split.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

LOCAL, GLOBAL = "sliding_attention", "full_attention"
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=12,
    sliding_window=8,
    max_position_embeddings=4096,
    initializer_range=0.3,
    rope_parameters={
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    },
)
TURNS: Mapping[str, Any] = dict(num_hidden_layers=3, layer_types=[LOCAL, GLOBAL, LOCAL])
RELEASED = {LOCAL: {"rope_type": "default", "rope_theta": 1e4}, GLOBAL: {"rope_type": "default"}}

CASES = (
    FamilyCase("five_to_one", {}),
    FamilyCase(
        "turns_capped",
        {**TURNS, "sliding_window": 5, "final_logit_softcapping": 3.0},
        batch=3,
        length=41,
    ),
    FamilyCase(
        "one_key_head_untied",
        {**TURNS, "num_key_value_heads": 1, "tie_word_embeddings": False, "sliding_window": 2},
        length=37,
    ),
    FamilyCase(
        "biased_wide_window",
        {**TURNS, "attention_bias": True, "sliding_window": 70, "rope_parameters": RELEASED},
        length=150,
    ),
)
GOLDENS = ("five_to_one", "turns_capped")
