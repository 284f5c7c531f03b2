"""Products with weights in blocks are those with the weight in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import linear
from hetero_kv.linear import Blocks


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("lead", [(1,), (1, 1), (5,), (2, 4), (9,), (3, 7)])
def test_products_are_those_of_the_matrix(lead: tuple[int, ...]) -> None:
    weight, x = _weight(24, 3 * linear.COLUMNS), _weight(*lead, 24)
    blocks = Blocks.of(jnp.asarray(weight))
    found = jax.jit(linear.linear)(x, blocks)
    np.testing.assert_allclose(found, x.astype(float) @ weight.astype(float), atol=1e-4, rtol=0)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(linear.linear(x, jnp.asarray(weight)), found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_groups_have_weights_of_their_own(rows: int) -> None:
    weight, x = _weight(3, 10, 2 * linear.COLUMNS), _weight(rows, 1, 3, 10)
    want = np.einsum("rsgx,gxy->rsgy", x.astype(float), weight.astype(float))
    for given in (jnp.asarray(weight), Blocks.of(jnp.asarray(weight))):
        np.testing.assert_allclose(linear.grouped(x, given), want, atol=1e-4, rtol=0)


def test_a_stack_is_indexed_like_its_weights() -> None:
    weight = _weight(4, 8, linear.COLUMNS)
    blocks, x = Blocks.of(jnp.asarray(weight)), _weight(2, 8)
    one = jax.tree.map(lambda part: part[2], blocks)
    assert blocks.shape == (4, 8, linear.COLUMNS) and one.shape == (8, linear.COLUMNS)
    np.testing.assert_allclose(linear.linear(x, one), x @ weight[2], atol=1e-4, rtol=0)
    each = np.stack([x] * 4)  # all at once
    np.testing.assert_allclose(linear.linear(each, blocks), each @ weight, atol=1e-4, rtol=0)


def test_a_weight_from_its_blocks() -> None:
    weight = _weight(4, 8, 2 * linear.COLUMNS)
    np.testing.assert_array_equal(Blocks.of(jnp.asarray(weight)).whole(), weight)


def test_only_wide_float32_matrices_are_kept_in_blocks() -> None:
    wide = jnp.zeros((3, 2 * linear.COLUMNS))
    assert linear.can_block(wide) and linear.can_block(np.asarray(wide))
    narrow = jnp.zeros((3, linear.COLUMNS + 1))
    assert not linear.can_block(narrow)
    assert not linear.can_block(wide.astype(jnp.bfloat16))
    assert not linear.can_block(wide[0])
