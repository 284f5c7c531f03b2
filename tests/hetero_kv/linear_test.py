"""Products with weights in blocks are those with the weight in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import linear
from hetero_kv.linear import Blocks, Turned


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("lead", [(1,), (1, 1), (5,), (2, 4), (9,), (3, 7)])
def test_products_are_those_of_the_matrix(lead: tuple[int, ...]) -> None:
    weight, x = _weight(24, 3 * linear.COLUMNS), _weight(*lead, 24)
    blocks = Blocks.of(jnp.asarray(weight), linear.COLUMNS)
    found = jax.jit(linear.linear)(x, blocks)
    np.testing.assert_allclose(found, x.astype(float) @ weight.astype(float), atol=1e-4, rtol=0)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(linear.linear(x, jnp.asarray(weight)), found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_groups_have_weights_of_their_own(rows: int) -> None:
    x = _weight(rows, 1, 3, 10)
    for columns in (2 * linear.COLUMNS, linear.NARROW):
        weight = _weight(3, 10, columns)
        want = np.einsum("rsgx,gxy->rsgy", x.astype(float), weight.astype(float))
        given = jnp.asarray(weight)
        np.testing.assert_allclose(linear.grouped(x, given), want, atol=1e-4, rtol=0)
        laid = linear.laid(given)
        assert laid is not given
        np.testing.assert_allclose(linear.grouped(x, laid), want, atol=1e-4, rtol=0)


def test_a_stack_is_indexed_like_its_weights() -> None:
    weight = _weight(4, 8, linear.COLUMNS)
    blocks, x = Blocks.of(jnp.asarray(weight), linear.COLUMNS), _weight(2, 8)
    one = jax.tree.map(lambda part: part[2], blocks)
    assert blocks.shape == (4, 8, linear.COLUMNS) and one.shape == (8, linear.COLUMNS)
    np.testing.assert_allclose(linear.linear(x, one), x @ weight[2], atol=1e-4, rtol=0)
    each = np.stack([x] * 4)  # all at once
    np.testing.assert_allclose(linear.linear(each, blocks), each @ weight, atol=1e-4, rtol=0)


def test_a_weight_from_its_blocks() -> None:
    weight = _weight(4, 8, 2 * linear.COLUMNS)
    np.testing.assert_array_equal(Blocks.of(jnp.asarray(weight), linear.COLUMNS).whole(), weight)


@pytest.mark.parametrize("lead", [(1,), (5,), (2, 4), (9,)])
def test_a_narrow_weight_is_turned(lead: tuple[int, ...]) -> None:
    weight, x = _weight(24, linear.NARROW), _weight(*lead, 24)
    turned = linear.laid(jnp.asarray(weight))
    assert isinstance(turned, Turned) and turned.shape == weight.shape
    found = jax.jit(linear.linear)(x, turned)
    np.testing.assert_allclose(found, x.astype(float) @ weight.astype(float), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(turned.whole(), weight)
    assert turned.astype("bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("k", "wide", "columns"),
    [
        (256, (320,), 160),  # two blocks
        (256, (1024,), 256),  # as wide as a block may be
        (2048, (1024,), 64),
        (256, (128, 64, 384), 64),  # shared: every one is a whole number of blocks
        (16, (128, 64), 64),
        (16, (64,), 64),
    ],
)
def test_the_width_of_blocks(k: int, wide: tuple[int, ...], columns: int) -> None:
    assert linear.width(k, *wide) == columns


def test_only_float32_matrices_are_laid_otherwise() -> None:
    wide = jnp.zeros((3, 2 * linear.COLUMNS))
    assert isinstance(linear.laid(wide), Blocks)
    assert isinstance(linear.laid(np.asarray(wide)), Blocks)
    between = jnp.zeros((3, linear.COLUMNS + 1))
    vector, half = jnp.zeros(2 * linear.COLUMNS), wide.astype(jnp.bfloat16)
    large = jnp.zeros((1025, 2 * linear.COLUMNS))
    for kept in (between, vector, half, large, jnp.zeros((3, 4), jnp.bfloat16)):
        assert linear.laid(kept) is kept and not linear.can_block(kept)
