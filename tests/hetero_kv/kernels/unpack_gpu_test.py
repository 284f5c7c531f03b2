"""Quantised rows as GPU kernels read them: the bits of `Packing.unpack`, whatever the bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import unpack_gpu
from hetero_kv.kernels.unpack_gpu import PIECE, Unpack
from hetero_kv.packing import Packing
from tests import variants
from tests.hetero_kv.kernels import strict

PACKINGS = {
    "published rows": Packing("fp8_rope", 512, rope=64, align=128),
    "published rows, half precision": Packing("fp8_rope", 512, 64, 0, "bfloat16", 128),
    "published index keys": Packing("fp4", 128, align=128),
    "rope within a piece": Packing("fp8_rope", 128, rope=16, group=16, align=128),
    "float scales": Packing("fp8_f32", 256, rope=64, group=32, align=128),
    "groups of 8 bits": Packing("fp8_f32", 128, align=128),
    "int8": Packing("int8", 128, dtype="bfloat16", align=128),
}


def _unpack(packing: Packing, interpret: Any = None):
    """The rows f32[64, width] of u8[64, bytes], by a kernel that does nothing else."""

    def body(source, out) -> None:
        def scoped(raw, scratch, arrived) -> None:
            unpack_gpu.boxes(source, raw.at[0], packing, arrived)
            plgpu.barrier_wait(arrived)
            for first in range(0, packing.width, PIECE):
                out[:, pl.ds(first, PIECE)] = Unpack(packing).piece(raw.at[0], first, scratch)

        pl.run_scoped(
            scoped,
            unpack_gpu.memory(packing, 64, 1),
            unpack_gpu.scratch(packing, 64),
            plgpu.Barrier(num_arrivals=packing.bytes // unpack_gpu.BOX),
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, packing.width), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )


def _data(packing: Packing) -> np.ndarray:
    """Rows with any bytes, of numbers of many sizes, poison and zeros."""
    rng = np.random.default_rng(packing.width)
    data = rng.integers(0, 256, (64, packing.bytes)).astype(np.uint8)
    rows = rng.normal(size=(24, packing.width)) * 10.0 ** rng.integers(-3, 4, (24, 1))
    data[:24] = jax.jit(packing.pack)(jnp.asarray(rows, jnp.float32))
    codes = packing.sections["codes"]
    data[24:40, :codes] = np.arange(16 * codes).reshape(16, -1) % 256
    data[-1], data[-2] = 255, 0
    return data


@pytest.mark.parametrize("name", PACKINGS)
def test_the_bits_are_those_of_the_reference(name: str) -> None:
    packing = PACKINGS[name]
    unpack_gpu.check("test", packing)
    data = jnp.asarray(_data(packing))
    want = np.asarray(jax.jit(packing.unpack)(data), np.float32)
    order = Unpack(packing).order
    got = np.asarray(_unpack(packing, strict.gpu_interpreter())(data))
    if packing.dtype == "bfloat16":
        got = np.asarray(jnp.asarray(got).astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(got, want if order is None else want[:, order])
    assert np.isfinite(want[:24]).all() and np.isnan(want[-1]).all()


@pytest.mark.parametrize(
    "name", variants.some(PACKINGS, ("published rows", "published index keys"))
)
def test_it_lowers(name: str) -> None:
    packing = PACKINGS[name]
    rows = jax.ShapeDtypeStruct((64, packing.bytes), jnp.uint8)
    text = strict.lowered(_unpack(packing), "cuda", rows)
    assert strict.kernels_in(text, "cuda") == 1


def test_what_it_cannot_take_is_told() -> None:
    for packing, message in [
        (Packing("fp8_rope", 512, rope=64), "584 bytes.*pack them with align=128.*cache_align"),
        (Packing("fp4", 64, align=128), "64 values; a multiple of 128"),
        (Packing("fp8_rope", 96, rope=32, align=128), "96 values; a multiple of 64"),
        (Packing("fp8_f32", 128, rope=32, group=32, align=128), "at byte 108; multiples of 8"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            unpack_gpu.check("op", packing)
