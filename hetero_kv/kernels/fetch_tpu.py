"""Copies of pages into on-chip memory of a TPU, in tiles, double buffered.

A copy from tiled memory takes whole sublane groups, never a single row. Only what exists is copied:
no page beyond the visible entries; a page whose id is none reads as NaN. Quantised rows are copied
as they are stored, and unpacked from on-chip memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.attention.pool import Pool
from hetero_kv.kernels import paging
from hetero_kv.kernels.unpack_tpu import Unpack
from hetero_kv.packing import POISON

# In kernels `lax.div` and `lax.rem`, not `//` and `%`: the sign handling of those asks for the kind
# of the device, which a host that lowers for another platform does not know.


def sublanes(dtype: Any) -> int:
    """Rows of one tile of memory."""
    return 32 // jnp.dtype(dtype).itemsize


def table_spec(columns: int) -> pl.BlockSpec:
    """One sequence's row of a table i32[R, 1, n], as scalars."""
    return pl.BlockSpec((None, 1, columns), lambda r, *_: (r, 0, 0), memory_space=pltpu.SMEM)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """many: pages per tile; entries, width: of a page; pages: of the pool; columns: of a table.

    unpack: how rows are read that are stored as bytes; None: they are floats.
    """

    many: int
    entries: int
    width: int
    pages: int
    columns: int
    dtype: Any
    unpack: Unpack | None

    @classmethod
    def of(cls, pool: Pool, size: int) -> "Geometry":
        """Tiles of about `size` entries, in whole pages."""
        view = jax.eval_shape(lambda x: paging.view(x, size), pool)
        _, pages, entries, width = view.pages.shape
        columns, packing = view.table.shape[1], paging.packing(pool)
        many = max(1, min(size // entries, columns))
        unpack = Unpack(packing) if packing else None
        return cls(many, entries, width, pages, columns, view.pages.dtype, unpack)

    @property
    def size(self) -> int:
        """Entries per tile."""
        return self.many * self.entries

    @property
    def compact(self) -> bool:
        """Whether pages have fewer rows than a tile of memory: these are put together by row."""
        return self.entries % sublanes(self.dtype) != 0

    @property
    def wide(self) -> Any:
        """The 32-bit type in which single rows are handled."""
        return jnp.int32 if self.unpack else jnp.float32

    @property
    def nothing(self) -> Any:
        """What reads as NaN."""
        return POISON if self.unpack else jnp.nan

    def scratch(self) -> list:
        """Memory that `Fetch` needs: two buffers, a semaphore each, rows put together."""
        buffer = pltpu.VMEM((2, self.many, self.entries, self.width), self.dtype)
        rows = [pltpu.VMEM((self.size, self.width), self.wide)] if self.compact else []
        return [buffer, pltpu.SemaphoreType.DMA((2,)), *rows]

    def constants(self) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Operands that `Fetch` takes after the pages, and their blocks: the matrix of `Unpack`."""
        if not self.unpack:
            return [], []
        matrix = self.unpack.matrix()
        return [matrix], [pl.BlockSpec(matrix.shape, lambda *_: (0, 0))]

    def floats(self, rows: jax.Array, matrix: Any) -> jax.Array:
        """Rows as they are attended."""
        return self.unpack.rows(rows, matrix[...]) if self.unpack else rows

    def page(self, table: Any, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of an entry (0: none), and whether there is one."""
        column = jax.lax.div(index, self.entries)
        inside = (index >= 0) & (column < self.columns)
        page = table[0, jnp.where(inside, column, 0)]
        found = inside & (page >= 0) & (page < self.pages)
        return jnp.where(found, page, 0), found


class Fetch:
    """The first `visible` entries of one sequence, tile by tile.

    pages: and the constants of the geometry.
    """

    def __init__(self, geometry, layer, visible, table, pages, buffer, semaphores, rows=None):
        self.geometry, self.layer, self.visible = geometry, layer, visible
        self.table, (self.pages, *constants) = table, pages
        self._matrix = constants[0] if constants else None
        self.buffer, self.semaphores, self._rows = buffer, semaphores, rows

    @property
    def tiles(self) -> jax.Array:
        """How many tiles there are."""
        size = self.geometry.size
        return jax.lax.div(self.visible + size - 1, size)

    def start(self, t: jax.Array) -> None:
        """Starts the copies of tile t."""
        self._each(t, lambda copy, _: copy.start(), lambda _: None)

    def wait(self, t: jax.Array) -> None:
        """Ends them."""

        def nothing(page: Any) -> None:
            page[...] = jnp.full(page.shape, self.geometry.nothing, page.dtype)

        self._each(t, lambda copy, _: copy.wait(), nothing)

    def _each(self, t: jax.Array, act: Callable, otherwise: Callable) -> None:
        slot = jax.lax.rem(t, 2)

        def body(j: jax.Array, _: int) -> int:
            index = t * self.geometry.size + j * self.geometry.entries
            page, found = self.geometry.page(self.table, index)
            wanted, target = index < self.visible, self.buffer.at[slot, j]

            @pl.when(wanted & found)
            def _():
                source = self.pages.at[self.layer, page]
                act(pltpu.make_async_copy(source, target, self.semaphores.at[slot]), j)

            @pl.when(wanted & ~found)
            def _():
                otherwise(target)

            return 0

        jax.lax.fori_loop(0, self.geometry.many, body, 0)

    def rows(self, t: jax.Array) -> jax.Array:
        """Rows [size, w] of tile t; those beyond `visible` may be anything."""
        slot = jax.lax.rem(t, 2)
        if not self.geometry.compact:
            whole = self.buffer[slot].reshape(self.geometry.size, self.geometry.width)
            return self.geometry.floats(whole, self._matrix)

        def body(j: jax.Array, _: int) -> int:
            page = self.buffer[slot, j].astype(self.geometry.wide)
            for i in range(self.geometry.entries):
                self._rows[pl.ds(j * self.geometry.entries + i, 1), :] = page[i : i + 1]
            return 0

        jax.lax.fori_loop(0, self.geometry.many, body, 0)
        if self.geometry.unpack:
            return self.geometry.floats(self._rows[...], self._matrix)
        return self._rows[...].astype(self.geometry.dtype)

    def seen(self, t: jax.Array, axis: int) -> jax.Array:
        """Which entries of tile t are visible: bool[size, 1] (axis 0) or bool[1, size] (1)."""
        size = self.geometry.size
        shape = (size, 1) if axis == 0 else (1, size)
        return t * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < self.visible


def each_tile(source: Any, tiles: int | jax.Array, body: Callable, state: Any) -> Any:
    """`state = body(t, state)` for every tile; the copies of the next are on their way then."""

    @pl.when(jnp.asarray(tiles) > 0)
    def _():
        source.start(jnp.int32(0))

    def step(t: jax.Array, state: Any) -> Any:
        @pl.when(t + 1 < tiles)
        def _():
            source.start(t + 1)

        source.wait(t)
        return body(t, state)

    return jax.lax.fori_loop(0, tiles, step, state)
