"""Reference decoder in plain numpy float64, written from the equations and from nothing else.

One file per mechanism. Whole sequences only, no cache, no jax: it shares no code with what it
checks.
Notation: T tokens, d width, H heads, c head size, r rotated channels, m compression ratio,
n = T // m entries, N streams of the residual.
"""
