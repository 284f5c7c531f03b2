"""The GPU kernel of decode attention against the equations, interpreted (newest JAX only)."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_kv.kernels.checks import as_jax
from hetero_kv.kernels.decode_attention import pallas_gpu
from hetero_kv.kernels.decode_attention.operands import Operands
from tests.hetero_kv.kernels import strict
from tests.hetero_kv.kernels.decode_attention import oracle
from tests.hetero_kv.kernels.decode_attention.oracle import Case

SIZES = dict(window=16, heads=3, width=128, dtype="bfloat16", capacity=128)
CASES = {
    "sliding": Case(position=(5, 40), **SIZES),
    "all": Case(position=(70, 500), ratio=4, page=8, shared=1, **SIZES),
    "picked": Case(position=(70, 500), ratio=4, page=16, picks=12, **{**SIZES, "width": 512}),
    "contiguous, one warpgroup": Case(position=(9, 200), ratio=2, page=0, **{**SIZES, "width": 64}),
    "float32": Case(position=(37, 170), ratio=4, page=8, **{**SIZES, "dtype": "float32"}),
    "float32, picked": Case(
        position=(200,), ratio=2, page=4, picks=3, **{**SIZES, "width": 256, "dtype": "float32"}
    ),
    "float32, odd window": Case(
        position=(9, 40), **{**SIZES, "window": 12, "width": 64, "dtype": "float32"}
    ),
    "no window, no sinks": Case(
        position=(1, 300), ratio=4, page=64, sinks=False, stopped=(0,), **{**SIZES, "window": 0}
    ),
}


def _operands(data: oracle.Data) -> Operands:
    given = data.arguments
    window, entries = given.get("window"), given.get("entries")
    return as_jax(Operands(data.q, given["sinks"], given["layer"], window, entries))


@pytest.mark.parametrize("name", strict.quick(CASES, "all", "picked", "float32, odd window"))
def test_gpu_kernel_is_what_the_equations_say(name: str) -> None:
    interpreter = strict.gpu_interpreter()
    data = oracle.make(CASES[name])
    operands, scale = _operands(data), data.arguments["scale"]
    pallas_gpu.check(operands)
    for splits in (1,) if "float32" in name else (1, 3):
        tiles = pallas_gpu.Tiles(splits=splits)
        run = functools.partial(pallas_gpu.run, scale=scale, tiles=tiles, interpret=interpreter)
        got = np.asarray(jax.jit(run)(operands))
        assert np.isfinite(got).all()
        tolerance = 3e-2 if CASES[name].dtype == "bfloat16" else 2e-5
        np.testing.assert_allclose(got, data.want, atol=tolerance, rtol=tolerance)


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(draw=st.data())
def test_any_lengths_and_tables(draw: st.DataObject) -> None:
    # Shapes are fixed, so that only the first examples compile.
    dtype = draw.draw(st.sampled_from(["float32", "bfloat16"]), "dtype")
    picks = draw.draw(st.sampled_from([0, 5]), "picks")
    case = Case(
        position=tuple(draw.draw(st.integers(0, 127), f"position {r}") for r in range(2)),
        ratio=4,
        capacity=32,
        page=8,
        picks=picks,
        shared=draw.draw(st.integers(0, 2), "shared pages"),
        stopped=tuple(draw.draw(st.sets(st.integers(0, 1)), "stopped")),
        **{k: v for k, v in SIZES.items() if k not in ("dtype", "capacity")},
        dtype=dtype,
    )
    data = oracle.make(case, draw.draw(st.integers(0, 2**16), "seed"))
    got = np.asarray(_program()(_operands(data)))
    tolerance = 3e-2 if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(got, data.want, atol=tolerance, rtol=tolerance)


@functools.cache
def _program():
    options = dict(scale=128**-0.5, tiles=pallas_gpu.Tiles(splits=2))
    interpreter = strict.gpu_interpreter()
    return jax.jit(functools.partial(pallas_gpu.run, interpret=interpreter, **options))


def test_a_page_that_is_none_makes_its_own_sequence_nan() -> None:
    interpreter = strict.gpu_interpreter()
    data = oracle.make(CASES["picked"])
    operands = _operands(data)
    table = np.asarray(operands.entries.pool.read).copy()
    table[1] = -1
    pool = operands.entries.pool._replace(read=jax.numpy.asarray(table))
    operands = operands._replace(entries=operands.entries._replace(pool=pool))
    run = functools.partial(
        pallas_gpu.run,
        scale=data.arguments["scale"],
        tiles=pallas_gpu.Tiles(splits=1),
        interpret=interpreter,
    )
    got = np.asarray(jax.jit(run)(operands))
    np.testing.assert_allclose(got[0], data.want[0], atol=3e-2, rtol=3e-2)
    assert np.isnan(got[1]).all()


def test_what_it_cannot_take_is_told() -> None:
    for changes, message in [
        (dict(dtype="float16"), "float32 and bfloat16 only"),
        (dict(dtype="float32", width=192), "multiple of 128"),
        (dict(ratio=4, page=12), "equal groups"),
        (dict(width=32), "multiple of 64"),
        (dict(window=12), "equal groups"),
        (dict(ratio=4, page=4), "equal groups"),
    ]:
        case = Case(position=(40,), **{**SIZES, **changes})
        with pytest.raises(NotImplementedError, match=message):
            pallas_gpu.check(_operands(oracle.make(case)))
    for bad in (dict(splits=-1), dict(stages=1)):
        with pytest.raises(ValueError, match="tiles"):
            pallas_gpu.Tiles(**bad)
