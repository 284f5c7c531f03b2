"""Matrices of small numbers with one scale per block, as checkpoints hold them.

A tensor is [..., rows, columns], rows of a product's output and columns of its input. Published
layouts: e4m3 with a scale per 128 x 128 (DeepSeek-V3 and later: float32, or e8m0 where `scale_fmt`
is "ue8m0"), e2m1 with an e8m0 scale per 32 columns (MXFP4: gpt-oss, the experts of DeepSeek-V4).
Blocks at the last rows and columns may be smaller.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from models.quantised import codes as fmt

ELEMENTS = ("e4m3", "e2m1")
SCALES = ("float32", "e8m0")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A layout: element format, rows and columns of a block, format of its scale."""

    element: str
    block: tuple[int, int]
    scale: str

    def __post_init__(self):
        if self.element not in ELEMENTS or self.scale not in SCALES or min(self.block) < 1:
            raise ValueError(f"{self}: element is one of {ELEMENTS}, scale one of {SCALES}")

    @property
    def name(self) -> str:
        """In tables."""
        rows, columns = self.block
        return f"{self.element} / {self.scale} per {rows} x {columns}"

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the codes u8 of a tensor of `shape`. Raises ValueError for an odd e2m1 row."""
        if self.element == "e4m3":
            return shape
        if shape[-1] % 2:
            raise ValueError(f"{list(shape)}: two e2m1 codes share a byte; columns must be even")
        return (*shape[:-1], shape[-1] // 2)

    def shape_of(self, code_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor whose codes have this shape."""
        return (*code_shape[:-1], code_shape[-1] * (2 if self.element == "e2m1" else 1))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a tensor of `shape`."""
        counts = (math.ceil(n / b) for n, b in zip(shape[-2:], self.block, strict=True))
        return (*shape[:-2], *counts)

    @property
    def scale_dtype(self) -> np.dtype:
        """Of the scales in memory; e8m0 codes are bytes."""
        return np.dtype(np.uint8 if self.scale == "e8m0" else np.float32)

    # -- on the host -------------------------------------------------------------------------------

    def rows(self, codes: np.ndarray, scales: np.ndarray, first: int = 0) -> np.ndarray:
        """Rows f32[n, columns] of one matrix.

        Args:
            codes: u8, of these rows.
            scales: of the whole matrix.
            first: number of the first row.
        """
        values = (fmt.from_e4m3 if self.element == "e4m3" else fmt.from_e2m1)(codes)
        count, columns = values.shape
        own = scales[(first + np.arange(count)) // self.block[0]]
        own = np.repeat(own, self.block[1], axis=1)[:, :columns]
        if self.scale == "e8m0":
            return fmt.times_e8m0(values, own)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values * own

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """A whole tensor f32[..., rows, columns]."""
        shape = self.shape_of(codes.shape)
        flat = codes.reshape(-1, *codes.shape[-2:]), scales.reshape(-1, *scales.shape[-2:])
        return np.stack([self.rows(*x) for x in zip(*flat, strict=True)]).reshape(shape)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of f32[..., rows, columns], every value to the nearest code.

        Scales: float32: the block's largest magnitude becomes the largest element. e8m0: the least
        power of two with which e4m3 does not saturate; for e2m1 that of the microscaling formats,
        section 6.3, `2^(floor(log2(largest)) - 2)`: magnitudes above 6 scales become 6 of them.
        A block of zeros has the scale 1. Raises ValueError for what is not finite.
        """
        values = np.asarray(values, np.float32)
        if not np.isfinite(values).all():
            raise ValueError("only finite values can be quantised")
        *lead, rows, columns = values.shape
        (br, bc), counts = self.block, self.scale_shape(values.shape)[-2:]
        room = [(0, 0)] * len(lead) + [(0, -rows % br), (0, -columns % bc)]
        tiles = np.pad(np.abs(values), room).reshape(*lead, counts[0], br, counts[1], bc)
        largest = tiles.max(axis=(-3, -1)).astype(np.float64)
        if self.scale == "float32":
            most = fmt.E4M3_MAX if self.element == "e4m3" else fmt.E2M1_MAX
            tiny = np.finfo(np.float32).tiny
            scales = np.where(largest > 0, np.maximum(largest / most, tiny), 1).astype(np.float32)
            scaled = values / self._spread(scales, rows, columns)
        else:
            exponent = np.where(largest > 0, self._exponent(largest), 0)
            scales = (np.clip(exponent, -127, 127) + fmt.E8M0_BIAS).astype(np.uint8)
            own = self._spread(scales, rows, columns).astype(np.int32) - fmt.E8M0_BIAS
            scaled = np.ldexp(values.astype(np.float64), -own).astype(np.float32)
        return (fmt.to_e4m3 if self.element == "e4m3" else fmt.to_e2m1)(scaled), scales

    def _spread(self, scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
        tall = np.repeat(scales, self.block[0], axis=-2)[..., :rows, :]
        return np.repeat(tall, self.block[1], axis=-1)[..., :columns]

    def _exponent(self, largest: np.ndarray) -> np.ndarray:
        if self.element == "e2m1":
            return np.frexp(largest)[1] - 3  # frexp has its mantissa in [0.5, 1)
        mantissa, exponent = np.frexp(largest / fmt.E4M3_MAX)
        return exponent - (mantissa == 0.5)

    # -- in compiled code --------------------------------------------------------------------------

    def dequantise(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """As `decode`, except that backends which flush subnormal numbers flush such results."""
        values = (fmt.decode_e4m3 if self.element == "e4m3" else fmt.decode_e2m1)(codes)
        rows, columns = values.shape[-2:]
        own = jnp.repeat(scales, self.block[0], axis=-2)[..., :rows, :]
        own = jnp.repeat(own, self.block[1], axis=-1)[..., :columns]
        return fmt.scale_e8m0(values, own) if self.scale == "e8m0" else values * own


FP8 = Blocks("e4m3", (128, 128), "float32")
FP8_POWERS = Blocks("e4m3", (128, 128), "e8m0")
FP4 = Blocks("e2m1", (1, 32), "e8m0")
