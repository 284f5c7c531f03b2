"""Qwen3.5 with experts in every layer, beside a gated shared one: see `qwen3_5_text`.

Shares of chosen experts are always normalised here, and there is no field that says so.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.families import qwen3_next
from tests.parity.families.qwen3_5_text import TURNS
from tests.parity.families.qwen3_next import FULL, LINEAR
from tests.parity.family_case import FamilyCase

BASE: Mapping[str, Any] = {
    name: x for name, x in qwen3_next.BASE.items() if name != "intermediate_size"
}

TOLERANCE = 2e-4
CASES = (
    FamilyCase("three_to_one", {}, seed=2),
    FamilyCase(
        "one_expert_one_key_head",
        {
            "layer_types": [FULL, LINEAR],
            "num_hidden_layers": 2,
            "num_experts_per_tok": 1,
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3,
        },
        batch=3,
        length=41,
    ),
    FamilyCase(
        "many_experts",
        {
            **TURNS,
            "num_experts": 12,
            "num_experts_per_tok": 5,
            "shared_expert_intermediate_size": 20,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
        length=37,
    ),
    FamilyCase("long", TURNS, length=150),
)
GOLDENS = ("three_to_one", "one_expert_one_key_head")
