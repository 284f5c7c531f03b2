"""Kernels through the TPU's own compiler, on a host without a TPU, where libtpu is installed.

It finds what a lowering does not: layouts it cannot make, too much on-chip memory, copies that are
not aligned. It also says what a program allocates beside its arguments and results.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from hetero_kv.attention.pool import Paged
from hetero_kv.attention.rope import Rope
from hetero_kv.kernels.compressor import api as compressor
from hetero_kv.kernels.compressor.reference import Pooling
from hetero_kv.kernels.page_copy import api as page_copy
from hetero_kv.packing import Packing
from tests.hetero_kv.kernels import lowering_test as lowering
from tests.hetero_kv.kernels.chunk_attention import chunk_attention_test as chunk

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]
HOST = {  # what the library asks a TPU's host for
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOST.items():
        monkeypatch.setenv(name, value)


def compiled(run: Callable, *shapes: Any, topology: str = "v5e:2x2", **options: Any) -> Any:
    """`run` for one chip of that generation; its memory analysis."""
    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    return jax.jit(run, **options).lower(*there).compile().memory_analysis()


def of(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("entries", [1, 32, 1024])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_page_copies_allocate_nothing(entries: int, dtype: Any) -> None:
    pages, ids = of(4, 64, entries, 512, dtype=dtype), of(8)
    staged = of(4, 8, entries, 512, dtype=dtype)
    for run, shapes in (
        (page_copy.gather, (pages, ids)),
        (page_copy.verify, (pages, ids)),
        (page_copy.scatter, (pages, staged, ids)),
    ):
        run = functools.partial(run, implementation="pallas_tpu")
        donated = 0 if len(shapes) == 3 else ()
        assert compiled(run, *shapes, donate_argnums=donated).temp_size_in_bytes < 1 << 16


@pytest.mark.parametrize(
    "ratio, width, entries", [(4, 512, 32), (4, 128, 1024), (128, 512, 1), (128, 512, 32)]
)
@pytest.mark.parametrize("size", [None, 1, 100, 512])
def test_the_compressor_stores_in_place(ratio: int, width: int, entries: int, size) -> None:
    how = Pooling(ratio, width, ratio == 4, Rope(64, 160000.0), 1e-6, "bfloat16")
    table = of(8, 64)
    shapes = (
        Paged(of(4, 100, entries, width, dtype=jnp.bfloat16), table, table),
        of(),
        of(width, dtype=jnp.float32),
        of(4, 8, how.held, 2 * how.series, dtype=jnp.float32),
        size and of(8, size, 2 * how.series, dtype=jnp.float32),
        of(8),
        of(8),
    )
    run = functools.partial(compressor.store, how, implementation="pallas_tpu")
    memory = compiled(run, *shapes, donate_argnums=0)
    rows = 8 * -(-(size or 1) // 8) * 8 * 2 * how.series * 4  # padded to whole native tiles
    assert memory.temp_size_in_bytes <= (rows if size and size % 8 else 0) + (4 << 20)
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes // 2


@pytest.mark.parametrize("name", chunk.LOWERED)
def test_chunk_attention_writes_its_output_only(name: str) -> None:
    shape = chunk.LOWERED[name]._replace(dtype="bfloat16")
    operands = chunk.abstract(shape, layers=2)
    run = functools.partial(chunk.run, rule=shape.rule, implementation="pallas_tpu")
    assert compiled(run, operands).temp_size_in_bytes < 1 << 22


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", ["flash", "pro"])
def test_a_decode_step_allocates_next_to_nothing(size: str, dtype: Any, topology: str) -> None:
    sizes = lowering.SIZES[size]
    for ratio, paged in ((0, False), (128, True), (4, True), (4, False)):
        arguments = lowering._attention(sizes, dtype, ratio, paged)
        memory = compiled(lowering._attend("pallas_tpu"), *arguments, topology=topology)
        assert memory.temp_size_in_bytes < 1 << 20
    for paged in (True, False):
        arguments = lowering._index(sizes, dtype, paged)
        run = lowering._picks("pallas_tpu", sizes["k"])
        assert compiled(run, *arguments, topology=topology).temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("size", ["flash", "pro"])
def test_quantised_rows_are_unpacked_on_the_chip(size: str, topology: str) -> None:
    sizes, dtype = lowering.SIZES[size], jnp.bfloat16
    rows = Packing("fp8_rope", 512, rope=64, align=128)
    keys = Packing("fp4", 128, align=128)
    for ratio, paged in ((128, True), (4, True), (4, False)):
        arguments = lowering._attention(sizes, dtype, ratio, paged, rows)
        memory = compiled(lowering._attend("pallas_tpu"), *arguments, topology=topology)
        assert memory.temp_size_in_bytes < 1 << 20
    arguments = lowering._index(sizes, dtype, True, keys)
    run = lowering._picks("pallas_tpu", sizes["k"])
    assert compiled(run, *arguments, topology=topology).temp_size_in_bytes < 1 << 20
