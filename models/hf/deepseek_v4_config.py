"""`config.json` of a DeepSeek-V4 directory to DecoderConfig and back.

Read are the library's fields and the released checkpoints' (`compress_ratios`, `num_hash_layers`,
`qk_rope_head_dim`, `rope_scaling`). What changes the model and is not understood is refused.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig

LAYER_TYPES = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
RATIO_TYPES = {0: "swa", 4: "csa", 128: "hca"}  # of `compress_ratios`
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "window",
    "index_n_heads": "index_heads",
    "index_head_dim": "index_dim",
    "index_topk": "index_topk",
    "moe_intermediate_size": "d_ff",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scale",
    "swiglu_limit": "swiglu_limit",
    "hc_mult": "hc_streams",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "norm_eps",
}
# Fields that we implement for one value only; absent means that value.
FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,  # the library builds one whatever the number
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
ROPE_KNOWN = (*YARN, "rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor")
NO_CLAMP = 1e30  # the library clamps always; we write this for "never"


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a `config.json` describes; ValueError for what is not understood."""
    missing = sorted(set(PLAIN) - set(fields) - {"n_shared_experts"})
    missing += [] if "num_hidden_layers" in fields else ["num_hidden_layers"]
    if missing:
        raise ValueError(
            f"config.json lacks {', '.join(missing)}; add what the weights were made for"
        )
    wrong = {k: fields[k] for k, v in FIXED.items() if fields.get(k, v) != v}
    if wrong:
        raise ValueError(f"config.json: not implemented: {wrong}; only {FIXED}")
    values = {ours: fields[theirs] for theirs, ours in PLAIN.items() if theirs in fields}
    if values["swiglu_limit"] <= 0:
        raise ValueError(f"config.json: swiglu_limit must be > 0, got {values['swiglu_limit']}")
    if values["swiglu_limit"] >= NO_CLAMP:
        values["swiglu_limit"] = 0.0
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"config.json: dtype {dtype!r} must be 'float32' or 'bfloat16'")
    values |= {name: dtype for name in ("param_dtype", "dtype", "cache_dtype")}
    values |= _schedule(fields) | _positions(fields)
    return DecoderConfig(
        **values,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        sinks=True,
        indexer=True,
        csa_overlap=True,
    )


def _schedule(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Layer types, MLP types and ratios. Entries beyond the last layer (MTP) are dropped."""
    count = fields["num_hidden_layers"]
    if fields.get("layer_types") is not None:
        unknown = sorted(set(fields["layer_types"]) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"config.json: layer_types has {unknown}; known: {list(LAYER_TYPES)}")
        types = [LAYER_TYPES[kind] for kind in fields["layer_types"]]
    elif fields.get("compress_ratios") is not None:
        unknown = sorted(set(fields["compress_ratios"]) - set(RATIO_TYPES))
        if unknown:
            raise ValueError(
                f"config.json: compress_ratios {unknown} say no layer type (known: {RATIO_TYPES}); "
                "give layer_types and compress_rates"
            )
        types = [RATIO_TYPES[ratio] for ratio in fields["compress_ratios"]]
    else:
        # The library has a default here, which no released checkpoint has.
        raise ValueError("config.json has no schedule; add layer_types or compress_ratios")
    mlps = fields.get("mlp_layer_types")
    if mlps is None:
        if "num_hash_layers" not in fields:
            raise ValueError("config.json: add mlp_layer_types or num_hash_layers")
        hashed = min(count, fields["num_hash_layers"])
        mlps = ["hash_moe"] * hashed + ["moe"] * (count - hashed)
    if len(types) < count or len(mlps) < count or set(mlps) - {"moe", "hash_moe"}:
        raise ValueError(
            f"config.json: {count} layers need {count} layer types and as many 'moe' or "
            f"'hash_moe', got {types} and {mlps}"
        )
    rates = dict(fields.get("compress_rates") or {})
    csa = rates.get("compressed_sparse_attention", 4)
    hca = rates.get("heavily_compressed_attention", 128)
    return {
        "layer_types": tuple(types[:count]),
        "mlp_types": tuple(mlps[:count]),
        "csa_ratio": fields.get("compress_rate_csa", csa),
        "hca_ratio": fields.get("compress_rate_hca", hca),
    }


def _positions(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotated channels, bases, and YaRN of the compressed branches."""
    nested = fields.get("rope_parameters") or {}
    main, compress = nested.get("main") or {}, nested.get("compress") or {}
    if not compress:  # one flat dictionary is the scaling of the compressed branches
        compress = dict(fields.get("rope_scaling") or nested)
        compress.pop("rope_theta", None)
    kind = compress.get("rope_type", compress.get("type", "default"))
    if main.get("rope_type", "default") != "default" or kind not in ("default", "yarn"):
        raise ValueError(
            "config.json: rope types other than 'default' (main) and 'default' or 'yarn' "
            f"(compress) are not implemented, got {main} and {compress}"
        )
    unknown = sorted((set(compress) | set(main)) - set(ROPE_KNOWN))
    # The model does not scale cosine and sine; a factor says that these weights expect it.
    if unknown or compress.get("attention_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            f"config.json: rope parameters {unknown or ['attention_factor != 1']} are not "
            "implemented"
        )
    share = fields.get("partial_rotary_factor", main.get("partial_rotary_factor"))
    dim = fields.get("qk_rope_head_dim")
    if dim is None and share is None:
        raise ValueError("config.json: add qk_rope_head_dim or partial_rotary_factor")
    out = {
        "rope_dim": int(fields["head_dim"] * share) if share is not None else dim,
        "rope_theta": float(main.get("rope_theta", fields.get("rope_theta", 10_000.0))),
        "compress_rope_theta": float(
            compress.get("rope_theta", fields.get("compress_rope_theta", 160_000.0))
        ),
    }
    if kind == "yarn":
        absent = [key for key in YARN if key not in compress]
        if absent:
            raise ValueError(f"config.json: YaRN lacks {', '.join(absent)}")
        out |= {
            "yarn_factor": float(compress["factor"]),
            "yarn_original_max": int(compress["original_max_position_embeddings"]),
            "yarn_beta_fast": float(compress["beta_fast"]),
            "yarn_beta_slow": float(compress["beta_slow"]),
        }
    return out


def unsupported(config: DecoderConfig) -> list[str]:
    """What of a configuration the family has no place for, each with its value."""
    tests = {
        "layer_types": set(config.layer_types) <= set(LAYER_TYPES.values()),
        "attention": not config.attention,
        "mlps": not config.mlps,
        "sandwich_norms": not config.sandwich_norms,
        "normed_residual": not config.normed_residual,
        "embed_scale": config.embed_scale == 1,
        "final_softcap": not config.final_softcap,
        "mlp_types": set(config.mlp_types) <= {"moe", "hash_moe"},
        "q_lora_rank": config.q_lora_rank > 0,
        "o_groups": config.o_groups > 0,
        "sinks": config.sinks,
        "window": config.window > 1,  # the library's cache breaks at 1
        "csa_overlap": config.csa_overlap or "csa" not in config.layer_types,
        "indexer": config.indexer or "csa" not in config.layer_types,
        "index_topk": config.index_topk > 0 or "csa" not in config.layer_types,
        "n_shared_experts": config.n_shared_experts == 1,
        "hc_streams": config.hc_streams > 0,
        # The library derives the number of rotated channels from a share.
        "rope_dim": int(config.head_dim * (config.rope_dim / config.head_dim)) == config.rope_dim,
    }
    return [f"{name}={getattr(config, name)!r}" for name, fits in tests.items() if not fits]


def write(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a `config.json` in the library's current form; ValueError for other families."""
    wrong = unsupported(config)
    if wrong:
        raise ValueError(
            f"DeepSeek-V4 has no place for {', '.join(wrong)}; save such a model as a checkpoint "
            "of the trainer instead"
        )
    theirs = {ours: kind for kind, ours in LAYER_TYPES.items()}
    share = config.rope_dim / config.head_dim
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share}
    compress = main | {"rope_theta": config.compress_rope_theta}
    if config.yarn is not None:
        compress |= dict(zip(YARN, config.yarn[: len(YARN)], strict=True))
        compress |= {"rope_type": "yarn", "attention_factor": 1.0}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": config.param_dtype,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": [theirs[kind] for kind in config.layer_types],
        "mlp_layer_types": list(config.mlp_types),
        "compress_rates": {
            "compressed_sparse_attention": config.csa_ratio,
            "heavily_compressed_attention": config.hca_ratio,
        },
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": share,
        "qk_rope_head_dim": config.rope_dim,
        "rope_parameters": {"main": main, "compress": compress},
        "tie_word_embeddings": config.tie_embeddings,
        **{their: getattr(config, ours) for their, ours in PLAIN.items()},
        "swiglu_limit": config.swiglu_limit or NO_CLAMP,
        **FIXED,
    }
