"""Quantised rows as TPU kernels read them: the bits of `Packing.unpack`, whatever the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.kernels.unpack_tpu import Unpack
from hetero_kv.packing import Packing
from tests import variants

PACKINGS = [
    Packing("fp8_rope", 512, rope=64),
    Packing("fp8_rope", 512, rope=64, dtype="bfloat16"),
    Packing("fp8_rope", 24, rope=8, group=4),
    Packing("fp8_rope", 256),
    Packing("fp8_f32", 576, rope=64),
    Packing("fp8_f32", 128),
    Packing("fp4", 128),
    Packing("fp4", 320, group=64),
    Packing("fp4", 16, group=8),
    Packing("int8", 192),
    Packing("int8", 12),
    Packing("fp8_rope", 512, rope=64, align=128),
    Packing("fp4", 128, align=128),
]
QUICK = [PACKINGS[i] for i in (2, 8, 12)]  # eight and four bits, and one that is aligned


@pytest.mark.parametrize(
    "packing",
    variants.some(PACKINGS, QUICK),
    ids=lambda x: f"{x.kind} {x.width} {x.dtype} {x.bytes}",
)
def test_the_bits_are_those_of_the_reference(packing: Packing) -> None:
    rng = np.random.default_rng(packing.width)
    data = rng.integers(0, 256, (300, packing.bytes)).astype(np.uint8)
    data[:256, :] = np.where(
        rng.random((256, packing.bytes)) < 0.5, data[:256], np.arange(256)[:, None]
    )
    data[-1], data[-2] = 255, 0
    rows = rng.normal(size=(40, packing.width)) * 10.0 ** rng.integers(-3, 4, (40, 1))
    data[256:296] = jax.jit(packing.pack)(jnp.asarray(rows, jnp.float32))
    want = np.asarray(jax.jit(packing.unpack)(data), np.float32)
    unpack = Unpack(packing)
    for dtype in (jnp.uint8, jnp.int32):
        got = np.asarray(jax.jit(unpack.rows)(jnp.asarray(data, dtype), unpack.matrix()))
        np.testing.assert_array_equal(got, want)
    assert np.isfinite(want[256:296]).all() and np.isnan(want[-1]).all()
