"""Rings and pools against dictionaries of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import pool, ring
from hetero_kv.contract import Leaf, Window

LAYERS, BATCH, ROWS, WIDTH, COLUMNS = 2, 5, 6, 3, 8


def values(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(BATCH, COLUMNS, WIDTH)).astype(np.float32)


def assert_ring(held: np.ndarray, want: list[dict[int, np.ndarray]]) -> None:
    """Row `p % ROWS` holds position p, for the last ROWS positions of every sequence."""
    for sequence, rows in enumerate(want):
        for position in sorted(rows)[-ROWS:]:
            np.testing.assert_array_equal(held[sequence, position % ROWS], rows[position])


def test_advance_and_ordered_and_held_positions() -> None:
    rng = np.random.default_rng(0)
    advance, ordered = jax.jit(ring.advance), jax.jit(ring.ordered)
    held = jnp.full((BATCH, ROWS, WIDTH), jnp.nan)
    length = np.zeros(BATCH, np.int32)
    want: list[dict[int, np.ndarray]] = [{} for _ in range(BATCH)]
    leaf = Leaf(contract=Window(ROWS), component="windows", rows=ROWS, width=(WIDTH,))
    for _ in range(12):
        count = rng.integers(0, COLUMNS + 1, BATCH).astype(np.int32)
        new = values(rng)
        before = np.asarray(held)
        held = advance(held, length, new, count)
        for sequence in range(BATCH):
            for j in range(count[sequence]):
                want[sequence][int(length[sequence]) + j] = new[sequence, j]
            if not count[sequence]:
                np.testing.assert_array_equal(before[sequence], held[sequence])
        length = length + count
        assert_ring(np.asarray(held), want)
        np.testing.assert_array_equal(
            np.maximum(ring.held_positions(ROWS, jnp.asarray(length)), -1),
            leaf.ring_positions(length),
        )
        in_order = np.asarray(ordered(held, length))
        for sequence, end in enumerate(length):
            for at, position in enumerate(range(end - ROWS, end)):
                if position >= 0:
                    np.testing.assert_array_equal(in_order[sequence, at], want[sequence][position])


def test_advance_equals_writing_one_by_one() -> None:
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(LAYERS, BATCH, ROWS, WIDTH)), jnp.float32)
    length = np.array([0, 1, 5, 6, 40], np.int32)
    count = np.array([8, 0, 3, 7, 1], np.int32)
    new, layer = values(rng), 1
    moved = ring.store(rows, layer, ring.advance(ring.read(rows, layer), length, new, count))
    write = jax.jit(ring.write_one)
    one_by_one = rows
    for j in range(COLUMNS):
        one_by_one = write(one_by_one, layer, length + j, new[:, j], j < count)
    np.testing.assert_array_equal(moved, one_by_one)
    np.testing.assert_array_equal(moved[0], rows[0])


def test_positions_travel_like_rows() -> None:
    """Evidence is a ring of width 0 in the same functions."""
    length, count = np.array([3, 9], np.int32), np.array([4, 2], np.int32)
    seen = jnp.full((2, ROWS), -1, jnp.int32)
    start = np.zeros(2, np.int32)
    columns = np.arange(16, dtype=np.int32)
    seen = ring.advance(seen, start, np.broadcast_to(columns, (2, 16)), length)
    seen = ring.advance(seen, length, length[:, None] + columns, count)
    leaf = Leaf(contract=Window(ROWS), component="windows", rows=ROWS)
    np.testing.assert_array_equal(seen, leaf.ring_positions(length + count))


@pytest.mark.parametrize("start", [0, 3, 9])
def test_pool_append_drops_what_does_not_fit_or_does_not_run(start: int) -> None:
    rng = np.random.default_rng(2)
    entries = jnp.asarray(rng.normal(size=(LAYERS, 3, 12, WIDTH)), jnp.float32)
    new = rng.normal(size=(3, 4, WIDTH)).astype(np.float32)
    count = np.array([0, 2, 4], np.int32)
    after = np.asarray(pool.append(entries, 1, np.full(3, start, np.int32), new, count))
    want = np.asarray(entries).copy()
    for sequence in range(3):
        for j in range(count[sequence]):
            if start + j < 12:
                want[1, sequence, start + j] = new[sequence, j]
    np.testing.assert_array_equal(after, want)


def test_pool_tiles_gather_and_counter() -> None:
    entries = jnp.arange(LAYERS * 2 * 8 * WIDTH, dtype=jnp.float32).reshape(LAYERS, 2, 8, WIDTH)
    np.testing.assert_array_equal(pool.tile(entries, 1, 1, 4), entries[1, :, 4:])
    index = np.array([[7, 0, 7], [1, 2, 3]])
    want = np.stack([np.asarray(entries)[0, r, index[r]] for r in range(2)])
    np.testing.assert_array_equal(pool.gather(entries, 0, index), want)
    counter = jnp.array([[1, 2], [3, 4]], jnp.int32)
    bumped = pool.bump(counter, 1, jnp.array([5, 0], jnp.int32))
    assert bumped.tolist() == [[1, 2], [8, 4]]
