"""Gemma 3 directories with a vision tower; their `text_config` leaves out what is usual."""

from models.hf import gemma3_text
from models.hf.vision import text_of

USUAL = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
TOWERS = ("vision_tower.", "multi_modal_projector.")
FAMILY = text_of(gemma3_text.FAMILY, "gemma3", "gemma3_text", TOWERS, USUAL)
