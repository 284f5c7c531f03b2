"""Decode attention of hybrid layers: one query a sequence over a window and compressed entries."""
