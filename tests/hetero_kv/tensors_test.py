"""Our safetensors files are those of the reference implementation, and damage is noticed."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from hetero_kv import tensors

RNG = np.random.default_rng(0)
ARRAYS = {
    "a": RNG.normal(size=(3, 0, 2)).astype(np.float32),
    "b.c['d']": RNG.normal(size=(2, 3)).astype(np.float16),
    "count": np.array(7, np.int32),
    "flags": np.array([True, False]),
    "big": RNG.integers(0, 2**63, 5).astype(np.uint64),
    "turned": np.arange(6, dtype=np.int16).reshape(2, 3).T,
}


def same(one: np.ndarray, two: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())


def test_there_and_back_and_as_the_reference_reads_it() -> None:
    data = tensors.dump(ARRAYS)
    for found in (tensors.parse(data), safetensors.load(data)):
        assert found.keys() == ARRAYS.keys()
        assert all(same(found[name], value) for name, value in ARRAYS.items())
    theirs = safetensors.save({k: np.array(v, order="C") for k, v in ARRAYS.items()})
    assert all(same(tensors.parse(theirs)[name], x) for name, x in ARRAYS.items())


def test_small_floats() -> None:
    value = np.array([1.5, -2.0, np.nan], ml_dtypes.bfloat16)
    assert same(tensors.parse(tensors.dump({"x": value}))["x"], value)


def test_what_is_read_may_be_changed() -> None:
    tensors.parse(tensors.dump(ARRAYS))["b.c['d']"][0] = 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x[:4],
        lambda x: x[:-1],
        lambda x: x + b"\0",
        lambda x: x[:8] + b"?" + x[9:],
        lambda x: x.replace(b'"F16"', b'"F17"'),
        lambda x: x.replace(b'"F16"', b'"F32"'),
        lambda x: (1 << 40).to_bytes(8, "little") + x[8:],
        lambda x: (2).to_bytes(8, "little") + b"[]" + x[8:],
    ],
)
def test_damage_is_told(damage) -> None:
    with pytest.raises(ValueError):
        tensors.parse(damage(tensors.dump(ARRAYS)))


def test_a_dtype_that_the_format_lacks() -> None:
    with pytest.raises(ValueError, match="x: no safetensors dtype for complex64"):
        tensors.dump({"x": np.zeros(1, np.complex64)})
