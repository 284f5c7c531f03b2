"""How the rows of a tile come into a GPU's shared memory: as floats, or packed, for both bodies.

One warpgroup calls `fetch` for tile after tile, the others `wait` for each and say when they are
done with it. Floats have `stages` buffers. Packed entries have them too, for bytes, but one buffer
of rows only: each warpgroup unpacks its own channels there, and the tile after next is on its way
meanwhile. Rows of a window are floats always, and go where unpacked ones go.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import hopper, unpack_gpu
from hetero_kv.kernels.buffers_gpu import Buffers
from hetero_kv.kernels.decode_attention.plan_gpu import Plan

Copy = Callable[[Any, int, int, Any], None]  # source, first row, rows, barrier; to one buffer


class Tiles:
    """What both have.

    Args:
        plan: of the call.
        stages: buffers.
        parts: warpgroups that compute, each with its own channels.
        buffer: shared memory of rows, for so many tiles.
        copies: how many copies bring the channels of some rows.
    """

    def __init__(
        self, plan: Plan, stages: int, parts: int, buffer: Callable[[int], Any], copies: int = 1
    ):
        self.plan, self.stages, self.parts = plan, stages, parts
        self.buffer, self.copies = buffer, copies

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return hopper.size(self.memory())

    def bind(self, held: Any, refs: Any, layers: Any, row: jax.Array) -> None:
        """Within the kernel: shared memory as of `memory`, rows and places in device memory, the
        layers of the window and of entries, and the sequence."""
        self.held, self.refs, self.layers, self.row = held, refs, layers, row

    def window(self, tile: jax.Array, copy: Callable[[Any, int], None]) -> None:
        """Calls copy(source, j) for each copy of a tile of the window."""
        plan, many = self.plan, self.plan.tile // self.plan.window_copy
        for j in range(many):
            # A window shorter than a tile is repeated; what is repeated is not seen.
            first = jax.lax.rem((tile * many + j) * plan.window_copy, plan.window)
            first = pl.multiple_of(first, plan.window_copy)
            copy(self.refs[0].at[self.layers[0], self.row, pl.ds(first, plan.window_copy)], j)

    def entries(self, tile: jax.Array, copy: Callable[[Any, int], None]) -> None:
        """As `window`, for a tile of entries."""
        plan, many = self.plan, self.plan.tile // self.plan.copy
        places, pages = self.refs[-2:]
        for j in range(many):
            at = (tile - plan.window_tiles) * many + j
            first = pl.multiple_of(places[self.row, at, 1], plan.copy)
            page = places[self.row, at, 0]
            copy(pages.at[self.layers[1], page, pl.ds(first, plan.copy)], j)

    def choose(self, tile: jax.Array, window: Callable, entries: Callable) -> None:
        """Runs the one that the tile is of."""
        if not self.plan.page:
            window()
        elif not self.plan.window:
            entries()
        else:
            jax.lax.cond(tile < self.plan.window_tiles, window, entries)


class Floats(Tiles):
    """Rows are stored as they are multiplied."""

    @property
    def buffers(self) -> Buffers:
        """Of rows."""
        many = self.copies * (self.plan.tile // self.plan.copy)
        return Buffers(self.stages, many, self.parts, self.buffer)

    def memory(self) -> tuple:
        """For `pl.run_scoped`."""
        return self.buffers.memory()

    def rows(self, i: jax.Array) -> Any:
        """The rows of the i-th tile."""
        return self.buffers.rows(self.held, i)

    def fetch(self, i: jax.Array, tile: jax.Array, copy: Copy) -> None:
        """Starts the copies of the i-th tile, which is `tile` of the sequence."""

        def start(rows: Any, barrier: Any) -> None:
            def one(source: Any, j: int) -> None:
                copy(source, rows, j * self.plan.copy, barrier)

            self.choose(tile, lambda: self.window(tile, one), lambda: self.entries(tile, one))

        self.buffers.fetch(self.held, i, start)

    def wait(self, i: jax.Array, tile: jax.Array, unpack: Callable) -> None:
        """Until the tile is there."""
        del tile, unpack
        self.buffers.wait(self.held, i)

    def done(self, i: jax.Array) -> None:
        """Says that nothing of the tile will be read any more."""
        self.buffers.done(self.held, i)


class PackedEntries(Tiles):
    """Entries are stored as bytes."""

    @property
    def buffers(self) -> Buffers:
        """Of bytes."""
        many = self.plan.packing.bytes // unpack_gpu.BOX * (self.plan.tile // self.plan.copy)
        memory = functools.partial(unpack_gpu.memory, self.plan.packing, self.plan.tile)
        return Buffers(self.stages, many, self.parts, memory)

    def memory(self) -> tuple:
        """For `pl.run_scoped`: bytes, rows, what unpacking needs, and barriers: for a tile of the
        window, and for the rows."""
        plan = self.plan
        return (
            self.buffers.memory(),
            self.buffer(1),
            unpack_gpu.scratch(plan.packing, plan.tile),
            plgpu.Barrier(num_arrivals=self.copies * (plan.tile // plan.window_copy)),
            plgpu.Barrier(num_arrivals=self.parts),
        )

    def rows(self, i: jax.Array) -> Any:
        """The rows of the i-th tile."""
        del i
        return self.held[1].at[0]

    def fetch(self, i: jax.Array, tile: jax.Array, copy: Copy) -> None:
        """Starts the copies of the i-th tile, which is `tile` of the sequence."""
        packed, _, _, near, read = self.held

        def window() -> None:
            @pl.when(i > 0)  # tiles of the window come first: this waits for each of them once
            def _() -> None:
                plgpu.barrier_wait(read)

            def one(source: Any, j: int) -> None:
                copy(source, self.rows(i), j * self.plan.window_copy, near)

            self.window(tile, one)

        def start(raw: Any, barrier: Any) -> None:
            def one(source: Any, j: int) -> None:
                there = raw.at[:, pl.ds(j * self.plan.copy, self.plan.copy), :]
                unpack_gpu.boxes(source, there, self.plan.packing, barrier)

            self.choose(tile, window, lambda: self.entries(tile, one))

        self.buffers.fetch(packed, i, start)

    def wait(self, i: jax.Array, tile: jax.Array, unpack: Callable) -> None:
        """Until the tile is there, of which `unpack(raw, scratch)` puts this warpgroup's part."""
        packed, _, scratch, near, read = self.held

        @pl.when(i > 0)
        def _() -> None:
            plgpu.barrier_wait(read)

        def window() -> None:
            plgpu.barrier_wait(near)

        def entries() -> None:
            self.buffers.wait(packed, i)
            unpack(self.buffers.rows(packed, i), scratch)
            plgpu.commit_smem()  # loads are over before a copy may write there

        self.choose(tile, window, entries)
        self.buffers.done(packed, i)

    def done(self, i: jax.Array) -> None:
        """Says that nothing of the tile will be read any more."""
        del i
        plgpu.barrier_arrive(self.held[-1])


def make(
    plan: Plan, stages: int, parts: int, buffer: Callable[[int], Any], copies: int = 1
) -> Floats | PackedEntries:
    """The one for how entries are stored."""
    return (PackedEntries if plan.packing else Floats)(plan, stages, parts, buffer, copies)
