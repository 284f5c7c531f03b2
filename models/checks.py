"""What a config and its inputs must look like; every error names the value and the remedy."""

import jax
import numpy as np

from models.config import DecoderConfig

DTYPES = ("float32", "bfloat16", "float16")
POSITIVE = ("vocab_size", "d_model", "n_heads", "head_dim", "n_kv_heads", "d_ff", "chunk")
NOT_NEGATIVE = (
    "rope_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "window",
    "n_shared_experts",
    "hc_streams",
    "block",
)


def check_config(config: DecoderConfig) -> None:
    """Raises ValueError for fields that could not mean anything, whatever the schedule."""
    for name in (*POSITIVE, *NOT_NEGATIVE):
        value, least = getattr(config, name), int(name in POSITIVE)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: an integer >= {least} is needed")
    for name in ("param_dtype", "dtype", "cache_dtype"):
        if getattr(config, name) not in DTYPES:
            raise ValueError(f"{name}={getattr(config, name)!r}: use one of {DTYPES}")
    for name in ("norm_eps", "hc_eps", "rope_theta", "compress_rope_theta"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}={getattr(config, name)!r} must be > 0")
    if not config.embed_scale > 0 or config.final_softcap < 0:
        raise ValueError(
            "embed_scale must be > 0 and final_softcap >= 0, got "
            f"{config.embed_scale} and {config.final_softcap}"
        )
    if config.yarn_factor < 0:
        raise ValueError(f"yarn_factor={config.yarn_factor} must be >= 0 (0: no YaRN)")


def check_tokens(tokens: jax.Array | np.ndarray, shape: tuple[int | None, ...], vocab: int) -> None:
    """Raises ValueError unless tokens are integers of this shape (None: any) within the vocabulary.

    Values are looked at in host arrays only: not inside a trace, and never by waiting for a device.
    """
    found = np.shape(tokens)
    fits = len(found) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, found, strict=True)
    )
    if not fits or 0 in found:
        wanted = ", ".join("S" if want is None else str(want) for want in shape)
        least = " with S >= 1" if None in shape else ""
        raise ValueError(f"tokens must be i32[{wanted}]{least}, got shape {found}")
    dtype = tokens.dtype if hasattr(tokens, "dtype") else np.asarray(tokens).dtype
    if not np.issubdtype(dtype, np.integer):
        raise ValueError(f"tokens must be integers, got {dtype}")
    if not isinstance(tokens, jax.Array):
        low, high = np.min(tokens), np.max(tokens)
        if low < 0 or high >= vocab:
            raise ValueError(
                f"token ids must be in 0..{vocab - 1} (vocab_size={vocab}), got {low}..{high}"
            )
