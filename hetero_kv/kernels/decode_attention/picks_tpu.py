"""Picked entries on a TPU: of each its sublane group is copied, and the row taken from that."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.kernels import fetch_tpu
from hetero_kv.kernels.fetch_tpu import Geometry


@dataclasses.dataclass(frozen=True)
class Picks:
    """geometry: of the pool's pages; many: picks per tile; tiles: how many of these."""

    geometry: Geometry
    many: int
    tiles: int

    @property
    def group(self) -> int:
        """Rows of one copy."""
        return min(fetch_tpu.sublanes(self.geometry.dtype), self.geometry.entries)

    def check(self) -> None:
        """Raises NotImplementedError where groups do not divide a page."""
        if self.geometry.entries % self.group:
            raise NotImplementedError(
                f"pages of {self.geometry.entries} entries: picked entries are read in groups of "
                f"{self.group}, which must divide a page"
            )

    def scratch(self) -> list:
        """Memory that `PickFetch` needs: two buffers, a semaphore each, the rows."""
        shape = (2, self.many, self.group, self.geometry.width)
        return [
            pltpu.VMEM(shape, self.geometry.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((self.many, self.geometry.width), self.geometry.wide),
        ]


class PickFetch:
    """The picked entries of one sequence, i32[1, tiles * many] scalars; negative: none."""

    def __init__(self, picks, layer, table, pages, picked, buffer, semaphores, rows):
        self.picks, self.layer = picks, layer
        self.table, (self.pages, *constants), self.picked = table, pages, picked
        self._matrix = constants[0] if constants else None
        self.buffer, self.semaphores, self._rows = buffer, semaphores, rows

    def start(self, t: jax.Array) -> None:
        """Starts the copies of tile t."""
        self._each(t, lambda copy: copy.start(), False)

    def wait(self, t: jax.Array) -> None:
        """Ends them."""
        self._each(t, lambda copy: copy.wait(), True)

    def _each(self, t, act, fill) -> None:
        picks, slot = self.picks, jax.lax.rem(t, 2)

        def body(j: jax.Array, _: int) -> int:
            index = self.picked[0, t * picks.many + j]
            page, found = picks.geometry.page(self.table, index)
            target = self.buffer.at[slot, j]

            @pl.when(found)
            def _():
                source = self.pages.at[self.layer, page]
                if picks.group < picks.geometry.entries:
                    place = jax.lax.rem(index, picks.geometry.entries)
                    first = pl.multiple_of(place - jax.lax.rem(place, picks.group), picks.group)
                    source = self.pages.at[self.layer, page, pl.ds(first, picks.group), :]
                act(pltpu.make_async_copy(source, target, self.semaphores.at[slot]))

            if fill:

                @pl.when((index >= 0) & ~found)
                def _():
                    target[...] = jnp.full(target.shape, picks.geometry.nothing, target.dtype)

            return 0

        jax.lax.fori_loop(0, picks.many, body, 0)

    def rows(self, t: jax.Array) -> jax.Array:
        """f32[many, c] of tile t; zero where there is none."""
        group, slot, wide = self.picks.group, jax.lax.rem(t, 2), self.picks.geometry.wide
        place = jax.lax.broadcasted_iota(jnp.int32, (group, 1), 0)

        def body(j: jax.Array, _: int) -> int:
            index = self.picked[0, t * self.picks.many + j]
            wanted = jnp.where(index >= 0, jax.lax.rem(index, group), -1)
            # The other rows of the group are zeroed and the group is added up: exact.
            own = self.buffer[slot, j].astype(wide)
            rows = jnp.where(place == wanted, own, jnp.zeros_like(own))
            self._rows[pl.ds(j, 1), :] = jnp.sum(rows, axis=0, keepdims=True)
            return 0

        jax.lax.fori_loop(0, self.picks.many, body, 0)
        return self.picks.geometry.floats(self._rows[...], self._matrix)
