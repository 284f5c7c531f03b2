"""The pool of entries of one compressed branch: its leaf and its visibility rule.

Entry i is visible to query t iff `i < count(t + 1)`: the token that closes a group sees the entry
of that group.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool
from hetero_kv.attention.call import Call, View
from hetero_kv.contract import Evidence, History, Leaf
from hetero_kv.kernels.chunk_attention import operands as chunk
from hetero_kv.kernels.chunk_attention import reference
from hetero_kv.kernels.compressor.api import store
from hetero_kv.kernels.compressor.reference import Pooling
from hetero_kv.packing import Packing

TILE = 64  # entries attended at a time: fixed, so that results do not depend on pool capacity


@dataclasses.dataclass(frozen=True)
class EntryPool:
    """name: of the leaf; ratio: tokens per entry; width: channels of an entry; form: what it is.

    packing: how entries are stored; None: as they are, in `dtype`.
    """

    name: str
    component: str
    ratio: int
    width: int
    dtype: str
    tile: int = TILE
    form: attend.Form = attend.LATENT
    span: int = 0  # tokens that an entry covers; 0: `ratio`
    packing: Packing | None = None

    @property
    def contract(self) -> History:
        """When the entries can be resumed."""
        return History(self.ratio, self.span)

    def leaves(self) -> dict[str, Leaf]:
        """The entries, and a counter bumped where they are written."""
        counter = Evidence(of=self.name, kind="count")
        return {
            self.name: Leaf.of_rows(
                self.width,
                self.dtype,
                self.packing,
                contract=self.contract,
                component=self.component,
                tile=self.tile,
            ),
            f"{self.name}_count": Leaf(contract=counter, component=self.component, dtype="int32"),
        }

    def settled(self, entries: jax.Array) -> jax.Array:
        """Entries [..., width] as they are read once they are stored."""
        return entries if self.packing is None else self.packing.settled(entries)

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

    def close(
        self,
        view: View,
        call: Call,
        how: Pooling,
        norm: jax.Array,
        tail: jax.Array,
        raw: jax.Array | None,
    ) -> View:
        """Appends the entries that close within the call; in a replay none. See `store`."""
        count = jnp.where(call.replay, 0, call.count)
        first = call.start // self.ratio
        done = (call.start + count) // self.ratio - first
        counter, stored = f"{self.name}_count", view.leaves[self.name]
        most = how.most(1 if raw is None else raw.shape[1])
        written = pool.landed(stored, first, most, done)
        new = store(how, stored, view.layer, norm, tail, raw, call.start, count)
        return view.update(
            **{self.name: new, counter: pool.bump(view.leaves[counter], view.layer, written)}
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
        chosen: chunk.Chosen | None = None,
    ) -> attend.State:
        """Adds every visible entry for queries q [R, S, H, c] (or grouped), tile by tile.

        chosen narrows the set, query by query.
        """
        entries = chunk.Entries(view.leaves[self.name], chosen)
        visible = self.visible(call.positions), self.visible(call.stop - 1)
        rule = chunk.Rule(scale, self.ratio, self.tile)
        tiles = self.tiles(call)
        return reference.entries(state, q, entries, view.layer, visible, tiles, rule, self.form)
