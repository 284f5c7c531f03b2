"""Curves through times by hit: how much of computing grows with the square, and where it pays.

With u = n - L tokens to compute of a prompt of n, the model is T(L) = c + a (n - L) + b (n^2 -
L^2) / 2: what a request costs anyway, what each token does, and what each pair of tokens does.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Fit:
    """c, a, b of a curve for prompts of `prompt` tokens; all but c are >= 0."""

    prompt: int
    fixed: float
    per_token: float
    per_pair: float

    def __call__(self, length: float) -> float:
        """At so many resumed tokens."""
        n = self.prompt
        pairs = (n * n - length * length) / 2
        return self.fixed + self.per_token * (n - length) + self.per_pair * pairs

    @property
    def bend(self) -> float:
        """Share of computing the whole prompt that grows with the square: 0 a line, 1 a parabola.

        The curve of times over hits bends downward by it: what a hit saves is convex in the hit.
        """
        pairs = self.per_pair * self.prompt**2 / 2
        return pairs / max(pairs + self.per_token * self.prompt, 1e-30)


def fit(prompt: int, lengths: Sequence[int], values: Sequence[float]) -> Fit | None:
    """Least squares of relative errors; None for fewer than three lengths.

    Noise can ask for a negative slope: then that term is left out.
    """
    if len(set(lengths)) < 3:
        return None
    length, value = np.asarray(lengths, float), np.asarray(values, float)
    columns = np.stack([np.ones_like(length), prompt - length, (prompt**2 - length**2) / 2], axis=1)
    best: tuple[float, Fit] | None = None
    for keep in ((0, 1, 2), (0, 1), (0, 2)):
        part, weight = columns[:, keep], 1 / value
        found, *_ = np.linalg.lstsq(part * weight[:, None], value * weight, rcond=None)
        full = np.zeros(3)
        full[list(keep)] = found
        if full[1] < 0 or full[2] < 0:
            continue
        error = float(np.sum(((columns @ full - value) * weight) ** 2))
        if best is None or error < best[0] * (1 - 1e-9):
            best = error, Fit(prompt, *(float(x) for x in full))
    return best[1] if best else None


def break_even(
    lengths: Sequence[int],
    values: Sequence[float],
    cold: float,
    curve: Callable[[float], float] | None = None,
) -> float | None:
    """From how many resumed tokens on resuming takes no longer than `cold`; None: never.

    By straight lines between the lengths that were timed, all > 0. Where the shortest pays already,
    `curve` (seconds by length, a fit), or else the line through the two shortest, is carried on
    towards 0.
    """
    pairs = sorted({length: value for length, value in zip(lengths, values, strict=True)}.items())
    pairs = [(x, y) for x, y in pairs if x > 0]
    if not pairs:
        return None
    above = [i for i, (_, y) in enumerate(pairs) if y > cold]
    if len(above) == len(pairs):
        return None
    if not above:
        if curve is not None:
            return _falls_to(curve, cold, float(pairs[0][0]))
        if len(pairs) < 2:
            return float(pairs[0][0])
        (x0, y0), (x1, y1) = pairs[:2]
        slope = (y1 - y0) / (x1 - x0)
        return 0.0 if slope >= 0 else max(0.0, x0 + (cold - y0) / slope)
    last = above[-1]
    if last == len(pairs) - 1:
        return None
    (x0, y0), (x1, y1) = pairs[last], pairs[last + 1]
    return x0 + (y0 - cold) / (y0 - y1) * (x1 - x0)


def _falls_to(curve: Callable[[float], float], value: float, most: float) -> float:
    """Where a falling curve comes down to a value, between 0 and `most`."""
    low, high = 0.0, most
    if curve(low) <= value:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if curve(middle) <= value else (middle, high)
    return high


def median(samples: Sequence[float]) -> float:
    """The middle sample."""
    return statistics.median(samples)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The quarter and the three-quarter sample."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return ordered[quarter], ordered[-1 - quarter]


def largest_rise(values: Sequence[float]) -> float:
    """How much a value is above the least one before it, at most; 0 where they never rise."""
    least, worst = values[0], 0.0
    for value in values:
        worst = max(worst, value - least)
        least = min(least, value)
    return worst
