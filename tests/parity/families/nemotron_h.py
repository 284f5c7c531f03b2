"""Nemotron-H: Mamba-2, attention without positions, MLPs of squared ReLUs or experts.

The library clips steps from below at `time_step_min` in prefill and not in decoding, so that its
decoding differs from its prefill where a step is shorter: see `tests/parity/nemotron_h_test.py`. We
clip in both. Here no step is that short. Layers without a state have an empty place in its cache,
so that caches are not to be counted by layers of attention.

Of other families with Mamba layers, which have no converter: a call of several tokens on a cache of
Jamba's does not hand the cached state to its scan (one prefill and decoding by single tokens are
right), and a cached call of Bamba's needs `position_ids`, or begins at 0 again.
"""

from collections.abc import Mapping
from typing import Any

from tests.parity.family_case import FamilyCase

MAMBA, FULL = "linear_attention", "full_attention"
BASE: Mapping[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    layers_block_type=[MAMBA, "moe", MAMBA, "mlp", FULL, "moe"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    ssm_state_size=6,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    chunk_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=20,
    time_step_min=1e-6,
    initializer_range=0.3,
)

TOLERANCE = 2e-4
CASES = (
    FamilyCase("experts_between", {}),
    FamilyCase(
        "no_mlp_behind_some",
        {
            "layers_block_type": [MAMBA, FULL, "mlp", MAMBA],
            "n_groups": 1,
            "conv_kernel": 2,
            "use_conv_bias": False,
        },
        batch=3,
        length=41,
    ),
    FamilyCase(
        "grouped_experts",
        {
            "layers_block_type": [FULL, "moe", MAMBA, "moe"],
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "n_groups": 4,
        },
        length=37,
    ),
    FamilyCase("long", {"layers_block_type": [MAMBA, "mlp", FULL]}, length=150),
)
GOLDENS = ("experts_between", "no_mlp_behind_some")
