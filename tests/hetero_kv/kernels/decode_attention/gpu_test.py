"""The GPU kernel of decode attention against the equations, interpreted (newest JAX only)."""

import dataclasses
import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_kv.kernels.checks import as_jax
from hetero_kv.kernels.decode_attention import pallas_gpu
from hetero_kv.kernels.decode_attention.operands import Operands
from hetero_kv.packing import Packed, Packing
from tests import variants
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
HALF = Packing("fp8_rope", 128, rope=16, group=16, dtype="bfloat16", align=128)
PACKED = {
    "all": Case(position=(70, 500), ratio=4, page=8, shared=1, packing=HALF, **SIZES),
    "picked": Case(position=(70, 500), ratio=4, page=4, picks=12, packing=HALF, **SIZES),
    "int8, contiguous": Case(
        position=(9, 200),
        ratio=2,
        page=0,
        packing=Packing("int8", 128, dtype="bfloat16", align=128),
        **{**SIZES, "window": 0},
    ),
    "published, float32": Case(
        position=(200,),
        ratio=2,
        page=4,
        picks=3,
        packing=Packing("fp8_rope", 512, rope=64, align=128),
        **{**SIZES, "width": 512, "dtype": "float32"},
    ),
    "float scales, float32": Case(
        position=(37, 170),
        ratio=4,
        page=8,
        packing=Packing("fp8_f32", 128, rope=32, group=48, align=128),
        **{**SIZES, "dtype": "float32"},
    ),
}


def _operands(data: oracle.Data) -> Operands:
    given = data.arguments
    window, entries = given.get("window"), given.get("entries")
    return as_jax(Operands(data.q, given["sinks"], given["layer"], window, entries))


@pytest.mark.parametrize("name", variants.some(CASES, ("all", "picked", "float32, odd window")))
def test_gpu_kernel_is_what_the_equations_say(name: str) -> None:
    _check(CASES[name], (1,) if "float32" in name else (1, 3))


@pytest.mark.parametrize("name", variants.some(PACKED, ("picked",)))
def test_gpu_kernel_of_quantised_entries(name: str) -> None:
    _check(PACKED[name], (1,) if "float32" in name else (1, 2))


def _check(case: Case, splits: tuple[int, ...]) -> None:
    """Compares with the equations, for numbers of blocks that share a sequence."""
    interpreter = strict.gpu_interpreter()
    data = oracle.make(case)
    operands, scale = _operands(data), data.arguments["scale"]
    pallas_gpu.check(operands)
    for many in splits:
        tiles = pallas_gpu.Tiles(splits=many)
        run = functools.partial(pallas_gpu.run, scale=scale, tiles=tiles, interpret=interpreter)
        got = np.asarray(jax.jit(run)(operands))
        assert np.isfinite(got).all()
        tolerance = 3e-2 if case.dtype == "bfloat16" else 2e-5
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


@pytest.mark.full
def test_a_packed_window_is_read_as_its_floats() -> None:
    data = oracle.make(dataclasses.replace(PACKED["all"], packing=None))
    operands = _operands(data)
    bytes_ = HALF.pack(operands.window.rows)
    run = functools.partial(pallas_gpu.run, scale=0.1, interpret=strict.gpu_interpreter())
    results = []
    for rows in (Packed(bytes_, HALF), HALF.unpack(bytes_)):
        changed = operands._replace(window=operands.window._replace(rows=rows))
        pallas_gpu.check(changed)
        results.append(np.asarray(jax.jit(run)(changed)))
    np.testing.assert_array_equal(*results)


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
    for packing, message in [
        (Packing("fp8_rope", 128, rope=16, group=16, dtype="bfloat16"), "pack them with align=128"),
        (Packing("fp4", 128, dtype="bfloat16", align=128), "two channels of a byte"),
        (Packing("fp8_rope", 128, rope=16, group=16, align=128), "must be bfloat16 too"),
        (Packing("fp8_rope", 128, rope=80, group=8, dtype="bfloat16", align=128), "at most 64"),
    ]:
        case = Case(position=(40,), ratio=4, packing=packing, **SIZES)
        with pytest.raises(NotImplementedError, match=message):
            pallas_gpu.check(_operands(oracle.make(case)))
    wide = Packing("fp8_rope", 512, rope=64, dtype="bfloat16", align=128)
    case = Case(position=(40,), ratio=4, packing=wide, **{**SIZES, "width": 512})
    operands = _operands(oracle.make(case))
    assert pallas_gpu.choose(operands).stages == 1
    with pytest.raises(NotImplementedError, match=r"2 tiles of 512 channels .* use fewer stages"):
        pallas_gpu.check(operands, pallas_gpu.Tiles(stages=2))
    for bad in (dict(splits=-1), dict(stages=0)):
        with pytest.raises(ValueError, match="tiles"):
            pallas_gpu.Tiles(**bad)
