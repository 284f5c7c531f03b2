"""Chunk attention against loops over queries and heads: lengths, windows, entries, choices."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import selection
from hetero_kv.attention.pool import Paged
from hetero_kv.kernels.chunk_attention import pallas_gpu, pallas_tpu
from hetero_kv.kernels.chunk_attention.api import chunk_attention
from hetero_kv.kernels.chunk_attention.operands import Chosen, Entries, Operands, Rule, Window
from hetero_kv.packing import Packing
from tests import variants
from tests.hetero_kv.kernels import memory, pools, strict

ROWS = 2


class Shape(NamedTuple):
    """What is static of a call. width 0: no window; ratio 0: no entries; topk 0: all of them."""

    heads: int = 8
    channels: int = 16
    size: int = 16
    width: int = 6
    ratio: int = 4
    capacity: int = 16
    page: int = 4
    topk: int = 0
    dtype: str = "float32"
    paged: bool = True

    @property
    def rule(self) -> Rule:
        return Rule(self.channels**-0.5, self.ratio, 4)


class Case(NamedTuple):
    """One call, and what the oracle needs: all rows by position, all entries, the choices."""

    shape: Shape
    operands: Operands
    rows: np.ndarray  # f32[R, T, c]
    entries: np.ndarray  # f32[R, capacity, c]
    chosen: np.ndarray  # bool[R, S, capacity]


def make(
    seed: int,
    shape: Shape,
    sinks: bool = True,
    replay: bool = False,
    packing: Packing | None = None,
) -> Case:
    rng = np.random.default_rng(seed)
    size, channels, dtype = shape.size, shape.channels, jnp.dtype(shape.dtype)

    def numbers(*sizes: int) -> np.ndarray:
        return rng.normal(size=sizes).astype(dtype)

    longest = shape.ratio * shape.capacity if shape.ratio else 40
    start = rng.integers(0, longest - size + 1, ROWS).astype(np.int32)
    count = rng.integers(0, size + 1, ROWS).astype(np.int32)
    count[0] = size
    rows, entries = numbers(ROWS, longest, channels), numbers(ROWS, shape.capacity, channels)
    entries[:, :1] = entries[0, :1]  # so that the first page can be shared
    held, entries = pools.quantised(packing, entries)
    window = picked = None
    if shape.width:
        ring = np.full((2, ROWS, shape.width, channels), np.nan, dtype)
        first = np.maximum(start - 3, 0) if replay else np.zeros_like(start)
        kv = numbers(ROWS, size, channels)
        for r in range(ROWS):
            for p in range(max(start[r] - shape.width + 1, first[r]), start[r]):
                ring[1, r, p % shape.width] = rows[r, p]
            kv[r, : count[r]] = rows[r, start[r] : start[r] + count[r]]
        rows = np.where((np.arange(longest) < first[:, None])[..., None], np.nan, rows)
        window = Window(ring, kv, first.astype(np.int32))
    chosen = np.ones((ROWS, size, shape.capacity), bool)
    layer = np.int32(1)
    if shape.ratio:
        visible = (start + count) // shape.ratio
        if shape.paged:
            shared = int(shape.page == 1 and visible.min() > 0)
            made = pools.paged(rng, held, visible, shape.page, shared=shared)
            table, layer = jnp.asarray(made.table), made.layer
            pool = Paged(jnp.asarray(made.pages), table, table)
        else:
            pool = pools.poison((2, *held.shape), held.dtype)
            for r in range(ROWS):
                pool[1, r, : visible[r]] = held[r, : visible[r]]
        if shape.topk:
            chosen, picked = choices(rng, shape, start)
        picked = Entries(pools.packed(packing, pool), picked)
    if window is not None and layer != 1:
        window = window._replace(rows=window.rows[::-1])
    heads = numbers(shape.heads).astype(np.float32) if sinks else None
    q = numbers(ROWS, size, shape.heads, channels)
    operands = Operands(q, heads, layer, start, count, window, picked)
    return Case(shape, jax.tree.map(jnp.asarray, operands), rows, entries, chosen)


def choices(rng: np.random.Generator, shape: Shape, start: np.ndarray) -> tuple:
    """The top k of scores with ties, by sorting; and the operand that says the same."""
    scores = rng.integers(-3, 3, (ROWS, shape.size, shape.capacity)).astype(np.float32)
    index = np.arange(shape.capacity)
    seen = index < ((start[:, None] + np.arange(shape.size) + 1) // shape.ratio)[..., None]
    best = np.argsort(np.where(seen, -scores, np.inf), axis=-1, kind="stable")[..., : shape.topk]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, best, True, axis=-1)
    order = selection.order_keys(jnp.asarray(scores), jnp.asarray(seen))
    low, cut = selection.thresholds(order, shape.topk, jnp.int32(1), shape.capacity)
    return chosen & seen, Chosen(order, low, cut)


def check(case: Case, found) -> None:
    """Compares every query that runs; the others must be finite."""
    o, shape = case.operands, case.shape
    found = np.asarray(found)
    assert found.dtype == np.float32 and found.shape == o.q.shape and np.isfinite(found).all()
    q, sinks = np.asarray(o.q, np.float64), o.sinks
    tolerance = 3e-6 if shape.dtype == "float32" else 2e-2
    for r in range(ROWS):
        first = 0 if o.window is None else int(o.window.first[r])
        for j in range(int(o.count[r])):
            t = int(o.start[r]) + j
            keys = []
            if shape.width:
                keys += [case.rows[r, p] for p in range(max(t - shape.width + 1, first), t + 1)]
            if shape.ratio:
                seen = case.chosen[r, j, : (t + 1) // shape.ratio]
                keys += list(case.entries[r, : seen.size][seen])
            keys = np.array(keys, np.float64).reshape(-1, shape.channels)
            weight = np.exp(q[r, j] @ keys.T * shape.channels**-0.5)  # [H, K]
            total = weight.sum(axis=1) + (0 if sinks is None else np.exp(np.float64(sinks)))
            want = weight @ keys / np.where(total > 0, total, 1)[:, None]
            np.testing.assert_allclose(found[r, j], want, atol=tolerance, rtol=tolerance)


@functools.partial(jax.jit, static_argnames=("rule", "implementation", "tiles"))
def run(operands: Operands, rule: Rule, implementation: str = "reference", tiles=None):
    rest = operands._asdict()
    q = rest.pop("q")
    return chunk_attention(q, **rest, rule=rule, implementation=implementation, tiles=tiles)


SHAPES = {
    "sliding": Shape(ratio=0),
    "wide sliding": Shape(ratio=0, width=24, size=8),
    "dense": Shape(paged=False),
    "dense, no window": Shape(width=0, page=8),
    "one entry a page": Shape(page=1, ratio=8, capacity=8),
    "chosen": Shape(topk=3, page=8),
    "fewer than k": Shape(topk=32, capacity=8, size=1),
    "half precision": Shape(dtype="bfloat16", page=16, topk=3),
}


@pytest.mark.parametrize("name", SHAPES)
@hypothesis.settings(max_examples=2)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), replay=st.booleans())
def test_reference(name: str, seed: int, replay: bool) -> None:
    case = make(seed, SHAPES[name], replay=replay)
    check(case, run(case.operands, case.shape.rule))


@pytest.mark.parametrize("name", variants.some(SHAPES, ("sliding", "chosen", "half precision")))
def test_tpu_kernel(name: str) -> None:
    case = make(len(name), SHAPES[name], sinks=name != "dense", replay=name == "chosen")
    tiles = pallas_tpu.Tiles(queries=min(8, case.shape.size), entries=8)
    check(case, strict.tpu(lambda: run(case.operands, case.shape.rule, "interpret", tiles)))


GPU_SHAPES = {
    "dense": Shape(8, 128, 24, 16, 4, 32, 8, dtype="bfloat16"),
    "chosen": Shape(64, 128, 2, 8, 4, 64, 16, topk=5, dtype="bfloat16"),
    "sliding": Shape(64, 128, 3, 72, 0, dtype="bfloat16"),
    "no window": Shape(8, 128, 8, 0, 4, 72, 8, dtype="bfloat16"),
    "float32": Shape(8, 64, 9, 6, 4, 16, 4),
    "float32, chosen": Shape(64, 256, 1, 6, 4, 64, 2, topk=5),
    "float32, no window": Shape(16, 64, 8, 0, 4, 32, 8, paged=False),
}


@pytest.mark.parametrize("name", variants.some(GPU_SHAPES, ("dense", "chosen", "float32")))
def test_gpu_kernel(name: str) -> None:
    interpreter = strict.gpu_interpreter()
    case = make(len(name), GPU_SHAPES[name], sinks=name != "sliding")
    pallas_gpu.check(case.shape.rule, case.operands)
    check(case, pallas_gpu.run(case.shape.rule, case.operands, interpret=interpreter))


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), replay=st.booleans(), ratio=st.booleans())
def test_any_lengths_and_tables_on_tpu(seed: int, replay: bool, ratio: bool) -> None:
    case = make(seed, Shape(topk=3, ratio=8, capacity=8) if ratio else Shape(topk=20), True, replay)
    tiles = pallas_tpu.Tiles(queries=8, entries=8)
    check(case, strict.tpu(lambda: run(case.operands, case.shape.rule, "interpret", tiles)))


@pytest.mark.full
@hypothesis.settings(max_examples=4)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), replay=st.booleans())
def test_any_lengths_and_tables_on_gpu(seed: int, replay: bool) -> None:
    case = make(seed, GPU_SHAPES["chosen"], True, replay)
    check(case, _on_gpu(case.shape.rule)(case.operands))


@functools.cache
def _on_gpu(rule: Rule):
    interpreter = strict.gpu_interpreter()
    return jax.jit(functools.partial(pallas_gpu.run, rule, interpret=interpreter))


PACKED = {
    "published": (Shape(channels=512, page=32, capacity=32), Packing("fp8_rope", 512, rope=64)),
    "chosen": (Shape(topk=3, page=8), Packing("fp8_rope", 16, rope=8)),
    "contiguous": (Shape(paged=False), Packing("int8", 16)),
}


@pytest.mark.parametrize("name", variants.some(PACKED, ("chosen",)))
def test_reference_of_quantised_entries(name: str) -> None:
    case = make(0, *PACKED[name][:1], packing=PACKED[name][1])
    check(case, run(case.operands, case.shape.rule))
    with pytest.raises(NotImplementedError, match="does not read packed rows"):
        run(case.operands, case.shape.rule, "pallas_gpu")


@pytest.mark.parametrize("name", variants.some(PACKED, ("chosen",)))
def test_tpu_kernel_of_quantised_entries(name: str) -> None:
    case = make(1, *PACKED[name][:1], packing=PACKED[name][1])
    tiles = pallas_tpu.Tiles(queries=8, entries=32 if name == "published" else 8)
    check(case, strict.tpu(lambda: run(case.operands, case.shape.rule, "interpret", tiles)))


def test_a_page_that_is_none_gives_nan_where_it_is_read() -> None:
    case = make(0, Shape(width=0))
    entries, start = case.operands.entries, jnp.array([40, 40], jnp.int32)
    table = entries.pool.read.at[0].set(jnp.array([0, 1, 2, 3])).at[1].set(-1)
    pages = jnp.zeros_like(entries.pool.pages)
    pool = Paged(pages, table, table)
    operands = case.operands._replace(entries=Entries(pool, None), start=start, count=start * 0 + 4)
    outs = strict.tpu(
        lambda: [run(operands, case.shape.rule, x) for x in ("reference", "interpret")]
    )
    for out in outs:
        assert not out[0, :4].any() and np.isnan(out[1, :4]).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(q=jnp.zeros((2, 16, 8))), "q must be"),
        (dict(start=jnp.zeros(3, jnp.int32)), "start must be"),
        (dict(sinks=jnp.zeros(3)), "sinks must be"),
        (dict(window=None, entries=None), "neither"),
        (dict(layer=jnp.float32(1)), "layer must be"),
    ],
)
def test_wrong_input(changes: dict, message: str) -> None:
    case = make(0, Shape())
    with pytest.raises(ValueError, match=message):
        run(case.operands._replace(**changes), case.shape.rule)


def test_more_wrong_input() -> None:
    case = make(0, Shape(topk=2))
    with pytest.raises(ValueError, match="ratio"):
        run(case.operands, Rule(1.0))
    with pytest.raises(ValueError, match="tile"):
        run(case.operands, Rule(1.0, 4, 1000))
    for wrong, message in [((4.0, 4), "ratio=4.0"), ((4, 8.0), "tile=8.0"), ((4, 0), "tile=0")]:
        with pytest.raises(ValueError, match=message):
            Rule(1.0, *wrong)
    with pytest.raises(ValueError, match=r"queries=2.5"):
        pallas_tpu.Tiles(queries=2.5)
    with pytest.raises(ValueError, match="tiles=8 must be"):
        chunk_attention(**case.operands._asdict(), rule=case.shape.rule, tiles=8)
    chosen = case.operands.entries.chosen
    entries = case.operands.entries._replace(chosen=chosen._replace(order=chosen.order[..., 1:]))
    with pytest.raises(ValueError, match="order"):
        run(case.operands._replace(entries=entries), case.shape.rule)


def test_what_a_backend_cannot() -> None:
    case = make(0, Shape())
    with pytest.raises(NotImplementedError, match="16 channels of float32"):
        run(case.operands, case.shape.rule, "pallas_gpu")
    mixed = case.operands._replace(q=case.operands.q.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="all float32, or all bfloat16"):
        run(mixed, case.shape.rule, "pallas_gpu")
    with pytest.raises(NotImplementedError, match="divide"):
        run(case.operands, case.shape.rule, "pallas_tpu", pallas_tpu.Tiles(queries=5))


LOWERED = {
    "tiny": Shape(64, 128, 8, 16, 4, 64, 16, topk=3),
    "Flash sliding": Shape(64, 512, 512, 128, 0),
    "Flash csa, 64k tokens": Shape(64, 512, 512, 128, 4, 1 << 14, 32, topk=512),
    "Flash hca, 1M tokens": Shape(64, 512, 512, 128, 128, 1 << 13, 32),
    "Pro csa, 64k tokens": Shape(128, 512, 512, 128, 4, 1 << 14, 64, topk=1024),
    "Pro hca, 1M tokens": Shape(128, 512, 512, 128, 128, 1 << 13, 8),
}


def abstract(shape: Shape, rows: int = 2, layers: int = 20) -> Operands:
    def of(*sizes: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    heads, channels, size, width, dtype = *shape[:4], shape.dtype
    window = entries = None
    if width:
        ring = of(layers, rows, width, channels, dtype=dtype)
        window = Window(ring, of(rows, size, channels, dtype=dtype), of(rows))
    if shape.ratio:
        columns = shape.capacity // shape.page
        table = of(rows, columns)
        pages = of(layers, rows * columns + 1, shape.page, channels, dtype=dtype)
        chosen = None
        if shape.topk:
            order = of(rows, size, shape.capacity, dtype="uint32")
            chosen = Chosen(order, of(rows, size, dtype="uint32"), of(rows, size))
        entries = Entries(Paged(pages, table, table), chosen)
    q = of(rows, size, heads, channels, dtype=dtype)
    return Operands(q, of(heads, dtype="float32"), of(), of(rows), of(rows), window, entries)


@pytest.mark.parametrize("name", variants.some(LOWERED, ("tiny", "Pro csa, 64k tokens")))
@pytest.mark.parametrize(
    "platform, dtype",
    [("tpu", "float32"), ("tpu", "bfloat16"), ("cuda", "float32"), ("cuda", "bfloat16")],
)
def test_lowers_to_one_kernel_that_writes_no_scores(platform: str, dtype: str, name: str) -> None:
    shape = LOWERED[name]._replace(dtype=dtype)
    operands = abstract(shape)
    implementation = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform]
    call = functools.partial(run, rule=shape.rule, implementation=implementation)
    assert strict.kernels_in(strict.lowered(call, platform, operands), platform) == 1
    # The output is the largest array: no scores [R, S, H, N], no copy of the entries.
    assert memory.largest(call, operands) == operands.q.size
