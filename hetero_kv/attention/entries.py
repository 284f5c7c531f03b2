"""The pool of entries of one compressed branch: its leaf, its visibility rule, dense attention.

Entry i is visible to query t iff `i < count(t + 1)`: the token that closes a group sees the entry
of that group.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool
from hetero_kv.attention.call import Call, View
from hetero_kv.contract import Evidence, History, Leaf

TILE = 64  # entries attended at a time: fixed, so that results do not depend on pool capacity


@dataclasses.dataclass(frozen=True)
class EntryPool:
    """name: of the leaf; ratio: tokens per entry; width: channels of an entry; form: what it is."""

    name: str
    component: str
    ratio: int
    width: int
    dtype: str
    tile: int = TILE
    form: attend.Form = attend.LATENT
    span: int = 0  # tokens that an entry covers; 0: `ratio`

    @property
    def contract(self) -> History:
        """When the entries can be resumed."""
        return History(self.ratio, self.span)

    def leaves(self) -> dict[str, Leaf]:
        """The entries, and a counter bumped where they are written."""
        counter = Evidence(of=self.name, kind="count")
        return {
            self.name: Leaf(
                contract=self.contract,
                component=self.component,
                width=(self.width,),
                dtype=self.dtype,
                tile=self.tile,
            ),
            f"{self.name}_count": Leaf(contract=counter, component=self.component, dtype="int32"),
        }

    def append(
        self, view: View, call: Call, start: jax.Array, entries: jax.Array, count: jax.Array
    ) -> View:
        """Writes i32[R] `count` of entries [R, n, width] from entry `start` on; not in a replay."""
        count = jnp.where(call.replay, 0, count)
        counter, stored = f"{self.name}_count", view.leaves[self.name]
        written = pool.landed(stored, start, entries.shape[1], count)
        return view.update(
            **{
                self.name: pool.append(stored, view.layer, start, entries, count),
                counter: pool.bump(view.leaves[counter], view.layer, written),
            }
        )

    def visible(self, positions: jax.Array) -> jax.Array:
        """How many entries a query at i32[...] positions sees."""
        return self.contract.count(positions + 1)

    def tiles(self, call: Call) -> jax.Array:
        """Tiles that hold an entry visible to any query of the call."""
        most = jnp.max(jnp.where(call.count > 0, self.visible(call.stop - 1), 0))
        return -(-most // self.tile)

    def attend(
        self,
        state: attend.State,
        q: jax.Array,
        view: View,
        call: Call,
        scale: float,
        chosen: Callable[[jax.Array], jax.Array] | None = None,
    ) -> attend.State:
        """Adds every visible entry for queries q [R, S, H, c] (or grouped), tile by tile.

        chosen(index of the tile) -> bool[R, S, tile] narrows the set (CSA prefill).
        """
        entries = view.leaves[self.name]
        written = self.visible(call.stop - 1)
        visible = self.visible(call.positions)[..., None]

        def body(t: jax.Array, state: attend.State) -> attend.State:
            index = t * self.tile + jnp.arange(self.tile, dtype=jnp.int32)
            rows = attend.clean(
                pool.tile(entries, view.layer, t, self.tile), index < written[:, None]
            )
            mask = index < visible
            if chosen is not None:
                mask = mask & chosen(t)
            return self.form.add(state, q, rows, mask, scale)

        return jax.lax.fori_loop(0, self.tiles(call), body, state)
