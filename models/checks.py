"""What a config and its inputs must look like; every error names the value and the remedy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.fields import check_integer, check_like
from hetero_kv.attention.rope import Yarn
from hetero_kv.contract import History, LayerSpec, Window
from hetero_kv.kernels.dispatch import IMPLEMENTATIONS
from models.config import DecoderConfig

DTYPES = ("float32", "bfloat16", "float16")
MOST_ALIGN = 1 << 12  # bytes
POSITIVE = ("vocab_size", "d_model", "n_heads", "head_dim", "n_kv_heads", "d_ff", "chunk")
TABLES = {"layer_types": "attention", "mlp_types": "mlps"}
NOT_NEGATIVE = (
    "rope_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "window",
    "n_shared_experts",
    "hc_streams",
    "block",
    "cache_align",
    "hc_sinkhorn_iters",
)
# Fields that are finite and above 0, and those that may be 0 too; of the model or of one type.
ABOVE_ZERO = ("norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "embed_scale",
              "routed_scale", "attn_scale", "latent_eps")  # fmt: skip
FROM_ZERO = ("final_softcap", "swiglu_limit", "init_scale", "attn_softcap", "ssm_dt_min")
FACTORS = ("residual_factor", "output_factor")
# A type cannot have its own: layers join one residual, over one vocabulary.
SHARED = ("d_model", "vocab_size")


def check_config(config: DecoderConfig) -> None:
    """Raises ValueError for fields that could not mean anything, whatever the schedule."""
    check_fields("", vars(config))
    for types, table in TABLES.items():
        check_types(config, types, table)
    if jnp.promote_types(config.dtype, config.param_dtype) != jnp.dtype(config.dtype):
        raise ValueError(
            f"dtype={config.dtype!r} with param_dtype={config.param_dtype!r}: products with such "
            f"weights come out wider than the activations; set param_dtype={config.dtype!r} too"
        )
    check_mapping("cache_layouts", config.cache_layouts)
    if config.normed_residual and config.hc_streams:
        raise ValueError("normed_residual has no place beside hc_streams; set one of them to 0")
    if config.yarn_factor and not config.yarn_factor >= 1:
        raise ValueError(f"yarn_factor={config.yarn_factor} must be >= 1, or 0 for no YaRN")
    Yarn(
        config.yarn_factor or 1.0,
        config.yarn_original_max,
        config.yarn_beta_fast,
        config.yarn_beta_slow,
    ).check("yarn_")


def check_fields(where: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError, `where` before the name, for a field that could not mean anything.

    values: all fields of a model, or those of one layer type or MLP type.
    """
    likes = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}
    likes |= dict.fromkeys((*ABOVE_ZERO, *FROM_ZERO, *FACTORS), 1.0)
    for name, value in values.items():
        check_like(where + name, value, likes.get(name))
        if name in POSITIVE or name in NOT_NEGATIVE:
            check_integer(where + name, value, int(name in POSITIVE))
        if name in ABOVE_ZERO and not value > 0:
            raise ValueError(f"{where}{name}={value!r} must be > 0")
        if name in FROM_ZERO and not value >= 0:
            raise ValueError(f"{where}{name}={value!r} must be >= 0")
        if name == "index_topk" and (value < -1 or not value):
            raise ValueError(f"{where}{name}={value!r}: entries >= 1, or -1 for all visible ones")
        if name in ("param_dtype", "dtype", "cache_dtype") and value not in DTYPES:
            raise ValueError(f"{where}{name}={value!r}: use one of {DTYPES}")
        if name == "kernels" and value not in IMPLEMENTATIONS:
            raise ValueError(f"{where}{name}={value!r}: use one of {IMPLEMENTATIONS}")
    check_align(f"{where}cache_align", values.get("cache_align", 0))


def check_align(where: str, align: int) -> None:
    """Raises ValueError for bytes that no row is a multiple of."""
    if align > MOST_ALIGN:
        raise ValueError(
            f"{where}={align}: bytes from 0 (as published) to {MOST_ALIGN}; kernels read "
            "multiples of 128"
        )


def check_mapping(where: str, layouts: Any) -> None:
    """Raises ValueError for `cache_layouts` that are no mapping."""
    if not isinstance(layouts, Mapping):
        raise ValueError(f"{where}={layouts!r} maps names of leaves to layouts; give a dict")


def check_layouts(kind: str, layouts: Mapping[str, str | None], spec: LayerSpec) -> None:
    """Raises ValueError where a layer type does not store a leaf as `cache_layouts` says."""
    for name, leaf in spec.leaves:
        if layouts.get(name) is None or leaf.packing is not None:
            continue
        rows = isinstance(leaf.contract, History | Window)
        why = "its mechanism knows no row layouts" if rows else "only rows that age can be packed"
        raise ValueError(
            f"layer type {kind!r}: cache_layouts[{name!r}]={layouts[name]!r}, but {why}; leave "
            f"{name!r} out, for this type in attention[{kind!r}]['cache_layouts']"
        )


def check_names(
    layouts: Mapping[str, str | None], layers: Sequence[LayerSpec], where: str = "cache_layouts"
) -> None:
    """Raises ValueError for names in `cache_layouts` that none of the layers packs."""
    leaves = [pair for layer in layers for pair in layer.leaves]
    packed = {name for name, leaf in leaves if leaf.packing is not None}
    for name, kind in layouts.items():
        if kind is not None and name not in packed:
            rows = dict.fromkeys(x for x, y in leaves if isinstance(y.contract, History | Window))
            raise ValueError(
                f"{where}[{name!r}]={kind!r}: no layer stores a leaf of that name so; those that "
                f"can be packed are {', '.join(rows) or 'none'}"
            )


def check_types(config: DecoderConfig, types: str, table: str) -> None:
    """Raises ValueError for a schedule that is not one of names, or types declared in vain."""
    schedule, declared = getattr(config, types), getattr(config, table)
    if not isinstance(schedule, Sequence) or isinstance(schedule, str):
        raise ValueError(f"{types}={schedule!r}: a tuple of names is needed, one a layer")
    if odd := [x for x in schedule if not isinstance(x, str)]:
        raise ValueError(f"{types} has {odd}: names are needed")
    if not isinstance(declared, Mapping):
        raise ValueError(f"{table}={declared!r}: a dict by the names in {types} is needed")
    for kind, own in declared.items():
        where = f"{table}[{kind!r}]"
        if not isinstance(own, Mapping):
            raise ValueError(f"{where}={own!r}: a dict of its fields is needed")
        for name in {"mechanism", "form"} & set(own):
            check_like(f"{where}: {name}", own[name], "")
        check_fields(f"{where}: ", own)
        for name in SHARED:
            whole = getattr(config, name)
            if own.get(name, whole) != whole:
                raise ValueError(
                    f"{where}: {name}={own[name]}, but {name}={whole} is the whole model's; set it "
                    "there, for all layers"
                )
        check_mapping(f"{where}: cache_layouts", own.get("cache_layouts") or {})
    if unused := sorted(str(x) for x in set(declared) - set(schedule)):
        raise ValueError(
            f"{table} declares {unused}, which no layer is; name them in {types} or remove them"
        )


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
