"""The TPU compiler builds the kernels at the published sizes, where a libtpu is installed.

It needs no chip: it finds what lowering does not, such as too much on-chip memory or an operation
that a generation lacks. What the compiled programs allocate shows that no scores are written.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from tests.hetero_kv.kernels import lowering_test as cases

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu"),
]


def _temporary_bytes(run, topology: str, arguments) -> int:
    """Compiles and returns what the program allocates besides arguments and results."""
    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    return jax.jit(run).lower(*placed).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", ["flash", "pro"])
def test_kernels_compile_and_allocate_next_to_nothing(size, dtype, topology) -> None:
    sizes = cases.SIZES[size]
    for ratio, paged in ((0, False), (128, True), (4, True), (4, False)):
        arguments = cases._attention(sizes, dtype, ratio, paged)
        assert _temporary_bytes(cases._attend("pallas_tpu"), topology, arguments) < 1 << 20
    for paged in (True, False):
        arguments = cases._index(sizes, dtype, paged)
        run = cases._picks("pallas_tpu", sizes["k"])
        assert _temporary_bytes(run, topology, arguments) < 1 << 20
