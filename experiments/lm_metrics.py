"""Measures of byte models: bits per byte by position, and what a general compressor needs."""

import itertools
import lzma
import math
from collections.abc import Iterable, Sequence

import numpy as np

PRESET = 6  # of `xz -6`


def buckets(edges: Sequence[int], length: int) -> list[tuple[str, slice]]:
    """Names and positions of the stretches 0 .. edge, edge .. edge, …, edge .. length."""
    ends = [0, *edges, length]
    return [(f"{a}-{b - 1}", slice(a, b)) for a, b in itertools.pairwise(ends)]


def bits_by_bucket(
    nats: np.ndarray, edges: Sequence[int], weights: np.ndarray | None = None
) -> dict[str, float]:
    """Bits a byte of f32[B, T] losses, in all ("all") and by stretch of positions."""
    weights = np.ones_like(nats) if weights is None else weights
    bits = nats / math.log(2)
    found = {"all": float((bits * weights).sum() / weights.sum())}
    for name, part in buckets(edges, nats.shape[1]):
        found[name] = float((bits * weights)[:, part].sum() / weights[:, part].sum())
    return found


def xz_stream(text: bytes) -> float:
    """Bits a byte of `xz -6` of the whole text as one stream, headers included."""
    return 8 * len(lzma.compress(text, preset=PRESET)) / len(text)


def xz_windows(windows: Iterable[bytes]) -> float:
    """Bits a byte where every window is compressed by itself, as bare data without headers.

    A compressor with the context that a model of such windows has.
    """
    filters = [{"id": lzma.FILTER_LZMA2, "preset": PRESET}]
    sizes = [
        (len(lzma.compress(window, format=lzma.FORMAT_RAW, filters=filters)), len(window))
        for window in windows
    ]
    packed, plain = map(sum, zip(*sizes, strict=True))
    return 8 * packed / plain


def line_at(x: float, left: tuple[float, float], right: tuple[float, float]) -> float:
    """The value at x of the straight line through two points."""
    (x0, y0), (x1, y1) = left, right
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
