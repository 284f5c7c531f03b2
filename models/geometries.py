"""Released models as configurations: the schedules and sizes of their papers and `config.json`s.

They are there to be counted (`jax.eval_shape`), not to be run: caches and activations are bfloat16,
the block is 128 tokens, a prefill call 1,024.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import (
    deepseek_v32,
    gemma3_text,
    gpt_oss,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_next,
)

HALF: Mapping[str, Any] = dict.fromkeys(("param_dtype", "dtype", "cache_dtype"), "bfloat16")
GRID: Mapping[str, int] = {"chunk": 1_024, "block": 128}

# DeepSeek-V4 report, section 4.2.1.
V4: Mapping[str, Any] = dict(
    vocab_size=129_280,
    head_dim=512,
    rope_dim=64,
    o_lora_rank=1_024,
    window=128,
    csa_ratio=4,
    hca_ratio=128,
    index_heads=64,
    index_dim=128,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    yarn_factor=16.0,
    yarn_original_max=65_536,
    experts_per_token=6,
    n_shared_experts=1,
    swiglu_limit=10.0,
    hc_streams=4,
    **HALF,
    **GRID,
)


def v4_flash() -> DecoderConfig:
    """DeepSeek-V4-Flash: 43 layers, the first two with windows alone."""
    return DecoderConfig(
        **V4,
        d_model=4_096,
        layer_types=("swa", "swa", *("csa", "hca") * 20, "csa"),
        mlp_types=("hash_moe",) * 3 + ("moe",) * 40,
        n_heads=64,
        q_lora_rank=1_024,
        o_groups=8,
        index_topk=512,
        d_ff=2_048,
        n_experts=256,
        routed_scale=1.5,
    )


def v4_pro() -> DecoderConfig:
    """DeepSeek-V4-Pro: 61 layers, all with entries."""
    return DecoderConfig(
        **V4,
        d_model=7_168,
        layer_types=("hca", "hca", *("csa", "hca") * 29, "csa"),
        mlp_types=("hash_moe",) * 3 + ("moe",) * 58,
        n_heads=128,
        q_lora_rank=1_536,
        o_groups=16,
        index_topk=1_024,
        d_ff=3_072,
        n_experts=384,
        routed_scale=2.5,
    )


def v3_2() -> DecoderConfig:
    """DeepSeek-V3.2: 61 layers of MLA, each with an indexer of tokens."""
    fields = dict(
        vocab_size=129_280,
        hidden_size=7_168,
        intermediate_size=18_432,
        moe_intermediate_size=2_048,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1_536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2_048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        dtype="bfloat16",
    )
    return deepseek_v32.parse(fields).replace(**GRID)


def gemma3_27b() -> DecoderConfig:
    """Gemma 3, 27B: 62 layers, every sixth global."""
    fields = dict(
        vocab_size=262_208,
        hidden_size=5_376,
        intermediate_size=21_504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1_024,
        query_pre_attn_scalar=168,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        dtype="bfloat16",
    )
    return gemma3_text.parse(fields).replace(**GRID)


def gpt_oss_120b() -> DecoderConfig:
    """gpt-oss, 120B: 36 layers, window and full in turns."""
    fields = dict(
        vocab_size=201_088,
        hidden_size=2_880,
        intermediate_size=2_880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        sliding_window=128,
        dtype="bfloat16",
    )
    return gpt_oss.parse(fields).replace(**GRID)


# Cached rows as serving kernels store them. V4: 448 + 128 + 8 bytes for a row of 448 + 64 channels,
# 64 + 4 for an index key of 128. V3.2's latents take 512 + 16 + 128, its index keys 128 + 4.
V4_LAYOUTS: Mapping[str, str] = {"window": "fp8_rope", "entries": "fp8_rope", "index_keys": "fp4"}
V32_LAYOUTS: Mapping[str, str] = {"latent": "fp8_f32", "index_keys": "fp8_f32"}
DEPLOYED: Mapping[str, Mapping[str, str]] = {
    "v4_flash": V4_LAYOUTS,
    "v4_pro": V4_LAYOUTS,
    "v3_2": V32_LAYOUTS,
}


def deployed(name: str) -> DecoderConfig:
    """A model of DEPLOYED with its cache as it is served: packed rows."""
    return RELEASED[name]().replace(cache_layouts=dict(DEPLOYED[name]))


# Layers of gated DeltaNet in Qwen3-Next and Qwen3.5, and every fourth one's heads.
QWEN: Mapping[str, Any] = dict(
    num_attention_heads=16,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    dtype="bfloat16",
)


def qwen3_next_80b() -> DecoderConfig:
    """Qwen3-Next, 80B with 3B active: 48 layers, every fourth with attention."""
    fields = dict(
        vocab_size=151_936,
        hidden_size=2_048,
        intermediate_size=5_632,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_hidden_layers=48,
        num_key_value_heads=2,
        num_experts=512,
        num_experts_per_tok=10,
        rope_theta=10_000_000.0,
    )
    return qwen3_next.FAMILY.parse({**QWEN, **fields}).replace(**GRID)


def qwen3_5_9b() -> DecoderConfig:
    """Qwen3.5, 9B: 32 layers, every fourth with attention."""
    fields = dict(
        vocab_size=248_320,
        hidden_size=4_096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_key_value_heads=4,
        rope_theta=10_000_000.0,
    )
    return qwen3_5_text.FAMILY.parse({**QWEN, **fields}).replace(**GRID)


def qwen3_5_35b() -> DecoderConfig:
    """Qwen3.5, 35B with 3B active: 40 layers, every fourth with attention."""
    fields = dict(
        vocab_size=248_320,
        hidden_size=2_048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_hidden_layers=40,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        rope_theta=10_000_000.0,
    )
    return qwen3_5_moe_text.FAMILY.parse({**QWEN, **fields}).replace(**GRID)


RELEASED: Mapping[str, Callable[[], DecoderConfig]] = {
    made.__name__: made
    for made in (
        v4_flash,
        v4_pro,
        v3_2,
        gemma3_27b,
        gpt_oss_120b,
        qwen3_next_80b,
        qwen3_5_9b,
        qwen3_5_35b,
    )
}
