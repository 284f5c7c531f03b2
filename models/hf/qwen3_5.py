"""Qwen3.5 directories with a vision tower, as they are released."""

from models.hf import qwen3_5_text
from models.hf.vision import text_of

TOWERS = ("visual.",)
FAMILY = text_of(qwen3_5_text.FAMILY, "qwen3_5", "qwen3_5_text", TOWERS)
