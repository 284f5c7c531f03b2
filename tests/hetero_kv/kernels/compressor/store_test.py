"""Entries that a call stores, against loops over tokens: ragged rows, any ratio and page table."""

import dataclasses
import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention.pool import Paged
from hetero_kv.attention.rope import Rope
from hetero_kv.kernels.compressor import api, pallas_gpu
from hetero_kv.kernels.compressor.reference import Pooling
from tests import variants
from tests.hetero_kv.kernels import memory, strict

WIDTH, EPS, LAYERS, ROWS = 128, 1e-6, 2, 3
ROPE = Rope(8, 100.0)


class Case(NamedTuple):
    """One call. Everything that may not be read, or is not to be changed, is NaN."""

    how: Pooling
    pool: jax.Array | Paged
    layer: np.int32
    norm: np.ndarray
    tail: np.ndarray
    raw: np.ndarray | None
    start: np.ndarray
    count: np.ndarray
    sequence: np.ndarray  # f32[R, T, 2 * series], all raw rows from position 0

    @property
    def arrays(self) -> tuple:
        return self[1:8]


def make(
    seed: int,
    ratio: int,
    overlap: bool,
    dtype: str = "float32",
    size: int | None = 8,
    entries: int = 4,
    paged: bool = True,
) -> Case:
    """size: tokens of the call; None: one token, whose row is in the ring already."""
    rng = np.random.default_rng(seed)
    how = Pooling(ratio, WIDTH, overlap, ROPE, EPS, dtype)
    columns = size or 1
    start = rng.integers(0, 4 * ratio, ROWS).astype(np.int32)
    start[0] = (start[0] // ratio + 1) * ratio - 1  # its first token closes a group
    count = rng.integers(0, columns + 1, ROWS).astype(np.int32)
    count[0] = columns
    total = int((start + count).max())
    sequence = rng.normal(size=(ROWS, max(total, 1), 2 * how.series)).astype(np.float32)
    tail = np.full((LAYERS, ROWS, how.held, 2 * how.series), np.nan, np.float32)
    raw = np.full((ROWS, columns, 2 * how.series), np.nan, np.float32)
    layer = np.int32(rng.integers(LAYERS))
    for r in range(ROWS):
        known = start[r] if size else start[r] + count[r]
        for position in range(max(known - how.held, 0), known):
            tail[layer, r, position % how.held] = sequence[r, position]
        raw[r, : count[r]] = sequence[r, start[r] : start[r] + count[r]]
    needed = 5 + (columns + ratio) // ratio
    pages = -(-needed // entries)
    if paged:
        ids = rng.permutation(ROWS * pages + 2)[: ROWS * pages].reshape(ROWS, pages)
        ids = ids.astype(np.int32)
        ids[1, rng.integers(pages)] = rng.choice([-1, ROWS * pages + 2])  # may not be written
        array = np.full((LAYERS, ROWS * pages + 2, entries, WIDTH), np.nan, jnp.dtype(dtype))
        pool = Paged(jnp.asarray(array), jnp.full_like(ids, -1), jnp.asarray(ids))
    else:
        pool = jnp.full((LAYERS, ROWS, pages * entries, WIDTH), jnp.nan, dtype)
    norm = rng.normal(size=WIDTH).astype(np.float32)
    return Case(how, pool, layer, norm, tail, raw if size else None, start, count, sequence)


def entry(case: Case, row: int, index: int) -> np.ndarray:
    """Entry `index` of a row, token by token in float64."""
    how, m = case.how, case.how.ratio
    rows = [(m * index + j, how.series - WIDTH) for j in range(m)]
    if how.overlap and index:
        rows += [(m * (index - 1) + j, 0) for j in range(m)]
    taken = [case.sequence[row, t].astype(np.float64) for t, _ in rows]
    kv = np.array([x[at : at + WIDTH] for x, (_, at) in zip(taken, rows, strict=True)])
    gate = [x[how.series + at :][:WIDTH] for x, (_, at) in zip(taken, rows, strict=True)]
    weight = np.exp(np.array(gate) - np.max(gate, axis=0))
    pooled = (weight * kv).sum(0) / weight.sum(0)
    x = pooled / np.sqrt(np.mean(pooled**2) + EPS) * case.norm
    angle = m * index * 100.0 ** (-np.arange(4) / 4)
    pair = x[-8:].reshape(4, 2) @ np.array([1, 1j]) * np.exp(1j * angle)
    x[-8:] = np.stack([pair.real, pair.imag], -1).reshape(-1)
    return x


def check(case: Case, pool: jax.Array | Paged) -> int:
    """Compares the whole pool, so that what must not change is seen too; how many entries came."""
    paged = isinstance(case.pool, Paged)
    before = np.asarray(case.pool.pages if paged else case.pool).astype(np.float32)
    want, many = before.copy(), 0
    for r in range(ROWS):
        first = case.start[r] // case.how.ratio
        for index in range(first, (case.start[r] + case.count[r]) // case.how.ratio):
            column, place = divmod(index, before.shape[2])
            page = int(case.pool.write[r, column]) if paged else r
            place = place if paged else index
            if 0 <= page < before.shape[1]:
                want[case.layer, page, place] = entry(case, r, index)
                many += 1
    got = np.asarray(pool.pages if paged else pool)
    assert got.dtype == jnp.dtype(case.how.dtype)
    tolerance = 2e-5 if case.how.dtype == "float32" else 3e-2
    np.testing.assert_allclose(got.astype(np.float32), want, atol=tolerance, rtol=tolerance)
    return many


@functools.partial(jax.jit, static_argnums=0, static_argnames="implementation")
def run(how: Pooling, *arrays, implementation: str = "auto"):
    return api.store(how, *arrays, implementation=implementation)


KINDS = {  # ratio, overlap, tokens of the call, entries of a page, dtype
    "csa": (4, True, 8, 4, "bfloat16"),
    "csa decode": (4, True, None, 4, "float32"),
    "short": (3, False, 1, 64, "float32"),
    "hca": (24, False, 40, 1, "float32"),
    "hca decode": (24, False, None, 2, "bfloat16"),
    "long overlap": (20, True, 24, 3, "float32"),
}


@pytest.mark.parametrize("name", KINDS)
def test_reference(name: str) -> None:
    ratio, overlap, size, entries, dtype = KINDS[name]
    many = 0
    for seed in range(4):
        case = make(seed, ratio, overlap, dtype, size, entries)
        many += check(case, run(case.how, *case.arrays))
    assert many > 0


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16"]), st.booleans()
)
def test_any_lengths_and_tables(seed: int, dtype: str, paged: bool) -> None:
    case = make(seed, 4, True, dtype, paged=paged)
    check(case, run(case.how, *case.arrays))


@pytest.mark.parametrize("name", variants.some(KINDS, ("csa", "hca", "hca decode")))
def test_tpu_kernel(name: str) -> None:
    ratio, overlap, size, entries, dtype = KINDS[name]
    case = make(ratio, ratio, overlap, dtype, size, entries)
    got = strict.tpu(lambda: run(case.how, *case.arrays, implementation="interpret"))
    assert check(case, got) > 0


def test_tpu_kernel_on_a_contiguous_pool_in_tiles() -> None:
    case = make(0, 2, True, size=16, entries=32, paged=False)
    got = strict.tpu(lambda: run(case.how, *case.arrays, implementation="interpret"))
    assert check(case, got) > 3


@pytest.mark.parametrize("name", variants.some(KINDS, ("csa", "hca decode")))
def test_gpu_kernel(name: str) -> None:
    ratio, overlap, size, entries, dtype = KINDS[name]
    interpreter = strict.gpu_interpreter()
    case = make(ratio, ratio, overlap, dtype, size, entries)
    arrays = jax.tree.map(jnp.asarray, case.arrays)
    assert check(case, pallas_gpu.store(case.how, *arrays, interpret=interpreter)) > 0


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans())
def test_any_lengths_and_tables_on_tpu(seed: int, paged: bool) -> None:
    case = make(seed, 4, True, paged=paged)
    check(case, strict.tpu(lambda: run(case.how, *case.arrays, implementation="interpret")))


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans())
def test_any_lengths_and_tables_on_gpu(seed: int, paged: bool) -> None:
    case = make(seed, 4, True, paged=paged)
    check(case, _on_gpu(case.how)(*jax.tree.map(jnp.asarray, case.arrays)))


@functools.cache
def _on_gpu(how: Pooling):
    interpreter = strict.gpu_interpreter()
    return jax.jit(functools.partial(pallas_gpu.store, how, interpret=interpreter))


def test_nothing_closes() -> None:
    case = make(0, 4, True)
    for implementation in ("reference", "interpret"):
        arrays = (*case.arrays[:-1], np.zeros(ROWS, np.int32))
        out = run(case.how, *arrays, implementation=implementation)
        assert np.isnan(np.asarray(out.pages)).all()


@pytest.mark.parametrize(
    "index, value, message",
    [
        (0, jnp.zeros((LAYERS, ROWS, 8, 64)), "the pool must be"),
        (1, np.float32(1), "layer must be"),
        (2, np.zeros(3, np.float32), "norm must be"),
        (3, np.zeros((LAYERS, ROWS, 3, 512), np.float32), "tail must be"),
        (4, np.zeros((ROWS, 8, 256), np.float32), "raw must be"),
        (4, np.zeros((ROWS, 8, 512), jnp.bfloat16), "float32"),
        (5, np.zeros(2, np.int32), "i32"),
    ],
)
def test_wrong_input(index: int, value: np.ndarray, message: str) -> None:
    case = make(0, 4, True)
    arrays = list(case.arrays)
    arrays[index] = value
    with pytest.raises(ValueError, match=message):
        api.store(case.how, *arrays)


def test_sizes_that_are_no_integers() -> None:
    for changes, message in (({"ratio": 4.0}, "ratio=4.0"), ({"ratio": 1}, "at least 2")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(Pooling(4, 16, True, ROPE, EPS, "float32"), **changes)


def test_what_a_backend_cannot() -> None:
    how = Pooling(4, 16, True, ROPE, EPS, "float32")
    shapes = (
        jnp.zeros((1, 1, 8, 16)),
        jnp.int32(0),
        jnp.ones(16),
        jnp.zeros((1, 1, 8, 64)),
        None,
        jnp.zeros(1, jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    api.store(how, *shapes)
    for implementation in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(NotImplementedError, match="multiple of 128"):
            api.store(how, *shapes, implementation=implementation)


SHAPES = {  # ratio, overlap, width, rope dim, tokens of a call, entries of a page, layers, rows
    "tiny": (4, True, 128, 8, 8, 4, 2, 3),
    "csa entries": (4, True, 512, 64, 512, 32, 21, 8),
    "csa decode": (4, True, 512, 64, None, 32, 30, 8),
    "index keys": (4, True, 128, 64, 512, 32, 21, 8),
    "hca entries": (128, False, 512, 64, 512, 1, 20, 8),
    "hca decode": (128, False, 512, 64, None, 32, 31, 8),
}


@pytest.mark.parametrize("name", variants.some(SHAPES, ("tiny", "csa entries", "hca decode")))
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers(name: str, platform: str) -> None:
    ratio, overlap, width, rope, size, entries, layers, rows = SHAPES[name]
    shape = jax.ShapeDtypeStruct
    table = shape((rows, 64), jnp.int32)
    for dtype in ("float32", "bfloat16"):
        how = Pooling(ratio, width, overlap, Rope(rope, 160000.0), EPS, dtype)
        arrays = (
            Paged(shape((layers, 600, entries, width), jnp.dtype(dtype)), table, table),
            shape((), jnp.int32),
            shape((width,), jnp.float32),
            shape((layers, rows, how.held, 2 * how.series), jnp.float32),
            size and shape((rows, size, 2 * how.series), jnp.float32),
            shape((rows,), jnp.int32),
            shape((rows,), jnp.int32),
        )
        implementation = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform]
        text = strict.lowered(
            functools.partial(api.store, how, implementation=implementation), platform, *arrays
        )
        assert strict.kernels_in(text, platform) == 1
        store = functools.partial(api.store, how, implementation=implementation)
        # At most the tables of the rotation, and the call's rows where they are padded.
        most = max(rows * (how.most(size or 1) + 64) * 128, rows * -(-(size or 1) // 8) * 8 * 512)
        assert memory.largest(store, *arrays) <= most
