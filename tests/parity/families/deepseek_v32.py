"""DeepSeek-V3.2: MLA with an indexer of tokens, experts in groups.

What to know of the library as a reference: norms of latents take 1e-6 whatever `rms_norm_eps` is
(the released model has 1e-6, so both readings agree there, and we follow the library); expansion of
keys and values where we absorb, so the last bits differ; scores of 0 tie and its top-k breaks ties
by tensor length (use >= 8 index heads); with fewer keys than top-k it also picks masked ones, which
stay masked. It leaves out the Hadamard rotation of index queries and keys (orthogonal) and their
FP8 form. Its docstring of the scores forgets the ReLU that the code has.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=6,
    v_head_dim=10,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    index_n_heads=16,
    index_head_dim=12,
    index_topk=6,
    max_position_embeddings=4096,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=8.0,
    beta_fast=8.0,
    beta_slow=1.0,
    original_max_position_embeddings=256,
    mscale=1.0,
    mscale_all_dim=0.7,
)

CASES = (
    FamilyCase("dense_then_moe", {}),
    FamilyCase("yarn_mscale", {"rope_parameters": YARN, "index_topk": 3}, batch=3, length=41),
    FamilyCase(
        "one_group",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "index_topk": 1,
            "n_shared_experts": 2,
            "num_hidden_layers": 2,
            "mlp_layer_types": ["sparse", "sparse"],
        },
        length=37,
    ),
    FamilyCase("long", {"index_topk": 40, "num_hidden_layers": 2}, length=150),
)
GOLDENS = ("dense_then_moe", "yarn_mscale")
