"""Page copies for TPUs (Mosaic): pages stream through VMEM once, and are summed up on the way.

The grid is (pages, layers, tiles of a page). Reads are pipelined by block specs whose index maps
look the page up in the prefetched ids; writes into a pool are DMAs that a refused page does not
start. Partial sums are kept per lane, and added up outside.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.kernels import tuning
from hetero_kv.kernels.page_copy import words

BLOCK_BYTES = 1 << 19  # of one tile: a few of them fit into VMEM, and each is a long DMA
SUBLANES = {1: 32, 2: 16, 4: 8}  # rows of a native tile by bytes of a value


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: entries of a page that are copied at a time (all, or whole native tiles)."""

    rows: int


def tiles(pages: jax.Array) -> Tiles:
    """The largest tile of whole native tiles that divides a page and fits the budget."""
    _, _, entries, width = pages.shape
    size = pages.dtype.itemsize
    step = SUBLANES[size]
    fits = [
        x
        for x in range(step, entries, step)
        if entries % x == 0 and x * width * size <= BLOCK_BYTES
    ]
    whole = entries * width * size <= BLOCK_BYTES or not fits
    heuristic = Tiles(entries if whole else fits[-1])
    key = tuning.bucket(entries=entries, width=width, dtype=str(pages.dtype))
    picked = tuning.pick("page_copy/pallas_tpu", "tpu", key, heuristic)
    valid = entries % picked.rows == 0 and (picked.rows % step == 0 or picked.rows == entries)
    return picked if valid else heuristic


def check(pages: jax.Array, *_: Any) -> None:
    """Raises NotImplementedError for what the kernels cannot take."""
    if pages.dtype.itemsize not in SUBLANES or pages.dtype == jnp.bool_:
        raise NotImplementedError(
            f"pages of {pages.dtype}; values of 1, 2 or 4 bytes can be copied"
        )


def gather(
    pages: jax.Array, target: jax.Array, salt: jax.Array, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """See `reference.gather`."""
    staged, sums = _read(pages, target, salt, True, interpret)
    return staged, sums


def verify(
    pages: jax.Array, target: jax.Array, salt: jax.Array, interpret: Any = False
) -> jax.Array:
    """See `reference.verify`: every page is read once, and nothing is written."""
    return _read(pages, target, salt, False, interpret)[0]


def _read(
    pages: jax.Array, target: jax.Array, salt: jax.Array, staging: bool, interpret: Any
) -> tuple[jax.Array, ...]:
    layers, count, entries, width = pages.shape
    many, rows = target.shape[0], tiles(pages).rows

    def page_map(i, layer, t, target_ref, salts_ref):
        page = target_ref[i]
        return layer, jnp.where(page < count, page, 0), t, 0

    block = (1, 1, rows, width)
    sums = jax.ShapeDtypeStruct((many, 1, width), jnp.int32)
    sums_spec = pl.BlockSpec((1, 1, width), lambda i, layer, t, *_: (i, 0, 0))
    staged = jax.ShapeDtypeStruct((layers, many, entries, width), pages.dtype)
    staged_spec = pl.BlockSpec(block, lambda i, layer, t, *_: (layer, i, t, 0))
    out = pl.pallas_call(
        functools.partial(_read_kernel, pages=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(many, layers, entries // rows),
            in_specs=[pl.BlockSpec(block, page_map)],
            out_specs=[staged_spec, sums_spec] if staging else [sums_spec],
        ),
        out_shape=[staged, sums] if staging else [sums],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        interpret=interpret,
        name="page_gather" if staging else "page_verify",
    )(target, words.salts(salt, layers), pages)
    return *out[:-1], words.total(out[-1])


def _read_kernel(target_ref, salts_ref, page_ref, *outs, pages: int):
    held = target_ref[pl.program_id(0)] < pages
    rows = page_ref[0, 0]
    rows = jnp.where(held, rows, jnp.zeros_like(rows))
    if len(outs) == 2:
        outs[0][0, 0] = rows
    _accumulate(rows, salts_ref, outs[-1])


def _accumulate(rows: jax.Array, salts_ref, sums_ref) -> None:
    """Adds a tile to the per-lane sums of its page, which start at the page's first tile."""
    layer, t = pl.program_id(1), pl.program_id(2)
    size, width = rows.shape
    row = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) + t * size
    place = row * width + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    part = words.summands(rows, place, salts_ref[layer])

    @pl.when((layer == 0) & (t == 0))
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    sums_ref[0] += jnp.sum(part, axis=0, keepdims=True)


def scatter(
    pages: jax.Array,
    staged: jax.Array,
    target: jax.Array,
    salt: jax.Array,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.scatter`. The pool is updated in place where it is not needed any more."""
    layers, count, entries, width = pages.shape
    many, rows = target.shape[0], tiles(pages).rows
    new, sums = pl.pallas_call(
        functools.partial(_write_kernel, pages=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(many, layers, entries // rows),
            in_specs=[
                pl.BlockSpec((1, 1, rows, width), lambda i, layer, t, *_: (layer, i, t, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((1, 1, width), lambda i, layer, t, *_: (i, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, rows, width), pages.dtype),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            jax.ShapeDtypeStruct((many, 1, width), jnp.int32),
        ],
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, has_side_effects=True
        ),
        interpret=interpret,
        name="page_scatter",
    )(target, words.salts(salt, layers), staged.astype(pages.dtype), pages)
    return new, words.total(sums)


def _write_kernel(
    target_ref, salts_ref, staged_ref, old_ref, pool_ref, sums_ref, buffer, busy, done, *, pages
):
    """Two buffers take turns: a page is on its way to the pool while the next is summed up."""
    del old_ref  # the same memory as pool_ref
    i, layer, t = (pl.program_id(axis) for axis in range(3))
    size = staged_ref.shape[2]
    step = (i * pl.num_programs(1) + layer) * pl.num_programs(2) + t
    last = pl.num_programs(0) * pl.num_programs(1) * pl.num_programs(2) - 1
    slot = step % 2

    def copy(slot, page):
        there = pool_ref.at[layer, page]
        if size < pool_ref.shape[2]:
            there = there.at[pl.ds(pl.multiple_of(t * size, size), size)]
        return pltpu.make_async_copy(buffer.at[slot], there, done.at[slot])

    def settle(slot):
        @pl.when(busy[slot] != 0)
        def _():
            copy(slot, 0).wait()  # a wait looks at the size of a copy only
            busy[slot] = 0

    @pl.when(step == 0)
    def _():
        busy[0] = 0
        busy[1] = 0

    rows = staged_ref[0, 0]
    _accumulate(rows, salts_ref, sums_ref)
    page = target_ref[i]
    settle(slot)

    @pl.when(page < pages)
    def _():
        buffer[slot] = rows
        busy[slot] = 1
        copy(slot, page).start()

    @pl.when(step == last)
    def _():
        settle(0)
        settle(1)
