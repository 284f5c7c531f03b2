"""Models that see as well as read: the text model of their directories, read only.

What the vision tower is made of is left out, and so are its tensors.
"""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf.family import Family

NONE: Mapping[str, Any] = {}


def text_of(
    text: Family,
    model_type: str,
    instead: str,
    towers: tuple[str, ...],
    usual: Mapping[str, Any] = NONE,
) -> Family:
    """The family of directories whose `text_config` and tensors have a model of family `text`.

    instead: the `model_type` under which such a model is written. towers: how names of the other
    tensors begin. usual: what a `text_config` may leave out.
    """

    def parse(fields: Mapping[str, Any]) -> DecoderConfig:
        if not isinstance(fields.get("text_config"), Mapping):
            raise ValueError(f"config.json lacks text_config; {model_type} directories have one")
        names = ("dtype", "torch_dtype", "quantization_config")
        outer = {name: fields[name] for name in names if name in fields}
        return text.parse({**usual, **outer, **fields["text_config"]})

    def write(config: DecoderConfig) -> dict[str, Any]:
        raise ValueError(
            f"{model_type} has no place for a model without a vision tower; use {instead}"
        )

    def canonical(name: str) -> str:
        """Names of the text model alone, from either of the two spellings of the whole."""
        name = name.replace("language_model.model.", "model.", 1)
        name = name.replace("language_model.lm_head.", "lm_head.", 1)
        return text.canonical(name.replace("model.language_model.", "model.", 1))

    def left_out(config: DecoderConfig, name: str) -> bool:
        """Also the head that a tied model has twice."""
        twice = config.tie_embeddings and name == "lm_head.weight"
        return (
            twice or name.removeprefix("model.").startswith(towers) or text.left_out(config, name)
        )

    return Family(parse, write, text.layouts, canonical, left_out)
