"""Rotations against float64, up to a million tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention.rope import Rope, Table, Yarn, rotate, table

RELEASED = Yarn(factor=16.0, original_max=65536, beta_fast=32.0, beta_slow=1.0)


def angles(frequencies: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return positions[:, None].astype(np.float64) * frequencies.astype(np.float64)


def exact_frequencies(dim: int, theta: float) -> np.ndarray:
    return theta ** (-2.0 * np.arange(dim // 2) / dim)


@pytest.mark.parametrize(
    "theta, position, bound",
    [
        (10_000.0, 1_000, 1e-4),
        (10_000.0, 65_536, 6e-3),
        (160_000.0, 65_536, 6e-3),
        (160_000.0, 1_000_000, 0.1),
    ],
)
def test_error_grows_with_position(theta: float, position: int, bound: float) -> None:
    """float32 angles, as in the reference implementation: an ulp of the angle, in radians."""
    rope = Rope(64, theta)
    positions = np.unique(np.linspace(0, position, 2001).astype(np.int32))
    made = table(rope, positions)
    right = angles(exact_frequencies(64, theta), positions)
    error = max(
        np.abs(np.asarray(made.cos)[:, ::2] - np.cos(right)).max(),
        np.abs(np.asarray(made.sin)[:, 1::2] - np.sin(right)).max(),
    )
    print(f"error {error:.1e}")
    assert error < bound


def test_cosine_and_sine_of_float32_angles_are_good() -> None:
    """What is lost is lost in the angle: range reduction of large arguments is exact."""
    rope = Rope(64, 160_000.0)
    positions = np.linspace(0, 1_000_000, 2001).astype(np.int32)
    angle = positions[:, None].astype(np.float32) * rope.frequencies()
    made = table(rope, positions)
    np.testing.assert_allclose(np.asarray(made.cos)[:, ::2], np.cos(angle.astype(float)), atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(made.sin)[:, 1::2], np.sin(angle.astype(float)), atol=1e-6
    )


def test_rotation_of_neighbouring_channels_at_the_end() -> None:
    rope = Rope(4, 100.0)
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    positions = np.array([0, 1, 2, 50, 777], np.int32)
    turned = np.asarray(rotate(x, table(rope, positions)))
    np.testing.assert_array_equal(turned[:, :3], x[:, :3])
    np.testing.assert_array_equal(turned[0], x[0])
    for row, position in enumerate(positions):
        for pair, omega in enumerate((1.0, 0.1)):
            a, b = x[row, 3 + 2 * pair], x[row, 4 + 2 * pair]
            c, s = np.cos(position * omega), np.sin(position * omega)
            np.testing.assert_allclose(
                turned[row, 3 + 2 * pair : 5 + 2 * pair], [a * c - b * s, a * s + b * c], atol=2e-4
            )


def test_inverse_undoes_and_products_depend_on_distance() -> None:
    rope = Rope(8, 1000.0)
    q, k = np.random.default_rng(1).normal(size=(2, 1, 8)).astype(np.float32)
    at = lambda x, p: np.asarray(rotate(x, table(rope, np.array([p], np.int32))))  # noqa: E731
    back = rotate(at(q, 91), table(rope, np.array([91], np.int32)), inverse=True)
    np.testing.assert_allclose(back, q, atol=1e-6)
    np.testing.assert_allclose(at(q, 7) @ at(k, 3).T, at(q, 207) @ at(k, 203).T, atol=1e-4)


def test_yarn_of_the_released_models() -> None:
    plain = Rope(64, 160_000.0).frequencies()
    scaled = Rope(64, 160_000.0, RELEASED).frequencies()
    np.testing.assert_array_equal(scaled[:16], plain[:16])  # the ramp starts at channel 15
    np.testing.assert_allclose(scaled[25:], plain[25:] / 16, rtol=1e-6)  # and ends at 25
    assert (scaled[16:25] < plain[16:25]).all()
    assert (scaled[16:25] > plain[16:25] / 16 * 1.001).all()
    ramp = np.clip((np.arange(32) - 15) / 10, 0, 1)
    exact = exact_frequencies(64, 160_000.0)
    np.testing.assert_allclose(scaled, exact * (1 - ramp) + exact / 16 * ramp, rtol=1e-6)


def test_yarn_with_no_room_for_a_ramp() -> None:
    made = Rope(4, 100.0, Yarn(4.0, 8, 1.0, 1.0)).frequencies()
    assert np.isfinite(made).all()
    plain = exact_frequencies(4, 100.0)
    assert all(np.isclose(made, plain, rtol=1e-3) | np.isclose(made, plain / 4, rtol=1e-3))


def test_bfloat16_models_round_cosine_and_sine() -> None:
    made = table(Rope(8, 100.0), np.arange(20, dtype=np.int32), jnp.bfloat16)
    assert made.cos.dtype == jnp.float32
    np.testing.assert_array_equal(made.cos, made.cos.astype(jnp.bfloat16).astype(jnp.float32))
    x = jnp.ones((20, 8), jnp.bfloat16)
    assert rotate(x, made).dtype == jnp.bfloat16


def test_no_rotated_channels() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    made = table(Rope(0, 100.0), np.arange(2, dtype=np.int32))
    assert made.cos.shape == (2, 0)
    np.testing.assert_array_equal(rotate(x, made), x)


def test_tables_broadcast_over_heads() -> None:
    made = table(Rope(4, 100.0), np.arange(3, dtype=np.int32))
    x = np.random.default_rng(2).normal(size=(3, 2, 4)).astype(np.float32)
    wide = Table(made.cos[:, None], made.sin[:, None])
    both = np.asarray(rotate(x, wide))
    for head in range(2):
        np.testing.assert_array_equal(both[:, head], rotate(x[:, head], made))


@pytest.mark.parametrize("dim", [-2, 3])
def test_bad_sizes_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="even"):
        Rope(dim, 100.0)


def test_pairs_in_halves_are_the_same_rotation_of_other_channels() -> None:
    positions, x = (
        np.array([0, 3, 200], np.int32),
        np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32),
    )
    near, far = Rope(6, 100.0), Rope(6, 100.0, halves=True)
    # Channels 2 + i and 5 + i become neighbours.
    order = np.concatenate([[0, 1], 2 + np.arange(6).reshape(2, 3).T.reshape(-1)])
    want = np.asarray(rotate(x[:, order], table(near, positions)))
    got = np.asarray(rotate(x, table(far, positions), halves=True))
    np.testing.assert_allclose(got[:, order], want, atol=1e-6)
    back = rotate(got, table(far, positions), inverse=True, halves=True)
    np.testing.assert_allclose(back, x, atol=1e-5)


def test_stretched_positions() -> None:
    positions = np.array([0, 8, 800], np.int32)
    long, short = (
        table(Rope(6, 100.0, stretch=8.0), positions),
        table(Rope(6, 100.0), positions // 8),
    )
    np.testing.assert_allclose(long.cos, short.cos, atol=1e-5)
    with pytest.raises(ValueError, match="stretch"):
        Rope(6, 100.0, stretch=0.0)


def test_a_ramp_between_channels_and_a_temperature() -> None:
    """Without truncation the ramp begins where the wavelength says, not at a whole channel."""
    yarn = Yarn(4.0, 256, 8.0, 1.0, truncate=False, temperature=1.25)
    made, base = Rope(8, 100.0, yarn).frequencies(), exact_frequencies(8, 100.0)
    at = [8 * np.log(256 / (turns * 2 * np.pi)) / (2 * np.log(100.0)) for turns in (8.0, 1.0)]
    ramp = np.clip((np.arange(4) - at[0]) / (at[1] - at[0]), 0, 1)
    np.testing.assert_allclose(made, base * (1 - ramp) + base / 4 * ramp, rtol=1e-6)
    hot, cold = (
        table(Rope(8, 100.0, x), np.array([7])) for x in (yarn, yarn._replace(temperature=1.0))
    )
    np.testing.assert_allclose(hot.cos, 1.25 * np.asarray(cold.cos), rtol=1e-6)
