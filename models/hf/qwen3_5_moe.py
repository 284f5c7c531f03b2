"""Qwen3.5 directories with experts and a vision tower, as they are released."""

from models.hf import qwen3_5_moe_text
from models.hf.qwen3_5 import TOWERS
from models.hf.vision import text_of

FAMILY = text_of(qwen3_5_moe_text.FAMILY, "qwen3_5_moe", "qwen3_5_moe_text", TOWERS)
