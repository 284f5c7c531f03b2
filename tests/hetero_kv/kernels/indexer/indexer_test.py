"""The indexer against the equations: the reference, and the TPU kernel interpreted."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_kv.kernels.indexer import pallas_tpu
from hetero_kv.kernels.indexer.api import select
from hetero_kv.packing import Packed, Packing
from tests import variants
from tests.hetero_kv.kernels import strict
from tests.hetero_kv.kernels.indexer import oracle
from tests.hetero_kv.kernels.indexer.oracle import Case

CASES = {
    "paged": Case(visible=(0, 5, 100, 256), k=16),
    "contiguous": Case(visible=(7, 200), k=16, page=0),
    "ties": Case(visible=(60, 256, 33), k=40, values=1),
    "zeros": Case(visible=(100, 256, 16), k=24, heads=1, values=1),
    "k beyond the capacity": Case(visible=(3, 256, 200), k=300, values=2),
    "k beyond a line": Case(visible=(180, 256, 130), k=130),
    "large pages": Case(visible=(100, 256), k=16, page=128),
    "small pages": Case(visible=(100, 256), k=16, page=2),
    "shared pages": Case(visible=(100, 256, 200), k=16, shared=3),
    "bfloat16": Case(visible=(100, 256), k=16, page=16, dtype="bfloat16"),
    "bfloat16, exact": Case(visible=(100, 256), k=16, page=16, dtype="bfloat16", values=3),
}
PACKED = {
    "published": Case(visible=(100, 256, 9), k=16, dim=128, page=32, packing=Packing("fp4", 128)),
    "fp4, ties": Case(visible=(60, 256), k=40, values=1, packing=Packing("fp4", 16)),
    "fp8": Case(visible=(5, 200), k=16, page=0, dim=128, packing=Packing("fp8_f32", 128)),
    "fp4, half precision": Case(
        visible=(100, 256), k=16, page=64, dtype="bfloat16", shared=1, packing=Packing("fp4", 16)
    ),
}
SMALL = pallas_tpu.Tiles(entries=128)
INTERPRET = {"implementation": "interpret", "tiles": SMALL}


@functools.partial(jax.jit, static_argnames=("k", "tile", "implementation", "tiles"))
def _program(q, weights, keys, layer, visible, k, tile, implementation="auto", tiles=None):
    return select(
        q,
        weights,
        keys,
        layer=layer,
        visible=visible,
        k=k,
        tile=tile,
        implementation=implementation,
        tiles=tiles,
    )


def _run(data: oracle.Data, k: int, **options) -> np.ndarray:
    arrays = (data.q, data.weights, data.keys, data.layer, data.visible)
    run = functools.partial(_program, *arrays, k=k, tile=64, **options)
    return strict.tpu(run) if options.get("implementation") == "interpret" else np.asarray(run())


def _compare(picked: np.ndarray, data: oracle.Data, case: Case) -> None:
    assert picked.shape == (len(case.visible), case.k)
    slack = 0.0 if case.values else 1e-3
    for r, scores in enumerate(data.scores):
        oracle.compare(picked[r], scores, case.k, slack)


@pytest.mark.parametrize("name", CASES)
def test_reference_is_what_the_equations_say(name: str) -> None:
    case = CASES[name]
    data = oracle.make(case)
    _compare(_run(data, case.k), data, case)


@pytest.mark.parametrize("name", variants.some(CASES, ("k beyond a line", "bfloat16, exact")))
def test_tpu_kernel_is_what_the_equations_say(name: str) -> None:
    case = CASES[name]
    data = oracle.make(case)
    _compare(_run(data, case.k, **INTERPRET), data, case)


@pytest.mark.parametrize("name", variants.some(PACKED, ("fp8",)))
def test_reference_of_quantised_keys(name: str) -> None:
    case = PACKED[name]
    data = oracle.make(case)
    _compare(_run(data, case.k), data, case)


@pytest.mark.parametrize("name", variants.some(PACKED, ("published", "fp4, ties")))
def test_tpu_kernel_of_quantised_keys(name: str) -> None:
    case = PACKED[name]
    data = oracle.make(case)
    _compare(_run(data, case.k, **INTERPRET), data, case)


def test_ties_are_there_and_cut_within_a_tile() -> None:
    data = oracle.make(CASES["ties"])
    scores = data.scores[1]
    bar = np.sort(scores)[-40]
    tied = np.flatnonzero(scores == bar)
    assert len(tied) > 1 and np.sum(scores >= bar) > 40, "the case has no tie at its k-th score"
    for options in ({}, INTERPRET):
        picked = set(_run(data, 40, **options)[1].tolist())
        kept = [i for i in tied if i in picked]
        assert kept == tied[: len(kept)].tolist()


@hypothesis.settings(max_examples=5)
@hypothesis.given(draw=st.data())
def test_any_lengths_and_tables(draw: st.DataObject) -> None:
    # Shapes are fixed, so that only the first examples compile.
    case = Case(
        visible=tuple(draw.draw(st.integers(0, 256), f"visible {r}") for r in range(3)),
        k=40,
        values=draw.draw(st.sampled_from([1, 4]), "values"),
        shared=draw.draw(st.integers(0, 3), "shared pages"),
    )
    data = oracle.make(case, draw.draw(st.integers(0, 2**16), "seed"))
    _compare(_run(data, case.k), data, case)
    _compare(_run(data, case.k, **INTERPRET), data, case)


@pytest.mark.full
def test_more_than_one_block_of_rows() -> None:
    """Entries beyond 128 rows of 128 are lined up after the first ones."""
    case = Case(
        visible=(17_000, 16_384), k=300, capacity=17_408, page=1024, heads=1, dim=8, values=9
    )
    data = oracle.make(case)
    tiles = pallas_tpu.Tiles(entries=1024)
    _compare(_run(data, case.k, implementation="interpret", tiles=tiles), data, case)


def test_lengths_tables_and_layers_are_values() -> None:
    before = _program._cache_size()
    for seed, visible in enumerate([(60, 256, 33), (0, 1, 2), (256, 256, 9)]):
        _run(oracle.make(Case(visible=visible, k=40), seed), 40, **INTERPRET)
    assert _program._cache_size() <= before + 1


@pytest.mark.full
def test_the_capacity_and_the_batch_do_not_matter() -> None:
    case = Case(visible=(60, 100), k=40, values=1)
    data = oracle.make(case)
    wide = oracle.Data(
        data.q[1:],
        data.weights[1:],
        data.keys._replace(read=np.pad(data.keys.read[1:], ((0, 0), (0, 8)), constant_values=-1)),
        data.visible[1:],
        data.layer,
        data.scores[1:],
    )
    for options in ({}, INTERPRET):
        one, both = _run(wide, 40, **options)[0], _run(data, 40, **options)[1]
        np.testing.assert_array_equal(one, both)


def test_keys_of_a_page_that_is_none_are_nan_and_stand_out() -> None:
    case = Case(visible=(60, 256, 33), k=40, values=1)
    data = oracle.make(case)
    for bad in (-1, 10**6):
        table = data.keys.read.copy()
        table[1, 2] = bad
        changed = data.keys._replace(read=table)
        broken = oracle.Data(data.q, data.weights, changed, data.visible, data.layer, data.scores)
        for options in ({}, INTERPRET):
            picked = _run(broken, 40, **options)
            assert set(range(16, 24)) <= set(picked[1].tolist())
            for r in (0, 2):
                oracle.compare(picked[r], data.scores[r], 40, 0.0)


def test_wrong_arguments() -> None:
    data = oracle.make(Case(visible=(9, 20), k=4))

    def call(q=data.q, weights=data.weights, keys=data.keys, visible=data.visible, k=4, **options):
        return select(q, weights, keys, layer=data.layer, visible=visible, k=k, **options)

    for changes, message in [
        (dict(q=data.q[0]), "q must be"),
        (dict(weights=data.weights[:1]), "weights must be"),
        (dict(weights=data.weights.astype(jnp.bfloat16)), "weights must be float32"),
        (dict(visible=data.visible[:1]), "visible must be"),
        (dict(visible=data.visible.astype(np.uint32)), "int32"),
        (dict(keys=np.zeros((2, 2, 64, 8), np.float32)), "keys must be"),
        (dict(keys=np.zeros((2, 2, 65, 16), np.float32)), "tile=64"),
        (dict(k=0), "k=0"),
        (dict(k=4.0), "k=4.0 must be an integer, not float"),
        (dict(k=True), "k=True"),
        (dict(tile=8.0), "tile=8.0"),
        (dict(tile=0), "tile=0"),
        (dict(tiles=8, implementation="pallas_tpu"), "tiles=8 must be a .*pallas_tpu.Tiles"),
        (dict(tiles=pallas_tpu.Tiles(), implementation="pallas_gpu"), "pallas_gpu.Tiles"),
        (dict(q=data.q.astype(np.int32)), "floating"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**changes)
    pages = jnp.asarray(data.keys.pages, jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="quantised"):
        call(keys=data.keys._replace(pages=pages))
    packed = Packed(data.keys, Packing("fp4", 16))
    with pytest.raises(ValueError, match=r"keys.pages must be .* 12"):
        call(keys=packed)
    bytes_of = packed.packing.pack(jnp.zeros(data.keys.pages.shape))
    quantised = Packed(data.keys._replace(pages=bytes_of), packed.packing)
    assert call(keys=quantised).shape == (2, 4)
    with pytest.raises(NotImplementedError, match="heads of 16"):
        call(keys=quantised, implementation="pallas_gpu")
    odd = data.keys._replace(pages=data.keys.pages[:, :, :6])
    with pytest.raises(NotImplementedError, match="power of two"):
        call(keys=odd, implementation="pallas_tpu")
    far = data.keys._replace(read=np.zeros((2, 1 << 19), np.int32))
    with pytest.raises(NotImplementedError, match="at most"):
        call(keys=far, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="power of two"):
        pallas_tpu.Tiles(entries=200)
