"""Decode attention against the equations: the reference, and the TPU kernel interpreted."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hetero_kv.kernels.decode_attention import pallas_tpu
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.packing import Packed, Packing
from tests import variants
from tests.hetero_kv.kernels import pools, strict
from tests.hetero_kv.kernels.decode_attention import oracle
from tests.hetero_kv.kernels.decode_attention.oracle import Case

CASES = {
    "sliding": Case(position=(0, 3, 7, 21), window=8),
    "sliding without sinks": Case(position=(5, 30), window=8, sinks=False),
    "all, paged": Case(position=(0, 7, 200, 511), window=8, ratio=8, page=8),
    "all, contiguous": Case(position=(15, 16, 500), window=8, ratio=8, page=0),
    "all, one entry a page": Case(position=(31, 200), window=8, ratio=16, capacity=16, page=1),
    "all, no window": Case(position=(3, 300), ratio=8, page=8, sinks=False),
    "picked, paged": Case(position=(2, 40, 120, 250), window=8, ratio=4, page=8, picks=16),
    "picked, contiguous": Case(position=(11, 200), window=8, ratio=4, page=0, picks=8),
    "picked, large pages": Case(position=(40, 250), window=8, ratio=4, page=32, picks=24),
    "shared pages": Case(position=(100, 140, 200), window=8, ratio=4, page=8, picks=8, shared=2),
    "stopped rows": Case(position=(9, 40, 70), window=8, ratio=4, page=8, stopped=(0, 2)),
    "bfloat16": Case(position=(33, 250), window=16, ratio=4, page=16, dtype="bfloat16"),
    "bfloat16, picked": Case(
        position=(33, 250), window=16, ratio=4, page=32, picks=16, dtype="bfloat16"
    ),
}
ROWS = Packing("fp8_rope", 16, rope=4, group=4)
PUBLISHED = Packing("fp8_rope", 512, rope=64)
PACKED = {
    "published": Case(position=(40, 250), window=8, ratio=4, page=32, width=512, packing=PUBLISHED),
    "published, picked": Case(
        position=(5, 250), window=8, ratio=4, page=32, picks=16, width=512, packing=PUBLISHED
    ),
    "fp8, small pages": Case(position=(7, 60), window=8, ratio=4, page=8, packing=ROWS),
    "fp8, contiguous": Case(position=(7, 200), window=8, ratio=4, page=0, packing=ROWS),
    "fp8, shared": Case(position=(99, 140), window=8, ratio=4, picks=8, shared=2, packing=ROWS),
    "fp8 with float scales": Case(
        position=(40,), ratio=1, packing=Packing("fp8_f32", 144, rope=16), width=144, sinks=False
    ),
    "int8": Case(position=(40, 250), window=8, ratio=4, packing=Packing("int8", 16)),
    "fp8, half precision": Case(
        position=(33, 250), window=16, ratio=4, page=32, dtype="bfloat16", packing=ROWS
    ),
}
SMALL = pallas_tpu.Tiles(entries=16, picks=8)
INTERPRET = {"implementation": "interpret", "tiles": SMALL}


@functools.partial(jax.jit, static_argnames=("scale", "tile", "implementation", "tiles"))
def _program(q, sinks, layer, window, entries, scale, tile, implementation="auto", tiles=None):
    return decode_attention(
        q,
        sinks=sinks,
        layer=layer,
        window=window,
        entries=entries,
        scale=scale,
        tile=tile,
        implementation=implementation,
        tiles=tiles,
    )


def _run(data: oracle.Data, tile: int = 16, **options) -> np.ndarray:
    arguments = {"window": None, "entries": None, **data.arguments}
    run = functools.partial(_program, data.q, tile=tile, **arguments, **options)
    return strict.tpu(run) if options.get("implementation") == "interpret" else np.asarray(run())


def _compare(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    assert np.isfinite(got).all()
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_reference_is_what_the_equations_say(name: str) -> None:
    data = oracle.make(CASES[name])
    _compare(_run(data), data.want, CASES[name].dtype)


@pytest.mark.parametrize("name", variants.some(CASES, ("all, contiguous", "bfloat16, picked")))
def test_tpu_kernel_is_what_the_equations_say(name: str) -> None:
    data = oracle.make(CASES[name])
    _compare(_run(data, **INTERPRET), data.want, CASES[name].dtype)


@pytest.mark.parametrize("name", variants.some(PACKED, ("fp8, small pages",)))
def test_reference_of_quantised_rows(name: str) -> None:
    data = oracle.make(PACKED[name])
    _compare(_run(data), data.want, PACKED[name].dtype)


@pytest.mark.parametrize(
    "name",
    variants.some(PACKED, ("published, picked", "fp8, small pages", "fp8 with float scales")),
)
def test_tpu_kernel_of_quantised_rows(name: str) -> None:
    data = oracle.make(PACKED[name])
    _compare(_run(data, **INTERPRET), data.want, PACKED[name].dtype)


@pytest.mark.full
def test_tpu_kernel_with_the_tiles_of_the_heuristic() -> None:
    data = oracle.make(Case(position=(700, 90), window=8, ratio=1, capacity=1024, page=64, heads=2))
    _compare(_run(data, implementation="interpret"), data.want, "float32")


@hypothesis.settings(max_examples=8)
@hypothesis.given(draw=st.data())
def test_any_lengths_ratios_and_tables(draw: st.DataObject) -> None:
    # Shapes are fixed, so that only the first examples compile.
    ratio = draw.draw(st.sampled_from([1, 4, 128]), "ratio")
    lengths = st.integers(0, min(64 * ratio, 300) - 1)
    case = Case(
        position=tuple(draw.draw(lengths, f"position {r}") for r in range(3)),
        window=8,
        ratio=ratio,
        picks=draw.draw(st.sampled_from([0, 16]), "picks"),
        shared=draw.draw(st.integers(0, 3), "shared pages"),
        stopped=tuple(draw.draw(st.sets(st.integers(0, 2)), "stopped")),
        heads=2,
        width=8,
    )
    data = oracle.make(case, draw.draw(st.integers(0, 2**16), "seed"))
    _compare(_run(data), data.want, "float32")
    _compare(_run(data, **INTERPRET), data.want, "float32")


def test_lengths_tables_and_layers_are_values() -> None:
    before = _program._cache_size()
    for seed, position in enumerate([(3, 100, 8), (250, 0, 9), (17, 18, 200)]):
        case = Case(position=position, window=8, ratio=4, heads=2, width=8)
        _run(oracle.make(case, seed), **INTERPRET)
    assert _program._cache_size() <= before + 1


@pytest.mark.parametrize("packing", [None, Packing("int8", 8)], ids=["floats", "int8"])
@pytest.mark.parametrize("picks", [0, 16])
def test_a_page_that_is_none_makes_its_own_sequence_nan(
    picks: int, packing: Packing | None
) -> None:
    case = Case(position=(63,) * 3, window=8, ratio=4, picks=picks, heads=2, width=8)
    data = oracle.make(dataclasses.replace(case, packing=packing))
    entries = data.arguments["entries"]
    pool = entries.pool.rows if packing else entries.pool
    for bad in (-1, 10**6):
        table = pool.read.copy()
        table[1, 0] = bad
        changed = entries._replace(pool=pools.packed(packing, pool._replace(read=table)))
        broken = oracle.Data(data.q, {**data.arguments, "entries": changed}, data.want)
        for options in ({}, INTERPRET):
            out = _run(broken, **options)
            np.testing.assert_allclose(out[[0, 2]], data.want[[0, 2]], atol=2e-5)
            assert np.isnan(out[1]).all()


@pytest.mark.full
def test_nothing_to_see_is_zero() -> None:
    data = oracle.make(Case(position=(3,), ratio=8, sinks=False))
    assert not _run(data).any()
    assert not _run(data, **INTERPRET).any()


def test_rows_do_not_depend_on_each_other() -> None:
    case = Case(position=(40, 130, 250), window=8, ratio=4, heads=2, width=8)
    data = oracle.make(case)
    together = _run(data, **INTERPRET)
    window, entries = data.arguments["window"], data.arguments["entries"]
    order = np.array([2, 0, 0])
    other = {
        **data.arguments,
        "window": window._replace(
            rows=window.rows[:, order],
            position=window.position[order],
            stop=window.stop[order],
        ),
        "entries": entries._replace(
            pool=entries.pool._replace(read=entries.pool.read[order]),
            visible=entries.visible[order],
        ),
    }
    apart = _run(oracle.Data(data.q[order], other, data.want), **INTERPRET)
    np.testing.assert_array_equal(apart, together[order])


def test_wrong_arguments() -> None:
    data = oracle.make(Case(position=(9,), window=8, ratio=4, page=8))
    window, entries = data.arguments["window"], data.arguments["entries"]

    def call(q=data.q, **changes):
        return decode_attention(q, **{**data.arguments, **changes})

    for changes, message in [
        (dict(q=data.q[0]), r"q must be"),
        (dict(window=None, entries=None), "neither a window nor entries"),
        (dict(sinks=np.zeros(3, np.float32)), "sinks"),
        (dict(window=window._replace(position=np.zeros(2, np.int32))), "window.position"),
        (dict(window=window._replace(stop=window.stop.astype(np.int16))), "int32"),
        (dict(entries=entries._replace(visible=np.zeros(3, np.int32))), "entries.visible"),
        (dict(entries=entries._replace(picked=np.zeros((1, 0), np.int32))), "entries.picked"),
        (dict(entries=entries._replace(pool=np.zeros((3, 1, 30, 16), np.float32))), "tile=64"),
        (dict(q=data.q.astype(np.int32)), "floating"),
        (dict(implementation="cuda"), "implementation"),
        (dict(tile=8.0), "tile=8.0 must be an integer"),
        (dict(tile=8.0, entries=None), "tile=8.0"),
        (dict(layer=0.5), "layer must be an integer scalar"),
        (dict(tiles=16), "tiles=16 must be a .*Tiles"),
        (dict(tiles=16, implementation="pallas_gpu"), "tiles=16 must be a .*pallas_gpu.Tiles"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**changes)
    quantised = entries.pool._replace(pages=jnp.asarray(entries.pool.pages, jnp.float8_e4m3fn))
    with pytest.raises(NotImplementedError, match="quantised"):
        call(entries=entries._replace(pool=quantised))
    packed = oracle.make(PACKED["int8"])
    with pytest.raises(NotImplementedError, match=r"20 bytes.*align=128.*cache_align"):
        decode_attention(packed.q, **packed.arguments, implementation="pallas_gpu")
    with pytest.raises(ValueError, match="packed from 8 values a row, not 16"):
        call(entries=entries._replace(pool=Packed(entries.pool, Packing("int8", 8))))
    with pytest.raises(ValueError, match=r"entries.pool.pages must be .* 20"):
        call(entries=entries._replace(pool=Packed(entries.pool, Packing("int8", 16))))
    with pytest.raises(NotImplementedError, match="float16"):
        call(q=data.q.astype(np.float16), implementation="pallas_tpu")
    with pytest.raises(ValueError, match="power of two"):
        pallas_tpu.Tiles(entries=100)
    with pytest.raises(ValueError, match=r"tiles.picks=8.0 must be an integer"):
        pallas_tpu.Tiles(picks=8.0)


def test_auto_on_a_cpu_is_the_reference_bit_by_bit() -> None:
    data = oracle.make(CASES["picked, paged"])
    np.testing.assert_array_equal(_run(data), _run(data, implementation="reference"))
