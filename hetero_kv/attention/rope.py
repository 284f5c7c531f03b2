"""Rotary positions on the last channels, pairs interleaved or in halves, with YaRN scaling.

`y[2i] = x[2i] cos - x[2i+1] sin`, `y[2i+1] = x[2i+1] cos + x[2i] sin`, angle `position * w_i`
(RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071). In halves, channel i pairs with i + dim / 2.
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
    truncate: bool = True  # the ramp begins and ends at whole channels
    temperature: float = 1.0  # factor of cos and sin

    def check(self, where: str = "yarn ") -> None:
        """Raises ValueError, with `where` before the field, for values that make no frequencies."""
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"{where}factor={self.factor!r} must be >= 1 and finite")
        if not 1 <= self.original_max < math.inf:
            raise ValueError(f"{where}original_max={self.original_max!r} must be >= 1 (tokens)")
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                f"{where}beta_slow={self.beta_slow!r} and {where}beta_fast={self.beta_fast!r} must "
                "be finite and > 0, the fast one not below the slow one"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"{where}temperature={self.temperature!r} must be > 0 and finite")


@dataclasses.dataclass(frozen=True)
class Rope:
    """A frequency table: `dim` rotated channels (even; 0: no positions), base `theta`.

    stretch: positions are divided by it. halves: channel i pairs with i + dim / 2, not its
    neighbour.
    """

    dim: int
    theta: float
    yarn: Yarn | None = None
    stretch: float = 1.0
    halves: bool = False

    def __post_init__(self):
        if self.dim % 2 or self.dim < 0:
            raise ValueError(f"rope dim must be even and >= 0, got {self.dim}")
        for name in ("theta", "stretch"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope {name} must be > 0, got {getattr(self, name)!r}")
        if self.yarn is not None:
            self.yarn.check("rope yarn ")
            if not self.theta > 1:
                raise ValueError(f"rope theta must be > 1 with YaRN, got {self.theta!r}")

    def frequencies(self) -> np.ndarray:
        """f32[dim / 2]."""
        half = self.dim // 2
        base = self.theta ** (-2.0 * np.arange(half) / max(self.dim, 1))
        if self.yarn is None:
            return (base / self.stretch).astype(np.float32)

        def correction(rotations: float) -> float:
            wavelength = self.yarn.original_max / (rotations * 2 * math.pi)
            return self.dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = correction(self.yarn.beta_fast), correction(self.yarn.beta_slow)
        if self.yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = (high - low) if high != low else 1e-3
        ramp = np.clip((np.arange(half) - low) / span, 0, 1)
        return (base * (1 - ramp) + base / self.yarn.factor * ramp).astype(np.float32)


class Table(NamedTuple):
    """cos and signed sin per channel, each f32[..., dim]: the two of a pair have one angle."""

    cos: jax.Array
    sin: jax.Array


def table(rope: Rope, positions: jax.Array, dtype: jnp.dtype = jnp.float32) -> Table:
    """Rotation table at i32[...] positions; rounded to `dtype` (models in bf16 do so)."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.frequencies())
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.yarn is not None and rope.yarn.temperature != 1.0:
        cos, sin = cos * rope.yarn.temperature, sin * rope.yarn.temperature
    axis = -2 if rope.halves else -1
    cos = jnp.stack([cos, cos], axis).reshape(*angles.shape[:-1], rope.dim)
    sin = jnp.stack([-sin, sin], axis).reshape(*angles.shape[:-1], rope.dim)
    return Table(cos.astype(dtype).astype(jnp.float32), sin.astype(dtype).astype(jnp.float32))


def rotate(x: jax.Array, turn: Table, inverse: bool = False, halves: bool = False) -> jax.Array:
    """Rotates the last `dim` channels of x [..., c]; `turn` broadcasts against x's lead axes.

    halves: as the rope that `turn` was made for.
    """
    dim = turn.cos.shape[-1]
    if dim == 0:
        return x
    rest, tail = x[..., : x.shape[-1] - dim], x[..., x.shape[-1] - dim :].astype(jnp.float32)
    if halves:
        swapped = jnp.concatenate([tail[..., dim // 2 :], tail[..., : dim // 2]], axis=-1)
    else:
        swapped = tail.reshape(*tail.shape[:-1], dim // 2, 2)[..., ::-1].reshape(tail.shape)
    sin = -turn.sin if inverse else turn.sin
    turned = (tail * turn.cos + swapped * sin).astype(x.dtype)
    return jnp.concatenate([rest, turned], axis=-1) if rest.shape[-1] else turned
