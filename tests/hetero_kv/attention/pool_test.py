"""Pools of entries: pages give the bits of contiguous rows, and bad ids reach nobody's page."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import pool
from hetero_kv.attention.pool import Paged

LAYERS, ROWS, SIZE, WIDTH, TILE = 2, 3, 24, 4, 6
BAD = (-1, -(2**31), 2**31 - 1, None)  # None: the number of pages


def made(entries: int, seed: int = 0) -> tuple[jax.Array, Paged]:
    """The same rows, contiguous and in pages of `entries` in random places, one of them unused."""
    rng = np.random.default_rng(seed)
    columns = -(-SIZE // entries)
    rows = rng.normal(size=(LAYERS, ROWS, SIZE, WIDTH)).astype(np.float32)
    table = rng.permutation(ROWS * columns + 1)[: ROWS * columns].reshape(ROWS, columns)
    pages = np.full((LAYERS, ROWS * columns + 1, entries, WIDTH), np.nan, np.float32)
    padded = np.zeros((LAYERS, ROWS, columns * entries, WIDTH), np.float32)
    padded[:, :, :SIZE] = rows
    pages[:, table] = padded.reshape(LAYERS, ROWS, columns, entries, WIDTH)
    ids = jnp.asarray(table, jnp.int32)
    return jnp.asarray(rows), Paged(jnp.asarray(pages), ids, ids)


def flat(paged: Paged, layer: int) -> np.ndarray:
    """[R, SIZE, WIDTH] by entries."""
    pages = np.asarray(paged.pages)[layer][np.asarray(paged.read)]
    return pages.reshape(ROWS, -1, WIDTH)[:, :SIZE]


@pytest.mark.parametrize("entries", [1, 2, 3, 5, 6, 12, 24])
def test_pages_read_as_rows(entries: int) -> None:
    rows, paged = made(entries)
    assert pool.rows(paged) >= pool.rows(rows) == SIZE
    tile = jax.jit(functools.partial(pool.tile, size=TILE))
    for layer in range(LAYERS):
        for index in range(SIZE // TILE):
            want, have = (tile(x, layer, index) for x in (rows, paged))
            np.testing.assert_array_equal(want, have)
    index = jnp.asarray(np.random.default_rng(1).integers(0, SIZE, (ROWS, 9)), jnp.int32)
    np.testing.assert_array_equal(pool.gather(rows, 1, index), pool.gather(paged, 1, index))


@pytest.mark.parametrize("entries", [1, 2, 5, 6, 24])
def test_pages_are_written_as_rows(entries: int) -> None:
    rows, paged = made(entries)
    values = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, 7, WIDTH)), jnp.float32)
    start, count = jnp.array([0, 9, 16], jnp.int32), jnp.array([7, 0, 5], jnp.int32)
    write = jax.jit(pool.append)
    want, have = (write(x, 1, start, values, count) for x in (rows, paged))
    for layer in range(LAYERS):
        np.testing.assert_array_equal(want[layer], flat(have, layer))
    assert pool.landed(paged, start, 7, count).tolist() == [7, 0, 5]
    assert pool.landed(rows, start, 7, count).tolist() == [7, 0, 5]
    beyond = jnp.full(ROWS, -(-SIZE // entries) * entries - 2, jnp.int32)
    have = write(paged, 0, beyond, values, count)
    assert pool.landed(paged, beyond, 7, count).tolist() == [2, 0, 2]
    assert np.isnan(have.pages).sum() == np.isnan(paged.pages).sum()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("entries", [2, 5, 6, 12])
def test_ids_that_are_no_pages(entries: int, bad: int | None) -> None:
    _, paged = made(entries)
    bad = paged.pages.shape[1] if bad is None else bad
    paged = paged._replace(read=paged.read.at[1].set(bad), write=paged.write.at[1].set(bad))
    for index in range(SIZE // TILE):
        part = np.asarray(pool.tile(paged, 0, index, TILE))
        assert np.isnan(part[1]).all() and np.isfinite(part[[0, 2]]).all()
    zero = jnp.zeros((ROWS, 3), jnp.int32)
    assert np.isnan(pool.gather(paged, 0, zero)).any(axis=(1, 2)).tolist() == [False, True, False]
    count = jnp.array([0, 4, 0], jnp.int32)
    new = pool.append(paged, 0, count * 0, jnp.ones((ROWS, 4, WIDTH)), count)
    np.testing.assert_array_equal(new.pages, paged.pages)
    assert pool.landed(paged, count * 0, 4, count).tolist() == [0, 0, 0]
