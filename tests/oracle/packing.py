"""Rows of a cache that are stored quantised: their bytes, and what is read of them.

Written from the tables of the formats (OCP 8-bit floating point, OCP microscaling), value by value.
"""

from typing import Any

import ml_dtypes
import numpy as np

from tests.oracle.maths import Array
from tests.oracle.trace import LayerTrace

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
GROUPS = {"fp8_rope": 64, "fp8_f32": 128, "fp4": 32, "int8": 1 << 30}  # values per scale
ALIGN = {"fp8_rope": 8, "fp8_f32": 4, "fp4": 4, "int8": 4}  # bytes that rows are multiples of
LOWEST, MOST = 2.0**-117, 2.0**127  # the smallest scale, and what is no number any more
SURE = 5e-7  # relative error of what is stored: a value nearer to a border may get either code


def nearest(table: Array, values: Array) -> Array:
    """Codes of the nearest magnitudes, ties to the even code; the sign is the top bit."""
    half = len(table) // 2
    sizes = table[:half][np.isfinite(table[:half])]
    borders = (sizes[1:] + sizes[:-1]) / 2
    low = np.searchsorted(borders, np.abs(values), "left")
    high = np.searchsorted(borders, np.abs(values), "right")
    code = np.where(low % 2 == 0, low, high)
    return np.where((values < 0) & (code > 0), code + half, code)


def rounded(value: float, digits: int) -> float:
    """To `digits` significant bits, ties to even."""
    if not np.isfinite(value):
        return value
    part, power = np.frexp(np.float64(value))
    return float(np.ldexp(np.rint(np.ldexp(part, digits)), int(power) - digits))


def group_codes(kind: str, group: Array) -> tuple[Array, float]:
    """Codes of a group of values and their scale, NaN where the group is not finite."""
    top = float(np.abs(group).max())
    nothing = np.full(group.size, 15 if kind == "fp4" else 255), np.nan
    if kind == "int8":
        scale = rounded(float(np.float32(top) * np.float32(1 / 127)), 8) if top < np.inf else top
        if not scale * 127 < MOST:
            return nothing
        scale = scale if scale >= LOWEST else 0.0
        parts = group.astype(np.float32) * np.float32(1 / scale if scale else 0)
        return np.rint(parts).astype(np.int64) % 256, scale
    table, digits, most = (E2M1, 2, 6.0) if kind == "fp4" else (E4M3, 4, 448.0)
    if not rounded(top, digits) < MOST:
        return nothing
    scale = LOWEST
    while rounded(top, digits) > most * scale:
        scale *= 2
    return nearest(table, group / scale), scale


def parts(kind: str, row: Array, rope: int, group: int) -> tuple[list, Array]:
    """(codes, scale) of each group of a row, and its last `rope` values in bfloat16."""
    row = np.asarray(row, np.float32).astype(np.float64)
    row = np.where(np.abs(row) < 2.0**-126, 0.0, row)
    body, last = row[: row.size - rope], row[row.size - rope :]
    group = group or min(GROUPS[kind], body.size)
    found = [group_codes(kind, x) for x in body.reshape(-1, group)]
    return found, last.astype(np.float32).astype(ml_dtypes.bfloat16)


def pack(kind: str, row: Array, rope: int = 0, group: int = 0) -> Array:
    """The bytes u8[n] of a row."""
    found, last = parts(kind, row, rope, group)
    codes = np.concatenate([x for x, _ in found]).astype(np.uint8)
    if kind == "fp4":
        codes = codes[::2] + 16 * codes[1::2]
    scales = np.array([x for _, x in found])
    tail = np.where(np.isnan(last.astype(np.float32)), np.uint16(0xFFFF), last.view(np.uint16))
    tail = tail.astype("<u2").view(np.uint8)
    if kind in ("fp8_rope", "fp4"):
        powers = [255 if np.isnan(x) else int(np.log2(x)) + 127 for x in scales]
        whole = np.concatenate([codes, tail, np.array(powers, np.uint8)])
    else:
        bits = np.where(np.isnan(scales), 0xFFFFFFFF, scales.astype("<f4").view("<u4"))
        whole = np.concatenate([codes, bits.astype("<u4").view(np.uint8), tail])
    return np.pad(whole, (0, -whole.size % ALIGN[kind]))


def read(kind: str, row: Array, rope: int = 0, group: int = 0) -> Array:
    """float64[width], what is read of a row that is stored."""
    found, last = parts(kind, row, rope, group)
    values = []
    for codes, scale in found:
        if kind == "int8":
            numbers = np.where(codes > 127, codes - 256, codes)
        else:
            numbers = (E2M1 if kind == "fp4" else E4M3)[codes]
        values.append(numbers * scale)
    return np.concatenate([*values, last.astype(np.float64)])


def stored(
    config: Any,
    leaf: str,
    rows: Array,
    trace: LayerTrace,
    rope: int = 0,
    group: int = 0,
    ratio: int = 1,
) -> Array:
    """What attention sees of rows [n, width] of a leaf, by `config.cache_layouts`.

    Row i is complete with token `ratio * (i + 1) - 1`; the first token from which on a row's codes
    may differ for a last bit of its values goes to `trace.unsure`.
    """
    kind = getattr(config, "cache_layouts", {}).get(leaf)
    if kind is None:
        return rows
    rope = rope if kind.startswith("fp8") else 0
    out = [read(kind, row, rope, group) for row in rows]
    for i, row in enumerate(rows):
        error = SURE * (np.abs(row) + 0.2 * np.abs(row).max())
        if any((read(kind, row + x, rope, group) != out[i]).any() for x in (error, -error)):
            trace.unsure = min(trace.unsure, ratio * (i + 1) - 1)
            break
    return np.array(out).reshape(rows.shape)
