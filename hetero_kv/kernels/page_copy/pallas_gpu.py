"""Page copies for GPUs (Mosaic GPU, Hopper and later): pages pass through shared memory by TMA.

One block of 128 threads copies one tile of one page of one layer: in by TMA, summed up in
registers, out by TMA. It writes the sum of its tile; those are added up outside. A page counts as
one row of values here, whatever its entries are: on a GPU that view costs nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import tuning
from hetero_kv.kernels.page_copy import words

TILE_BYTES = 1 << 15  # of shared memory: several blocks share a multiprocessor
BOX = 256  # the most rows, and channels, of one TMA copy
THREADS = 128  # of a block


@dataclasses.dataclass(frozen=True)
class Tiles:
    """values: of a page that one block copies; a multiple of its threads."""

    values: int


def tiles(pages: jax.Array) -> Tiles:
    """The largest tile that divides a page and fits the budget; 0: there is none."""
    values, size = pages.shape[2] * pages.shape[3], pages.dtype.itemsize
    fits = [x for x in range(THREADS, values + 1, THREADS) if values % x == 0 and _lanes(x)]
    fits = [x for x in fits if x * size <= TILE_BYTES]
    heuristic = Tiles(max(fits, default=0))
    key = tuning.bucket(values=values, dtype=str(pages.dtype))
    picked = tuning.pick("page_copy/pallas_gpu", "cuda", key, heuristic)
    return picked if picked.values in fits else heuristic


def _lanes(values: int) -> int:
    """Values of a tile's row, so that no side of the tile exceeds a box; 0: not possible."""
    lanes = next(x for x in (BOX, BOX // 2) if values % x == 0)
    return lanes if values // lanes <= BOX else 0


def check(pages: jax.Array, *_: Any) -> None:
    """Raises NotImplementedError for what the kernels cannot take."""
    if pages.dtype not in (jnp.float32, jnp.bfloat16, jnp.uint8):
        raise NotImplementedError(
            f"pages of {pages.dtype}; float32, bfloat16 and uint8 can be copied"
        )
    if not tiles(pages).values:
        raise NotImplementedError(
            f"pages of {pages.shape[2]} x {pages.shape[3]} values do not divide into tiles of a "
            f"multiple of {THREADS}; use longer pages"
        )


def gather(
    pages: jax.Array, target: jax.Array, salt: jax.Array, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """See `reference.gather`."""
    plan = _Plan(pages, target)
    staged = jax.ShapeDtypeStruct((plan.layers, plan.many, *plan.inner), pages.dtype)
    run = plan.kernel(functools.partial(_read_body, plan), (staged, plan.sums), interpret)
    out, sums = run(target, words.salts(salt, plan.layers), plan.view(pages))
    return out.reshape(plan.layers, plan.many, *pages.shape[2:]), words.total(sums)


def verify(
    pages: jax.Array, target: jax.Array, salt: jax.Array, interpret: Any = False
) -> jax.Array:
    """See `reference.verify`."""
    plan = _Plan(pages, target)
    run = plan.kernel(functools.partial(_read_body, plan), (plan.sums,), interpret)
    (sums,) = run(target, words.salts(salt, plan.layers), plan.view(pages))
    return words.total(sums)


def scatter(
    pages: jax.Array, staged: jax.Array, target: jax.Array, salt: jax.Array, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """See `reference.scatter`. The pool is updated in place where it is not needed any more."""
    plan = _Plan(pages, target)
    pool = jax.new_ref(plan.view(pages))
    run = plan.kernel(functools.partial(_write_body, plan), (plan.sums,), interpret)
    (sums,) = run(target, words.salts(salt, plan.layers), plan.view(staged), pool)
    return jax.freeze(pool).reshape(pages.shape), words.total(sums)


class _Plan:
    """Sizes of a call, and the kernel around a body."""

    def __init__(self, pages: jax.Array, target: jax.Array):
        self.layers, self.pages = pages.shape[:2]
        self.many, self.dtype = target.shape[0], pages.dtype
        values = tiles(pages).values
        lanes = _lanes(values)
        self.tile = (values // lanes, lanes)
        self.count = pages.shape[2] * pages.shape[3] // values
        self.inner = (self.count, *self.tile)
        self.sums = jax.ShapeDtypeStruct((self.many, self.layers, self.count), jnp.int32)

    def view(self, pages: jax.Array) -> jax.Array:
        return pages.reshape(*pages.shape[:2], *self.inner)

    def kernel(self, body: Callable, out_type: tuple, interpret: Any) -> Callable:
        mesh = plgpu.Mesh(
            grid=(self.many, self.layers, self.count), grid_names=("page", "layer", "tile")
        )

        def scoped(*refs):
            pl.run_scoped(
                functools.partial(body, *refs), plgpu.SMEM(self.tile, self.dtype), plgpu.Barrier()
            )

        params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
        return pl.kernel(
            scoped, out_type=out_type, mesh=mesh, compiler_params=params, interpret=interpret
        )

    def place(self) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.axis_index(name) for name in ("page", "layer", "tile"))

    def layout(self) -> Any:
        """Of a tile in registers: neighbouring values in one thread, as wide as loads are."""
        size, widest = self.tile[0] * self.tile[1], 16 // self.dtype.itemsize
        vector = next(x for x in (8, 4, 2, 1) if x <= widest and size % (THREADS * x) == 0)
        return plgpu.Layout.WG_STRIDED(self.tile, vec_size=vector)


def _read_body(plan: _Plan, target_ref, salts_ref, pages_ref, *refs):
    *outs, sums_ref, buffer, arrived = refs
    i, layer, t = plan.place()
    page = target_ref[i]

    @pl.when(page < plan.pages)
    def _():
        plgpu.copy_gmem_to_smem(pages_ref.at[layer, page, t], buffer, arrived)
        plgpu.barrier_wait(arrived)

    @pl.when(page >= plan.pages)
    def _():
        zeros = jnp.zeros(plan.tile, plan.dtype)
        buffer[...] = plgpu.layout_cast(zeros, plan.layout())

    for out in outs:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out.at[layer, i, t])
    sums_ref[i, layer, t] = _sum(plan, buffer, salts_ref[layer], t)
    if outs:
        plgpu.wait_smem_to_gmem(0)


def _write_body(
    plan: _Plan, target_ref, salts_ref, staged_ref, pool_ref, sums_ref, buffer, arrived
):
    i, layer, t = plan.place()
    page = target_ref[i]
    plgpu.copy_gmem_to_smem(staged_ref.at[layer, i, t], buffer, arrived)
    plgpu.barrier_wait(arrived)

    @pl.when(page < plan.pages)
    def _():
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, pool_ref.at[layer, page, t])

    sums_ref[i, layer, t] = _sum(plan, buffer, salts_ref[layer], t)
    plgpu.wait_smem_to_gmem(0)


def _sum(plan: _Plan, buffer, salt: jax.Array, t: jax.Array) -> jax.Array:
    """i32[]: what a tile in shared memory adds to the checksum of its page."""
    rows, lanes = plan.tile
    row = plgpu.broadcasted_iota(jnp.int32, plan.tile, 0, layout=plan.layout())
    lane = plgpu.broadcasted_iota(jnp.int32, plan.tile, 1, layout=plan.layout())
    place = (row + t * rows) * lanes + lane
    values = plgpu.layout_cast(buffer[...], plan.layout())
    return jnp.sum(words.summands(values, place, salt))
