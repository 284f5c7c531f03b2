"""Rotary positions on interleaved pairs of the last channels, with YaRN scaling.

`y[2i] = x[2i] cos - x[2i+1] sin`, `y[2i+1] = x[2i+1] cos + x[2i] sin`, angle `position * w_i`
(RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071, without its attention temperature).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Yarn(NamedTuple):
    """YaRN: interpolate slow frequencies by `factor`, keep fast ones, ramp in between."""

    factor: float
    original_max: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True)
class Rope:
    """A frequency table: `dim` rotated channels (even), base `theta`, optional YaRN."""

    dim: int
    theta: float
    yarn: Yarn | None = None

    def __post_init__(self):
        if self.dim % 2 or self.dim < 0:
            raise ValueError(f"rope dim must be even and >= 0, got {self.dim}")

    def frequencies(self) -> np.ndarray:
        """f32[dim / 2]."""
        half = self.dim // 2
        base = self.theta ** (-2.0 * np.arange(half) / max(self.dim, 1))
        if self.yarn is None:
            return base.astype(np.float32)

        def correction(rotations: float) -> float:
            wavelength = self.yarn.original_max / (rotations * 2 * math.pi)
            return self.dim * math.log(wavelength) / (2 * math.log(self.theta))

        low = max(math.floor(correction(self.yarn.beta_fast)), 0)
        high = min(math.ceil(correction(self.yarn.beta_slow)), self.dim - 1)
        span = (high - low) if high != low else 1e-3
        ramp = np.clip((np.arange(half) - low) / span, 0, 1)
        return (base * (1 - ramp) + base / self.yarn.factor * ramp).astype(np.float32)


class Table(NamedTuple):
    """cos and signed sin per channel, each f32[..., dim], repeated over the two of a pair."""

    cos: jax.Array
    sin: jax.Array


def table(rope: Rope, positions: jax.Array, dtype: jnp.dtype = jnp.float32) -> Table:
    """Rotation table at i32[...] positions; rounded to `dtype` (models in bf16 do so)."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.frequencies())
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cos = jnp.stack([cos, cos], axis=-1).reshape(*angles.shape[:-1], rope.dim)
    sin = jnp.stack([-sin, sin], axis=-1).reshape(*angles.shape[:-1], rope.dim)
    return Table(cos.astype(dtype).astype(jnp.float32), sin.astype(dtype).astype(jnp.float32))


def rotate(x: jax.Array, turn: Table, inverse: bool = False) -> jax.Array:
    """Rotates the last `dim` channels of x [..., c]; `turn` broadcasts against x's lead axes."""
    dim = turn.cos.shape[-1]
    if dim == 0:
        return x
    rest, tail = x[..., : x.shape[-1] - dim], x[..., x.shape[-1] - dim :].astype(jnp.float32)
    swapped = tail.reshape(*tail.shape[:-1], dim // 2, 2)[..., ::-1].reshape(tail.shape)
    sin = -turn.sin if inverse else turn.sin
    turned = (tail * turn.cos + swapped * sin).astype(x.dtype)
    return jnp.concatenate([rest, turned], axis=-1) if rest.shape[-1] else turned
