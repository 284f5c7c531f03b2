"""Interleaved rotary positions on the trailing channels, plain and YaRN."""

import math
from typing import Any

import numpy as np

from tests.oracle.maths import Array


def plain_frequencies(rope_dim: int, theta: float) -> Array:
    """`ω_i = θ^(-2i/r)`, i < r/2; float64[r/2]."""
    return theta ** (-2.0 * np.arange(rope_dim // 2) / rope_dim) if rope_dim else np.zeros(0)


def yarn_frequencies(rope_dim: int, theta: float, yarn: Any) -> Array:
    """Frequencies blended between `ω` (fast channels) and `ω/factor` (slow ones); float64[r/2].

    The blend is a ramp between the channels that turn `beta_fast` and `beta_slow` times over
    `original_max` positions. Cosine and sine are not scaled (no mscale).
    """
    omega = plain_frequencies(rope_dim, theta)

    def channel(rotations: float) -> float:
        turns = yarn.original_max / (2 * math.pi * rotations)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), rope_dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(rope_dim // 2) - low) / width, 0.0, 1.0)
    return omega * (1.0 - ramp) + omega / yarn.factor * ramp


def frequencies(config: Any, layer_type: str) -> Array:
    """Frequencies that a layer's queries, rows, entries and index keys share; float64[r/2]."""
    if layer_type in ("csa", "hca"):
        if config.yarn is not None:
            return yarn_frequencies(config.rope_dim, config.compress_rope_theta, config.yarn)
        return plain_frequencies(config.rope_dim, config.compress_rope_theta)
    return plain_frequencies(config.rope_dim, config.rope_theta)


def rotate(x: Array, positions: Array, omega: Array) -> Array:
    """Rotate pairs (0,1), (2,3), … of the last r channels of x by `position · ω_i`.

    x is [T, ..., c] and positions [T]; negative positions undo the rotation.
    """
    rope_dim = 2 * omega.size
    if rope_dim == 0:
        return x
    angle = np.multiply.outer(np.asarray(positions, np.float64), omega)
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), omega.size)
    even, odd = x[..., -rope_dim::2], x[..., x.shape[-1] - rope_dim + 1 :: 2]
    out = x.copy()
    out[..., -rope_dim::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., x.shape[-1] - rope_dim + 1 :: 2] = even * np.sin(angle) + odd * np.cos(angle)
    return out
