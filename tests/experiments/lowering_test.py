"""Reading lowered programs: kernels, operations, the largest value, a kernel's buffers."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from experiments import lowering


def twice(x: jax.Array) -> jax.Array:
    """A TPU kernel with a block of 8 rows, and scratch of as many."""

    def body(x_ref, y_ref, held):
        held[...] = x_ref[...] * 2
        y_ref[...] = held[...]

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[block],
        out_specs=block,
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x)


SHAPE = jax.ShapeDtypeStruct((32, 128), jnp.float32)


def test_a_kernel_is_one_call_on_its_platform() -> None:
    text = lowering.text(lambda x: twice(x) + 1, "tpu", SHAPE)
    assert lowering.kernels(text) == 1
    counts = lowering.operations(text)
    assert counts["custom_call"] == 1 and counts["add"] == 1
    assert lowering.kernels(lowering.text(lambda x: x * 2 + 1, "cpu", SHAPE)) == 0


def test_a_kernels_buffers() -> None:
    (buffers,) = lowering.kernel_memory(jax.jit(twice), SHAPE)
    assert [(x.space, x.use, x.shape, x.nbytes) for x in buffers] == [
        ("vmem", "block", (8, 128), 4_096),
        ("vmem", "block", (8, 128), 4_096),
        ("vmem", "scratch", (8, 128), 4_096),
    ]
    assert lowering.kernel_memory(lambda x: x * 2, SHAPE) == []
    assert lowering.draw_memory(buffers).axes[0].patches


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_largest_value(platform: str) -> None:
    x, y = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (64, 256))
    text = lowering.text(lambda x, y: jnp.sum(x[:, None] * y), platform, x, y)
    assert lowering.largest(text) == 64 * 256 * 4
    small = lowering.text(lambda x: x.astype(jnp.bfloat16), platform, x)
    assert lowering.largest(small) == 64 * 2
    figure = lowering.draw_operations({"one": text, "two": small})
    assert [x.get_text() for x in figure.axes[0].get_legend().get_texts()] == ["one", "two"]
