"""Hybrid decoders: `build(config)` for a new one, `from_pretrained(directory)` for a stored one."""

from models.config import DecoderConfig
from models.decoder import Decoder
from models.hf import from_pretrained, plan_pretrained, save_pretrained
from models.sampling import Sampler

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Sampler",
    "build",
    "from_pretrained",
    "plan_pretrained",
    "save_pretrained",
]


def build(config: DecoderConfig) -> Decoder:
    """The model that a config describes; raises ValueError where the config makes no sense."""
    return Decoder(config)
