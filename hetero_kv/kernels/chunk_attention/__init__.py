"""Attention of a prefill call: queries of a chunk over their windows and the entries they see."""
