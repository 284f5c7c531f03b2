"""Fields of a `config.json`: what is there, what is understood, and what is not."""

from collections.abc import Iterable, Mapping
from typing import Any

from models.config import DecoderConfig

DTYPES = ("float32", "bfloat16")
# A residual block without anything around it, as most families have it.
PLAIN_BLOCK = {
    "hc_streams": 0,
    "normed_residual": False,
    "sandwich_norms": False,
    "embed_scale": 1.0,
    "final_softcap": 0.0,
}


def need(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError where fields are absent."""
    missing = sorted(name for name in names if fields.get(name) is None)
    if missing:
        raise ValueError(
            f"config.json lacks {', '.join(missing)}; add what the weights were made for"
        )


def fixed(fields: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError where a field has another value than the one that is implemented."""
    wrong = {k: fields[k] for k, v in values.items() if fields.get(k, v) != v}
    if wrong:
        raise ValueError(f"config.json: not implemented: {wrong}; only {dict(values)}")


def dtypes(fields: Mapping[str, Any]) -> dict[str, str]:
    """The three dtypes of a configuration."""
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype {dtype!r} must be one of {DTYPES}")
    return dict.fromkeys(("param_dtype", "dtype", "cache_dtype"), dtype)


def schedule(
    fields: Mapping[str, Any], known: Mapping[str, str], default: Iterable[str]
) -> tuple[str, ...]:
    """Our layer types for `layer_types`; known: ours by theirs. default: without the field."""
    types = fields.get("layer_types") or list(default)
    count = fields["num_hidden_layers"]
    unknown = sorted(set(types) - set(known))
    if unknown or len(types) != count:
        raise ValueError(
            f"config.json: layer_types needs {count} of {list(known)}, got {len(types)} with "
            f"unknown {unknown}"
        )
    return tuple(known[kind] for kind in types)


def mlp_types(fields: Mapping[str, Any], known: Mapping[str, str], dense: int) -> tuple[str, ...]:
    """Our MLP types for `mlp_layer_types`; dense: so many at the start, without the field."""
    count = fields["num_hidden_layers"]
    types = fields.get("mlp_layer_types") or [
        "dense" if i < dense else "sparse" for i in range(count)
    ]
    if len(types) != count or set(types) - set(known):
        raise ValueError(
            f"config.json: mlp_layer_types needs {count} of {list(known)}, got {types}"
        )
    return tuple(known[kind] for kind in types)


def used(table: Mapping[str, Any], types: Iterable[str]) -> dict[str, Any]:
    """What is declared of the types that some layer is."""
    return {kind: own for kind, own in table.items() if kind in types}


def unlike(config: DecoderConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ours that are not as a family has them in every configuration."""
    return {k: getattr(config, k) for k, v in values.items() if getattr(config, k) != v}


def refuse(wrong: Mapping[str, Any], family: str) -> None:
    """Raises ValueError naming the fields of ours that a family has no place for, if any."""
    if wrong:
        text = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(f"{family} has no place for {text}; save it as a checkpoint instead")
