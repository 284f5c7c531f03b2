"""Hybrid decoders: `build(config)` for a new one, `from_pretrained(directory)` for a stored one."""

from models.config import DecoderConfig
from models.decoder import Decoder
from models.sampling import Sampler


def build(config: DecoderConfig) -> Decoder:
    """The model that a config describes; raises ValueError where the config makes no sense."""
    return Decoder(config)
