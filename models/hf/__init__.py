"""Models in Hugging Face directories: one converter per family, chosen by `model_type`."""

import json
import pathlib
from typing import Any

from hetero_kv.params import Params
from models.decoder import Decoder
from models.hf import deepseek_v4

FAMILIES = {"deepseek_v4": deepseek_v4}


def from_pretrained(directory: str | pathlib.Path, **changes: Any) -> tuple[Decoder, Params]:
    """The model of a directory with `config.json` and safetensors, and its weights.

    `changes` are fields of `DecoderConfig` to set, such as `dtype="bfloat16"` or `chunk=128`.
    Raises ValueError naming every field or tensor that does not fit.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a directory with config.json")
    fields = json.loads(path.read_text())
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not one of {sorted(FAMILIES)}")
    return FAMILIES[family].load(directory, fields, **changes)


def save_pretrained(model: Decoder, params: Params, directory: str | pathlib.Path) -> None:
    """Write a directory that Hugging Face and `from_pretrained` read.

    Raises ValueError naming every part of the model that the family has no place for.
    """
    deepseek_v4.save(model, params, directory)
