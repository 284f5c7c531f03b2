"""Entries of a compressor where groups close: pooled, normed, rotated and stored in their pool."""
