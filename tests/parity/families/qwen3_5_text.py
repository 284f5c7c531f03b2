"""Qwen3.5 without experts: gated DeltaNet and gated full attention, every MLP dense.

The library is right in every split, with what is said of `qwen3_next`. Three positions of a token
turn a head's channels in turns (`mrope_section`); of text all three are the same, whatever the
sections are. Its configuration accepts `attn_output_gate`, which released files have, and gates the
output whatever it says: we refuse another value.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.families import qwen3_next
from tests.parity.families.qwen3_next import FULL, LINEAR
from tests.parity.family_case import FamilyCase

OWN = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
BASE: Mapping[str, Any] = {
    name: x for name, x in qwen3_next.BASE.items() if not name.startswith(OWN)
}
TURNS: Mapping[str, Any] = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}

TOLERANCE = 2e-4
CASES = (
    FamilyCase("three_to_one", {}),
    FamilyCase(
        "wide_taps_sections",
        {
            "layer_types": [FULL, LINEAR],
            "num_hidden_layers": 2,
            "linear_conv_kernel_dim": 6,
            "linear_num_key_heads": 1,
            "rope_parameters": {
                **qwen3_next.BASE["rope_parameters"],
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
        batch=3,
        length=41,
    ),
    FamilyCase(
        "biased_tied",
        {
            **TURNS,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        length=37,
    ),
    FamilyCase("long", TURNS, length=150),
)
GOLDENS = ("three_to_one", "wide_taps_sections")
