"""Kimi Linear: KDA and MLA without positions.

The library is right in every split. Its `save_pretrained` calls the dense MLP of the first layers
`block_sparse_moe`, as the released files call experts only: we read both. It reads norms of latents
with 1e-6, whatever `rms_norm_eps` is, and so do we.
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
    num_hidden_layers=4,
    layer_types=[LINEAR, LINEAR, LINEAR, FULL],
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=10,
    linear_num_heads=3,
    linear_head_dim=8,
    num_local_experts=8,
    num_experts_per_tok=3,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TURNS: Mapping[str, Any] = dict(num_hidden_layers=2, layer_types=[LINEAR, FULL])

TOLERANCE = 2e-4
CASES = (
    FamilyCase("three_to_one", {}),
    FamilyCase(
        "query_latent",
        {**TURNS, "q_lora_rank": 14, "n_group": 4, "topk_group": 2, "linear_conv_kernel_dim": 2},
        batch=3,
        length=41,
    ),
    FamilyCase(
        "sparse_at_once",
        {
            **TURNS,
            "mlp_layer_types": ["sparse", "sparse"],
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "linear_head_dim": 12,
            "linear_num_heads": 1,
        },
        length=37,
    ),
    FamilyCase("long", TURNS, length=150),
)
GOLDENS = ("three_to_one", "query_latent")
