"""Models in Hugging Face directories: one converter per family, chosen by `model_type`.

The converter of a family is the module of this package that has its `model_type` as name: a new
one is a new file with a `FAMILY`.
"""

import importlib
import json
import pathlib
import pkgutil
from typing import Any

from hetero_kv.params import Params
from models.decoder import Decoder
from models.hf.family import Family
from models.hf.loading import Plan, Report


def families() -> list[str]:
    """Every `model_type` that has a converter."""
    found = [info.name for info in pkgutil.iter_modules(__path__)]
    return sorted(name for name in found if hasattr(_module(name), "FAMILY"))


def family(model_type: str) -> Family:
    """The converter of a `model_type`; ValueError where there is none."""
    if model_type not in families():
        raise ValueError(f"model_type {model_type!r} is not one of {families()}")
    return _module(model_type).FAMILY


def _module(name: str) -> Any:
    return importlib.import_module(f"models.hf.{name}")


def _fields(directory: str | pathlib.Path) -> tuple[dict[str, Any], Family]:
    """The `config.json` of a directory, and the family that reads it."""
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a directory with config.json")
    try:
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError(f"an object with model_type and sizes is needed, not {fields!r:.40}")
        return fields, family(fields.get("model_type"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_type(directory: str | pathlib.Path) -> str:
    """The family of a directory."""
    return _fields(directory)[0]["model_type"]


def from_pretrained(
    directory: str | pathlib.Path,
    *,
    keep_quantised: bool = False,
    progress: Report | None = None,
    **changes: Any,
) -> tuple[Decoder, Params]:
    """The model of a directory with `config.json` and safetensors, and its weights.

    Block-scaled FP8 and FP4 weights (see `models.hf.stored`) become `param_dtype`; with
    `keep_quantised` those of layers stay as they are in the files and are dequantised in the
    compiled calls, one layer at a time, to the same values. progress: called after every tensor.
    `changes` are fields of `DecoderConfig` to set, such as `param_dtype="bfloat16"` or `chunk=128`.
    Raises ValueError naming every field or tensor that does not fit.
    """
    fields, found = _fields(directory)
    return found.load(directory, fields, keep_quantised, progress, **changes)


def plan_pretrained(
    directory: str | pathlib.Path, *, keep_quantised: bool = False, **changes: Any
) -> Plan:
    """What `from_pretrained` would do: sizes, dtypes, missing and extra tensors, other problems.

    Of the weights only headers are read; see `models.hf.dry_run` for tables of it.
    """
    fields, found = _fields(directory)
    return found.plan(directory, fields, keep_quantised, **changes)


def save_pretrained(
    model: Decoder,
    params: Params,
    directory: str | pathlib.Path,
    model_type: str = "deepseek_v4",
) -> None:
    """Write a directory that Hugging Face and `from_pretrained` read.

    Raises ValueError naming every part of the model that the family has no place for.
    """
    family(model_type).save(model, params, directory)
