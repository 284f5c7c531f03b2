"""Entries of a compressor against loops over tokens, from every offset within a group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import ring
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.rope import Rope
from hetero_kv.kernels.compressor.reference import close_many, close_one
from hetero_kv.params import Params

D_MODEL, WIDTH, EPS = 5, 6, 1e-6
ROPE = Rope(4, 100.0)
CASES = [(2, True), (3, True), (3, False), (5, False)]  # ratio, overlap
# A sum over more rows is another piece of code: one ratio beyond the limit of unrolling.
LONG = (17, False)


def build(ratio: int, overlap: bool) -> tuple[Compressor, Params]:
    made = Compressor(D_MODEL, WIDTH, ratio, overlap, ROPE, EPS, "float32")
    rng = np.random.default_rng(ratio)
    params = {
        name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32)
        for name, spec in made.params().items()
    }
    return made, params


def inputs(rows: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(rows, tokens, D_MODEL)).astype(np.float32)


def entry(made: Compressor, params: Params, x: np.ndarray, index: int) -> np.ndarray:
    """Entry `index` of one sequence x [T, d], one channel at a time, float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    m = made.ratio
    rows = [(m * index + j, made.series - WIDTH) for j in range(m)]
    if made.overlap and index:
        rows += [(m * (index - 1) + j, 0) for j in range(m)]
    pooled = np.zeros(WIDTH)
    for channel in range(WIDTH):
        kv = [x[t] @ p["kv"][:, at + channel] for t, at in rows]
        gate = [
            x[t] @ p["gate"][:, at + channel] + p["position_bias"][t % m, at + channel]
            for t, at in rows
        ]
        weight = np.exp(np.array(gate) - max(gate))
        pooled[channel] = weight @ np.array(kv) / weight.sum()
    normed = pooled / np.sqrt(np.mean(pooled**2) + EPS) * p["norm"]
    out = normed.copy()
    for pair, omega in enumerate((1.0, 0.1)):
        a, b = normed[WIDTH - 4 + 2 * pair : WIDTH - 2 + 2 * pair]
        c, s = np.cos(m * index * omega), np.sin(m * index * omega)
        out[WIDTH - 4 + 2 * pair : WIDTH - 2 + 2 * pair] = a * c - b * s, a * s + b * c
    return out


@pytest.mark.parametrize("ratio, overlap", [*CASES, LONG])
def test_forward(ratio: int, overlap: bool) -> None:
    made, params = build(ratio, overlap)
    x = inputs(1, 3 * ratio + 1)
    found = np.asarray(jax.jit(made.forward)(params, x))
    assert found.shape == (1, 3, WIDTH)
    for index in range(3):
        want = entry(made, params, x[0], index)
        np.testing.assert_allclose(found[0, index], want, atol=2e-5)


@functools.partial(jax.jit, static_argnums=0)
def run_many(made: Compressor, params: Params, before: jax.Array, x: jax.Array, start, count):
    """(entries, first, how many) of a call, from rings that hold `before` up to `start`."""
    rows = made.keep + made.ratio
    held = jnp.full((x.shape[0], rows, 2 * made.series), jnp.nan)
    column = jnp.arange(before.shape[1], dtype=jnp.int32)
    old = made.raw(params, before, column)
    held = ring.advance(held, jnp.zeros_like(start), old, start)
    positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
    raw = made.raw(params, x, positions)
    return close_many(made.pooling, params["norm"], held, raw, start, count)


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("ratio, overlap", CASES)
def test_entries_that_close_within_a_call(ratio: int, overlap: bool, size: int) -> None:
    made, params = build(ratio, overlap)
    start = np.arange(3 * ratio, dtype=np.int32)  # every offset, in the first three groups
    count = np.random.default_rng(size).integers(0, size + 1, start.size).astype(np.int32)
    count[::2] = size
    before = inputs(start.size, 3 * ratio)
    x = inputs(start.size, size) * 2 + 1
    entries, first, done = map(np.asarray, run_many(made, params, before, x, start, count))
    closed = 0
    for row, (at, n) in enumerate(zip(start, count, strict=True)):
        whole = np.concatenate([before[row, :at], x[row, :n]])
        assert first[row] == at // ratio
        assert done[row] == (at + n) // ratio - at // ratio <= entries.shape[1]
        for j in range(done[row]):
            want = entry(made, params, whole, first[row] + j)
            np.testing.assert_allclose(entries[row, j], want, atol=2e-5)
            closed += 1
    assert closed > 0


@functools.partial(jax.jit, static_argnums=0)
def run_one(made: Compressor, params: Params, x: jax.Array, position: jax.Array) -> jax.Array:
    """The entry that each row's position closes, its ring written up to it."""
    held = jnp.full((x.shape[0], made.keep + made.ratio, 2 * made.series), jnp.nan)
    raw = made.raw(params, x, jnp.arange(x.shape[1], dtype=jnp.int32))
    held = ring.advance(held, jnp.zeros_like(position), raw, position + 1)
    return close_one(made.pooling, params["norm"], held[None], jnp.int32(0), position)


@pytest.mark.parametrize("ratio, overlap", CASES)
def test_entry_that_one_token_closes(ratio: int, overlap: bool) -> None:
    made, params = build(ratio, overlap)
    position = np.arange(4 * ratio, dtype=np.int32)
    x = inputs(position.size, 4 * ratio)
    found = np.asarray(run_one(made, params, x, position))
    for row, at in enumerate(position):
        if (at + 1) % ratio == 0:
            want = entry(made, params, x[row], at // ratio)
            np.testing.assert_allclose(found[row], want, atol=2e-5)


def test_nothing_is_computed_when_no_group_closes() -> None:
    made, params = build(3, True)
    position = np.array([0, 1, 3, 4], np.int32)
    found = np.asarray(run_one(made, params, inputs(4, 12), position))
    assert not found.any()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Compressor(D_MODEL, WIDTH, 1, True, ROPE, EPS, "float32")
    with pytest.raises(ValueError, match="exceeds"):
        Compressor(D_MODEL, 2, 4, True, ROPE, EPS, "float32")
