"""Gemma 3 directories with a vision tower: the text model of them, read only.

Their `text_config` leaves out what has the usual value. Tensors of the vision tower and its
projector are left out: this model reads text.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import gemma3_text
from models.hf.family import Family

USUAL = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
VISION = ("vision_tower.", "multi_modal_projector.")


def parse(fields: Mapping[str, Any]) -> DecoderConfig:
    """The text model's configuration."""
    if not isinstance(fields.get("text_config"), Mapping):
        raise ValueError("config.json lacks text_config; gemma3 directories have one")
    outer = {name: fields[name] for name in ("dtype", "torch_dtype") if name in fields}
    return gemma3_text.parse({**USUAL, **outer, **fields["text_config"]})


def write(config: DecoderConfig) -> dict[str, Any]:
    """Nothing: there is no vision tower to write."""
    raise ValueError("gemma3 has no place for a model without a vision tower; use gemma3_text")


def canonical(name: str) -> str:
    """Names of the text model alone, from either of the two spellings of the whole."""
    name = name.replace("language_model.model.", "model.", 1)
    name = name.replace("language_model.lm_head.", "lm_head.", 1)
    return name.replace("model.language_model.", "model.", 1)


def left_out(config: DecoderConfig, name: str) -> bool:
    """Whether the tensor is of the vision tower, or the head that a tied model has twice."""
    short = name.removeprefix("model.")
    return short.startswith(VISION) or (config.tie_embeddings and name == "lm_head.weight")


FAMILY = Family(parse, write, gemma3_text.layouts, canonical, left_out)
