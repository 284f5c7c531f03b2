"""Rope parameters of a `config.json` as the `rope` of a layer type."""

import math
from collections.abc import Mapping
from typing import Any

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}


def mscale(factor: float, weight: float) -> float:
    """`0.1 weight ln(factor) + 1`, the attention temperature of YaRN (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def mscale_weight(value: float, factor: float) -> float:
    """The weight for which `mscale` has this value; ValueError where no weight gives it."""
    if factor <= 1:
        raise ValueError(f"no mscale of factor {factor} is {value}: only 1.0")
    return round((value - 1.0) / (0.1 * math.log(factor)), 9)  # as a person would write it


def rope(parameters: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Base, stretch or YaRN. theta: the base where the parameters have none."""
    unknown = sorted(set(parameters) - KNOWN)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if unknown or kind not in ("default", "linear", "yarn"):
        raise ValueError(
            f"config.json: rope parameters {unknown or kind} are not implemented; rope types are "
            "'default', 'linear' and 'yarn'"
        )
    made: dict[str, Any] = {"theta": float(parameters.get("rope_theta") or theta)}
    if kind == "default":
        return made
    if parameters.get("factor") is None:
        raise ValueError(f"config.json: rope type {kind!r} lacks a factor")
    factor = float(parameters["factor"])
    if kind == "linear":
        return made | {"stretch": factor}
    original = parameters.get("original_max_position_embeddings")
    if original is None:
        raise ValueError("config.json: YaRN lacks original_max_position_embeddings")
    return made | {
        "yarn": {
            "factor": factor,
            "original_max": int(original),
            **{name: float(parameters.get(name) or value) for name, value in BETAS.items()},
            "truncate": bool(parameters.get("truncate", True)),
            "temperature": _temperature(parameters, factor),
        }
    }


def _temperature(parameters: Mapping[str, Any], factor: float) -> float:
    """The factor of cos and sin: given, or a ratio of two mscales, or that of the paper."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if over and under:
        return mscale(factor, over) / mscale(factor, under)
    return mscale(factor, 1.0)


def parameters(made: Mapping[str, Any]) -> dict[str, Any]:
    """Back to a `config.json`."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": made["theta"]}
    if made.get("stretch", 1.0) != 1.0:
        found |= {"rope_type": "linear", "factor": made["stretch"]}
    if made.get("yarn"):
        yarn = made["yarn"]
        found |= {
            "rope_type": "yarn",
            "factor": yarn["factor"],
            "original_max_position_embeddings": yarn["original_max"],
            "beta_fast": yarn["beta_fast"],
            "beta_slow": yarn["beta_slow"],
            "truncate": yarn["truncate"],
            "attention_factor": yarn["temperature"],
        }
    return found
