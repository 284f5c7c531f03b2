"""The formats by their definitions, one number at a time, in Python's own floats."""

import math

import numpy as np


def e4m3(code: int) -> float:
    """OCP 8-bit floating point E4M3."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """OCP microscaling FP4, code 0..15."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def e8m0(code: int) -> float:
    """OCP microscaling scale."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def nearest(value: float, table: list[float]) -> int:
    """The code of `table` (by code, magnitudes ascending) nearest to a magnitude; ties to even."""
    best = min(range(len(table)), key=lambda code: (abs(table[code] - value), code % 2))
    return best


def single(value: float) -> np.float32:
    """One rounding to float32; beyond its range an infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(value)


def decode(codes: np.ndarray, scales: np.ndarray, element: str, block: tuple[int, int]):
    """f32[rows, columns] of one matrix, element by element; u8 scales are e8m0."""
    rows, columns = codes.shape[0], codes.shape[1] * (2 if element == "e2m1" else 1)
    out = np.empty((rows, columns), np.float32)
    for r in range(rows):
        for c in range(columns):
            scale = scales[r // block[0], c // block[1]]
            if element == "e4m3":
                value = e4m3(int(codes[r, c]))
            else:
                value = e2m1(int(codes[r, c // 2]) >> (4 if c % 2 else 0) & 15)
            if scales.dtype == np.uint8:
                out[r, c] = single(value * e8m0(int(scale)))
            else:
                with np.errstate(all="ignore"):
                    out[r, c] = np.float32(value) * scale
    return out


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal shapes and bits; any NaN is one NaN."""
    left, right = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (left, right))
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def same_but_subnormal(left: np.ndarray, right: np.ndarray) -> bool:
    """As `same_bits`, with subnormal numbers counted as zeros of their sign."""

    def flush(x: np.ndarray) -> np.ndarray:
        small = np.abs(x) < np.finfo(np.float32).tiny
        return np.where(small, np.copysign(np.float32(0), x), x)

    return same_bits(flush(np.asarray(left)), flush(np.asarray(right)))
