"""Attention mechanisms that only ablations have: weights of another one, with something changed."""
