"""Every code of every format, both ways, against the formats' definitions."""

import itertools

import jax
import numpy as np
import pytest

from models.quantised import codes
from tests.models.quantised import oracle

BYTES = np.arange(256, dtype=np.uint8)
E4M3 = np.array([oracle.e4m3(code) for code in range(256)], np.float32)
E2M1 = np.array([oracle.e2m1(code) for code in range(16)], np.float32)


def test_all_e4m3_codes() -> None:
    assert np.isnan(E4M3).sum() == 2 and np.nanmax(E4M3) == 448
    assert oracle.same_bits(codes.from_e4m3(BYTES), E4M3)
    assert oracle.same_bits(np.asarray(jax.jit(codes.decode_e4m3)(BYTES)), E4M3)


def test_all_pairs_of_e2m1_codes() -> None:
    want = np.stack([E2M1[BYTES & 15], E2M1[BYTES >> 4]], axis=-1)
    assert sorted(set(E2M1)) == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in (BYTES, BYTES.reshape(4, 64)):
        assert oracle.same_bits(codes.from_e2m1(row).reshape(256, 2), want)
        assert oracle.same_bits(np.asarray(jax.jit(codes.decode_e2m1)(row)).reshape(256, 2), want)


@pytest.mark.parametrize("values", [E4M3, E2M1], ids=["e4m3", "e2m1"])
def test_every_value_with_every_e8m0_scale(values: np.ndarray) -> None:
    """To both ends: subnormal results, infinities, and the scale that is NaN."""
    want = np.array(
        [[oracle.single(float(v) * oracle.e8m0(s)) for v in values] for s in range(256)]
    )
    grid = np.broadcast_to(values, want.shape), np.broadcast_to(BYTES[:, None], want.shape)
    assert oracle.same_bits(codes.times_e8m0(*grid), want)
    got = np.asarray(jax.jit(codes.scale_e8m0)(*grid))
    assert oracle.same_but_subnormal(got, want)
    assert np.isinf(want).any() and np.isnan(want[255]).all()
    # 2^-127 is subnormal itself, and its products with larger values are not.
    normal = np.abs(want[0]) >= np.finfo(np.float32).tiny
    assert normal.any() and oracle.same_bits(got[0][normal], want[0][normal])


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_the_nearest_code_is_taken(name: str) -> None:
    """At every value, at every midpoint (ties to even), beside both, and beyond the largest."""
    table = [float(x) for x in (E4M3[:127] if name == "e4m3" else E2M1[:8])]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    points = np.array([*table, *middles], np.float32)
    points = np.concatenate([points, np.nextafter(points, 1e9), np.nextafter(points, -1e9)])
    points = np.concatenate([points, np.float32([table[-1] * 1.2, 1e30, np.inf, 1e-30])])
    points = np.concatenate([points, -points])
    points = points[: len(points) // 2 * 2]
    most = table[-1]
    want = np.array([oracle.nearest(min(abs(float(x)), most), table) for x in points], np.uint8)
    if name == "e4m3":
        want |= np.signbit(points).astype(np.uint8) << 7
        np.testing.assert_array_equal(codes.to_e4m3(points), want)
        assert np.isnan(codes.from_e4m3(codes.to_e4m3(np.float32([np.nan])))).all()
    else:
        want |= np.signbit(points).astype(np.uint8) << 3
        np.testing.assert_array_equal(codes.to_e2m1(points), want[::2] | want[1::2] << 4)
        with pytest.raises(ValueError, match="NaN"):
            codes.to_e2m1(np.float32([np.nan, 1]))


def test_codes_of_values_are_the_codes() -> None:
    real = BYTES[~np.isnan(E4M3)]
    np.testing.assert_array_equal(codes.to_e4m3(codes.from_e4m3(real)), real)
    np.testing.assert_array_equal(codes.to_e2m1(codes.from_e2m1(BYTES)), BYTES)
