"""Lowering for accelerators on a CPU host, one platform per export, and what the results write.

Shows that a kernel passes the rules of the lowering; a device's compiler may still refuse it.
"""

import jax
import jax.numpy as jnp
import pytest

from hetero_kv.attention.pool import Paged
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.kernels.decode_attention.operands import Entries, Window
from hetero_kv.kernels.indexer.api import select
from hetero_kv.packing import Packed, Packing
from tests import variants
from tests.hetero_kv.kernels import strict

BATCH, LAYERS = 4, 2
MILLION = 1 << 20
# heads, head_dim, window; index heads, dim and k; tokens a sequence; entries per page
TINY = dict(heads=2, width=64, window=16, index_heads=8, index_dim=64, k=8, tokens=8192, page=256)
FLASH = dict(
    heads=64, width=512, window=128, index_heads=64, index_dim=128, k=512, tokens=MILLION, page=256
)
PRO = {**FLASH, "heads": 128, "k": 1024}
SIZES = {"tiny": TINY, "flash": FLASH, "pro": PRO}
KERNEL = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}


def _shape(*sizes: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _pool(entries: int, page: int, width: int, dtype, paged: bool, packing=None):
    if packing:
        return Packed(_pool(entries, page, packing.bytes, jnp.uint8, paged), packing)
    if not paged:
        return _shape(LAYERS, BATCH, entries, width, dtype=dtype)
    table = _shape(BATCH, entries // page)
    pages = _shape(LAYERS, BATCH * entries // page + 1, page, width, dtype=dtype)
    return Paged(pages, table, table)


def _attention(size: dict, dtype, ratio: int, paged: bool, packing: Packing | None = None):
    page = max(1, size["page"] * 4 // ratio) if ratio else 0
    q = _shape(BATCH, size["heads"], size["width"], dtype=dtype)
    ring = _shape(LAYERS, BATCH, size["window"], size["width"], dtype=dtype)
    window = Window(ring, _shape(BATCH), _shape(BATCH))
    entries = None
    if ratio:
        pool = _pool(size["tokens"] // ratio, page, size["width"], dtype, paged, packing)
        picked = _shape(BATCH, size["k"]) if ratio == 4 else None
        entries = Entries(pool, _shape(BATCH), picked)
    return q, _shape(size["heads"], dtype=jnp.float32), _shape(), window, entries


def _attend(implementation: str):
    def run(q, sinks, layer, window, entries):
        return decode_attention(
            q,
            sinks=sinks,
            layer=layer,
            window=window,
            entries=entries,
            scale=0.1,
            tile=4,
            implementation=implementation,
        )

    return run


def _picks(implementation: str, k: int):
    def run(q, weights, keys, layer, visible):
        return select(
            q, weights, keys, layer=layer, visible=visible, k=k, implementation=implementation
        )

    return run


def _index(size: dict, dtype, paged: bool, packing: Packing | None = None):
    heads, dim = size["index_heads"], size["index_dim"]
    return (
        _shape(BATCH, heads, dim, dtype=dtype),
        _shape(BATCH, heads, dtype=jnp.float32),
        _pool(size["tokens"] // 4, size["page"], dim, dtype, paged, packing),
        _shape(),
        _shape(BATCH),
    )


CELLS = [(platform, dtype) for platform in KERNEL for dtype in (jnp.float32, jnp.bfloat16)]
NAMES = [f"{platform}-{jnp.dtype(dtype).name}" for platform, dtype in CELLS]


@pytest.mark.parametrize(("platform", "dtype"), CELLS, ids=NAMES)
@pytest.mark.parametrize("size", variants.some(SIZES, ("pro",)))
def test_decode_attention_is_one_kernel_and_writes_no_scores(platform, dtype, size) -> None:
    sizes = SIZES[size]
    for ratio, paged in ((0, False), (128, True), (4, True), (4, False)):
        arguments = _attention(sizes, dtype, ratio, paged)
        text = strict.lowered(_attend(KERNEL[platform]), platform, *arguments)
        assert strict.kernels_in(text, platform) == 1
        if size != "tiny" and ratio == 4:
            # Far less than the scores f32[R, H, N] or the entries [R, N, c] of all sequences.
            entries = BATCH * sizes["tokens"] // 4
            scores, rows = 4 * sizes["heads"], sizes["width"] * jnp.dtype(dtype).itemsize
            assert strict.largest(text) < entries * min(scores, rows) / 10


@pytest.mark.parametrize(("platform", "dtype"), CELLS, ids=NAMES)
@pytest.mark.parametrize("size", variants.some(SIZES, ("pro",)))
def test_the_indexer_is_one_kernel_and_writes_no_scores(platform, dtype, size) -> None:
    sizes = SIZES[size]
    for paged in (True, False):
        arguments = _index(sizes, dtype, paged)
        text = strict.lowered(_picks(KERNEL[platform], sizes["k"]), platform, *arguments)
        assert strict.kernels_in(text, platform) == 1
        if size != "tiny":
            assert strict.largest(text) < BATCH * (sizes["tokens"] // 4) * 4  # f32[R, N]


@pytest.mark.parametrize(("platform", "dtype"), CELLS, ids=NAMES)
@pytest.mark.parametrize("size", variants.some(SIZES, ("flash",)))
def test_quantised_rows_are_unpacked_within_the_kernel(platform, dtype, size) -> None:
    sizes, name = SIZES[size], jnp.dtype(dtype).name
    read = dict(align=128, dtype=name) if platform == "cuda" else {}
    rows = Packing("fp8_rope", sizes["width"], rope=sizes["width"] // 8, group=8, **read)
    if size != "tiny":
        rows = Packing("fp8_rope", 512, rope=64, **read)
    for ratio, paged in ((128, True), (4, True), (4, False)):
        arguments = _attention(sizes, dtype, ratio, paged, rows)
        text = strict.lowered(_attend(KERNEL[platform]), platform, *arguments)
        assert strict.kernels_in(text, platform) == 1
        # Nothing is unpacked, or copied, outside: only parts of blocks that share a sequence.
        parts = 33 if platform == "cuda" else 1
        most = BATCH * sizes["heads"] * sizes["width"] * 4 * parts + BATCH * sizes["tokens"]
        assert size == "tiny" or strict.largest(text) <= most
    kind = "fp8_f32" if size == "tiny" else "fp4"
    keys = Packing(kind, sizes["index_dim"], **read)
    arguments = _index(sizes, dtype, True, keys)
    text = strict.lowered(_picks(KERNEL[platform], sizes["k"]), platform, *arguments)
    assert strict.kernels_in(text, platform) == 1
    assert size == "tiny" or strict.largest(text) <= BATCH * sizes["tokens"]


def test_auto_unpacks_rows_that_are_whole_lanes_only() -> None:
    for align, kernels in ((0, 0), (128, 1)):
        rows, keys = (
            Packing("fp8_rope", 512, rope=64, align=align),
            Packing("fp4", 128, align=align),
        )
        for run, arguments in (
            (_attend("auto"), _attention(FLASH, jnp.bfloat16, 128, True, rows)),
            (_picks("auto", 512), _index(FLASH, jnp.bfloat16, True, keys)),
        ):
            assert strict.kernels_in(strict.lowered(run, "tpu", *arguments), "tpu") == kernels


def test_the_reference_does_write_scores() -> None:
    """So that the check above can fail."""
    text = strict.lowered(_picks("reference", 512), "tpu", *_index(FLASH, jnp.bfloat16, True))
    assert strict.kernels_in(text, "tpu") == 0
    assert strict.largest(text) >= BATCH * (MILLION // 4) * 4


def test_auto_is_the_kernel_on_tpu_and_the_reference_on_cuda() -> None:
    arguments = _attention(FLASH, jnp.bfloat16, 4, True)
    assert strict.kernels_in(strict.lowered(_attend("auto"), "tpu", *arguments), "tpu") == 1
    assert "custom_call" not in strict.lowered(_attend("auto"), "cuda", *arguments)
