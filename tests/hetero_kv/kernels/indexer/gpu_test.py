"""The GPU kernel of the indexer against the equations, interpreted (newest JAX only)."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_kv.kernels.checks import as_jax
from hetero_kv.kernels.indexer import pallas_gpu
from hetero_kv.kernels.indexer.operands import Operands
from hetero_kv.packing import Packing
from tests import variants
from tests.hetero_kv.kernels import strict
from tests.hetero_kv.kernels.indexer import oracle
from tests.hetero_kv.kernels.indexer.oracle import Case

SIZES = dict(heads=5, dim=64, dtype="bfloat16", capacity=256)
CASES = {
    "ties": Case(visible=(60, 256), k=24, values=1, **SIZES),
    "normal": Case(visible=(0, 200), k=8, page=64, **SIZES),
    "k beyond what is visible": Case(visible=(3, 100), k=140, page=32, values=2, **SIZES),
    "float32": Case(visible=(129, 250), k=24, values=2, page=4, **{**SIZES, "dtype": "float32"}),
    "float32, normal": Case(visible=(70, 256), k=16, page=0, **{**SIZES, "dtype": "float32"}),
    "contiguous": Case(visible=(129, 256), k=8, page=0, values=3, **SIZES),
}
KEYS = dict(packing=Packing("fp4", 128, align=128), **{**SIZES, "dim": 128})
PACKED = {
    "published, float32": Case(visible=(129, 250), k=24, page=4, **{**KEYS, "dtype": "float32"}),
    "published": Case(
        visible=(60, 256),
        k=24,
        values=3,
        **{**KEYS, "packing": Packing("fp4", 128, dtype="bfloat16", align=128)},
    ),
    "fp8, small pages": Case(
        visible=(0, 200),
        k=8,
        page=2,
        **{**KEYS, "packing": Packing("fp8_f32", 128, dtype="bfloat16", align=128)},
    ),
    "fp8 with rope": Case(
        visible=(70, 256),
        k=16,
        page=0,
        dtype="float32",
        heads=5,
        dim=64,
        packing=Packing("fp8_f32", 64, rope=16, group=24, align=128),
    ),
}
TILES = pallas_gpu.Tiles(chunk=128)


def _operands(data: oracle.Data) -> Operands:
    return as_jax(Operands(data.q, data.weights, data.layer, data.keys, data.visible))


def _run(operands: Operands, k: int, tiles: pallas_gpu.Tiles = TILES) -> np.ndarray:
    interpreter = strict.gpu_interpreter()
    run = functools.partial(pallas_gpu.run, k=k, tiles=tiles, interpret=interpreter)
    return np.asarray(jax.jit(run)(operands))


@pytest.mark.parametrize("name", variants.some(CASES, ("ties", "float32")))
def test_gpu_kernel_is_what_the_equations_say(name: str) -> None:
    # One chunk of four tiles: shared memory is used again.
    _check(CASES[name], pallas_gpu.Tiles(chunk=256) if name == "float32" else TILES)


@pytest.mark.parametrize("name", variants.some(PACKED, ("published",)))
def test_gpu_kernel_of_quantised_keys(name: str) -> None:
    _check(PACKED[name], pallas_gpu.Tiles(chunk=256))


def _check(case: Case, tiles: pallas_gpu.Tiles) -> None:
    data = oracle.make(case)
    operands = _operands(data)
    pallas_gpu.check(operands)
    picked = _run(operands, case.k, tiles)
    for r, scores in enumerate(data.scores):
        slack = 1e-2 if case.dtype == "bfloat16" else 1e-5
        oracle.compare(picked[r], scores, case.k, 0.0 if case.values else slack)


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(draw=st.data())
def test_any_lengths_and_tables(draw: st.DataObject) -> None:
    # Shapes are fixed, so that only the first examples compile.
    dtype = draw.draw(st.sampled_from(["float32", "bfloat16"]), "dtype")
    case = Case(
        visible=tuple(draw.draw(st.integers(0, 256), f"visible {r}") for r in range(2)),
        k=40,
        values=draw.draw(st.sampled_from([1, 3]), "values"),
        shared=draw.draw(st.integers(0, 3), "shared pages"),
        **{**SIZES, "dtype": dtype},
    )
    data = oracle.make(case, draw.draw(st.integers(0, 2**16), "seed"))
    picked = np.asarray(_program()(_operands(data)))
    for r, scores in enumerate(data.scores):
        oracle.compare(picked[r], scores, case.k, 0.0)


@functools.cache
def _program():
    interpreter = strict.gpu_interpreter()
    return jax.jit(functools.partial(pallas_gpu.run, k=40, tiles=TILES, interpret=interpreter))


def test_entries_of_a_page_that_is_none_stand_out() -> None:
    case = CASES["ties"]
    data = oracle.make(case)
    table = data.keys.read.copy()
    table[1, 2] = -1
    picked = _run(_operands(data)._replace(keys=as_jax(data.keys._replace(read=table))), case.k)
    assert set(range(16, 24)) <= set(picked[1].tolist())
    oracle.compare(picked[0], data.scores[0], case.k, 0.0)


def test_what_it_cannot_take_is_told() -> None:
    for changes, message in [
        (dict(dtype="float16"), "float32 queries of float32 or bfloat16 keys"),
        (dict(dtype="float32", dim=256, heads=256), "bytes of shared memory"),
        (dict(dim=32), "multiple of 64"),
        (dict(page=4), "equal groups"),
        (dict(packing=Packing("fp4", 64, dtype="bfloat16")), r"36 bytes.*pack them with align=128"),
        (
            dict(packing=Packing("fp4", 64, dtype="bfloat16", align=128)),
            "64 values; a multiple of 128",
        ),
        (dict(dim=128, packing=KEYS["packing"]), "queries of bfloat16, keys of float32"),
    ]:
        case = Case(visible=(40,), k=8, **{**SIZES, **changes})
        with pytest.raises(NotImplementedError, match=message):
            pallas_gpu.check(_operands(oracle.make(case)))
    with pytest.raises(ValueError, match="at least 128"):
        pallas_gpu.Tiles(chunk=100)
    with pytest.raises(ValueError, match="power of two"):
        pallas_gpu.Tiles(chunk=200)
