"""Blocks with scales against a loop over elements: ragged edges, extreme scales, both ways."""

import math

import jax
import numpy as np
import pytest

from models.quantised.blocks import FP4, FP8, FP8_POWERS, Blocks
from tests.models.quantised import oracle

LAYOUTS = {
    "fp8": FP8,
    "fp8_powers": FP8_POWERS,
    "fp4": FP4,
    "small": Blocks("e4m3", (3, 4), "e8m0"),
}
# Beside whole blocks: one element, one row or column too many or too few.
SHAPES = {
    "fp8": [(1, 2), (128, 128), (127, 130), (129, 256)],
    "fp8_powers": [(3, 1), (129, 129)],
    "fp4": [(1, 2), (3, 32), (5, 30), (2, 66)],
    "small": [(3, 4), (7, 9), (2, 3)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def random_codes(blocks: Blocks, shape: tuple[int, ...], seed: int = 0):
    """Any bytes as codes; scales of every magnitude, some NaN."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, blocks.code_shape(shape), np.uint8)
    scales = blocks.scale_shape(shape)
    if blocks.scale == "e8m0":
        return codes, rng.integers(0, 256, scales, np.uint8)
    return codes, np.float32(2.0 ** rng.uniform(-60, 60, scales) * rng.choice([-1, 1], scales))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_decoding(name: str, shape: tuple[int, int]) -> None:
    blocks = LAYOUTS[name]
    codes, scales = random_codes(blocks, shape)
    want = oracle.decode(codes, scales, blocks.element, blocks.block)
    assert blocks.shape_of(codes.shape) == shape
    assert oracle.same_bits(blocks.decode(codes, scales), want)
    first = shape[0] // 2
    assert oracle.same_bits(blocks.rows(codes[first:], scales, first), want[first:])
    got = np.asarray(jax.jit(blocks.dequantise)(codes, scales))
    assert oracle.same_but_subnormal(got, want)


def test_leading_axes() -> None:
    for blocks in (FP4, LAYOUTS["small"]):
        codes, scales = random_codes(blocks, (2, 3, 5, 34))
        assert scales.shape == blocks.scale_shape((2, 3, 5, 34))
        want = np.empty((2, 3, 5, 34), np.float32)
        for at in np.ndindex(2, 3):
            want[at] = oracle.decode(codes[at], scales[at], blocks.element, blocks.block)
        assert oracle.same_bits(blocks.decode(codes, scales), want)
        got = np.asarray(jax.jit(blocks.dequantise)(codes, scales))
        assert oracle.same_but_subnormal(got, want)


def expected_scale(blocks: Blocks, tile: np.ndarray) -> float:
    """Of one block, by the definition in `Blocks.encode`."""
    largest = float(np.abs(tile).max())
    if largest == 0:
        return 1.0
    if blocks.scale == "float32":
        return float(np.float32(max(largest / 448, float(np.finfo(np.float32).tiny))))
    exact = next(k for k in range(-200, 200) if 2.0**k > largest) - 1  # floor(log2(largest))
    if blocks.element == "e2m1":
        return 2.0 ** min(max(exact - 2, -127), 127)
    least = next(k for k in range(-200, 200) if 2.0**k * 448 >= largest)
    return 2.0 ** min(max(least, -127), 127)


VALUES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "every_magnitude": lambda rng, shape: rng.normal(size=shape) * 2.0 ** rng.uniform(-140, 120),
    "largest": lambda rng, shape: rng.choice([3.4e38, -3.4e38, 1.0], shape),
    "subnormal": lambda rng, shape: rng.choice([1e-45, -3e-42, 0.0], shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "powers": lambda rng, shape: 2.0 ** rng.integers(-20, 20, shape),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_encoding_takes_the_nearest_code_of_the_defined_scale(name: str, kind: str) -> None:
    blocks = LAYOUTS[name]
    shape = SHAPES[name][-1]
    values = VALUES[kind](np.random.default_rng(3), shape).astype(np.float32)
    codes, scales = blocks.encode(values)
    assert codes.shape == blocks.code_shape(shape) and scales.dtype == blocks.scale_dtype
    decoded = blocks.decode(codes, scales)
    table = [oracle.e4m3(c) for c in range(127)]
    if blocks.element == "e2m1":
        table = [oracle.e2m1(c) for c in range(8)]
    for i, j in np.ndindex(*scales.shape):
        rows, columns = (
            slice(n * b, (n + 1) * b) for n, b in zip((i, j), blocks.block, strict=True)
        )
        tile, back = values[rows, columns], decoded[rows, columns]
        scale = expected_scale(blocks, tile)
        held = scales[i, j]
        assert (oracle.e8m0(int(held)) if blocks.scale == "e8m0" else float(held)) == scale
        for x, y in list(zip(tile.flat, back.flat, strict=True))[:40]:
            ratio = abs(float(x)) / scale
            if blocks.scale == "float32":
                ratio = abs(float(np.float32(x) / np.float32(scale)))
            else:
                ratio = float(oracle.single(ratio))
            want = oracle.single(table[oracle.nearest(min(ratio, table[-1]), table)] * scale)
            assert abs(float(y)) == float(want) and (y == 0 or math.copysign(1, x) * y > 0)


@pytest.mark.parametrize("name", ["fp8_powers", "fp4", "small"])
def test_what_was_encoded_once_is_kept(name: str) -> None:
    blocks = LAYOUTS[name]
    values = np.random.default_rng(5).normal(size=SHAPES[name][-1]).astype(np.float32)
    once = blocks.decode(*blocks.encode(values))
    assert oracle.same_bits(blocks.decode(*blocks.encode(once)), once)
    assert np.abs(once - values).max() < 0.3 * np.abs(values).max()


def test_what_cannot_be_encoded() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="finite"):
            FP8.encode(np.full((2, 2), bad, np.float32))
    with pytest.raises(ValueError, match="even"):
        FP4.code_shape((4, 7))
    with pytest.raises(ValueError, match="element"):
        Blocks("e5m2", (128, 128), "float32")
