"""Tiles in a GPU's shared memory: one warpgroup has them copied, others wait for and free them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Buffers:
    """As many tiles at a time as there are stages.

    stages: tiles; copies: that bring one; readers: warpgroups that use it; buffer: shared memory
    for so many of them. `held` is what `memory` asked for, within a kernel; i counts tiles.
    """

    stages: int
    copies: int
    readers: int
    buffer: Callable[[int], Any]

    def memory(self) -> tuple:
        """For `pl.run_scoped`."""
        return (
            self.buffer(self.stages),
            plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=self.readers, num_barriers=self.stages),
        )

    def rows(self, held: tuple, i: jax.Array) -> Any:
        """The memory of the i-th tile."""
        return held[0].at[jax.lax.rem(i, self.stages)]

    def fetch(self, held: tuple, i: jax.Array, start: Callable[[Any, Any], None]) -> None:
        """Calls start(memory, barrier) for the copies of the i-th tile, once there is room."""
        slot = jax.lax.rem(i, self.stages)

        @pl.when(i >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(held[2].at[slot])

        start(held[0].at[slot], held[1].at[slot])

    def wait(self, held: tuple, i: jax.Array) -> None:
        """Until the i-th tile is there."""
        plgpu.barrier_wait(held[1].at[jax.lax.rem(i, self.stages)])

    def done(self, held: tuple, i: jax.Array) -> None:
        """Says that nothing of the i-th tile will be read any more."""
        plgpu.barrier_arrive(held[2].at[jax.lax.rem(i, self.stages)])
