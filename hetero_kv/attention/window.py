"""The sliding-window branch: the last W rows of a layer, the current token included.

Key j is visible to query t iff `0 <= t - j < W`. Shared by all layers with a window.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, ring
from hetero_kv.attention.call import Call, View
from hetero_kv.attention.fields import Fields
from hetero_kv.contract import Evidence, Leaf, Window

BAND = 64  # shortest band of queries that is attended at a time
ABSENT = -1  # position of a key that is not there


@dataclasses.dataclass(frozen=True)
class WindowBranch:
    """width: tokens (>= 1); dim: channels of a row; form: what a row is to a query."""

    width: int
    dim: int
    dtype: str
    form: attend.Form = attend.LATENT

    @classmethod
    def of(cls, fields: Fields) -> "WindowBranch | None":
        """The window of shared-latent rows that a layer type's fields ask for; None: window = 0."""
        if fields.window < 1:
            return None
        return cls(fields.window, fields.head_dim, fields.cache_dtype)

    def leaves(self) -> dict[str, Leaf]:
        """The ring of rows and the position of each."""
        evidence = Evidence(of="window", kind="positions")
        return {
            "window": Leaf(
                contract=Window(self.width),
                component="windows",
                rows=self.width,
                width=(self.dim,),
                dtype=self.dtype,
            ),
            "window_pos": Leaf(
                contract=evidence, component="windows", rows=self.width, dtype="int32"
            ),
        }

    def prefill(
        self, state: attend.State, q: jax.Array, kv: jax.Array, view: View, call: Call, scale: float
    ) -> tuple[attend.State, View]:
        """Adds the window's keys for a call's queries and moves the ring on.

        q [R, S, H, c] (or grouped, see `Form`), kv [R, S, c].
        """
        held = ring.read(view.leaves["window"], view.layer)
        before = call.start[:, None] - self.width + jnp.arange(self.width, dtype=jnp.int32)
        # The oldest row, position start - W, is out of every query's sight.
        live = (before >= call.first[:, None]) & (before > call.start[:, None] - self.width)
        old = attend.clean(ring.ordered(held, call.start), live)
        before = jnp.where(live, before, ABSENT)
        state = self._bands(state, q, kv.astype(held.dtype), old, before, call.positions, scale)
        return state, self._advance(view, held, kv, call)

    def _advance(self, view: View, held: jax.Array, kv: jax.Array, call: Call) -> View:
        moved = ring.advance(held, call.start, kv, call.count)
        seen = ring.read(view.leaves["window_pos"], view.layer)
        seen = ring.advance(seen, call.start, call.positions, call.count)
        return view.update(
            window=ring.store(view.leaves["window"], view.layer, moved),
            window_pos=ring.store(view.leaves["window_pos"], view.layer, seen),
        )

    def write(self, kv: jax.Array, view: View, call: Call) -> View:
        """Puts one row [R, c] a sequence into the ring."""
        position, keep = call.positions[:, 0], call.count > 0
        window, seen = view.leaves["window"], view.leaves["window_pos"]
        return view.update(
            window=ring.write_one(window, view.layer, position, kv, keep),
            window_pos=ring.write_one(seen, view.layer, position, position, keep),
        )

    def rows(self, view: View, call: Call) -> tuple[jax.Array, jax.Array]:
        """Rows [R, W, c] visible to one query at `start` (ring order), and which are: [R, W].

        A row that does not run has not written its own position, which is then not visible.
        """
        held = ring.held_positions(self.width, call.start + 1)
        live = (held >= call.first[:, None]) & (held < call.stop[:, None])
        return attend.clean(ring.read(view.leaves["window"], view.layer), live), live

    def forward(
        self, state: attend.State, q: jax.Array, kv: jax.Array, positions: jax.Array, scale: float
    ) -> attend.State:
        """All queries of sequences from position 0. q [B, T, H, c], kv [B, T, c]."""
        none = jnp.zeros((kv.shape[0], 0), jnp.int32)
        return self._bands(state, q, kv, kv[:, :0], none, positions, scale)

    def _bands(
        self,
        state: attend.State,
        q: jax.Array,
        kv: jax.Array,
        old: jax.Array,
        before: jax.Array,
        positions: jax.Array,
        scale: float,
    ) -> attend.State:
        """Adds keys to queries in bands: each sees its own band of keys and the one before.

        A band is at least as long as the window, so no visible key is missed; the work grows with
        tokens times window, not with tokens squared.

        Args:
            state, q: lead axes [R, S, H], and [R, S, H, c]; or grouped.
            kv: [R, S, c] own rows of the queries, at i32[R, S] `positions`.
            old: [R, n, c] rows before them, n <= W, at i32[R, n] `before` (ABSENT: not there).
        """
        rows, tokens = positions.shape
        size = max(self.width, BAND)
        if tokens <= size:  # one band: exactly the rows there are
            keys = jnp.concatenate([old, kv], axis=1)
            at = jnp.concatenate([before, positions], axis=1)
            return self.form.add(state, q, keys, self.mask(positions, at), scale)
        bands = -(-tokens // size)
        pad, front = bands * size - tokens, size - old.shape[1]

        def fill(x: jax.Array, head: int, tail: int, value: int = 0) -> jax.Array:
            edges = ((0, 0), (head, tail)) + ((0, 0),) * (x.ndim - 2)
            return jnp.pad(x, edges, constant_values=value)

        def cut(x: jax.Array) -> jax.Array:
            return x.reshape(rows * bands, size, *x.shape[2:])

        def pairs(old: jax.Array, new: jax.Array, value: int) -> jax.Array:
            x = jnp.concatenate([fill(old, front, 0, value), fill(new, 0, pad, value)], axis=1)
            return jnp.concatenate([cut(x[:, :-size]), cut(x[:, size:])], axis=1)

        keys, at = pairs(old, kv, 0), pairs(before, positions, ABSENT)
        mask = self.mask(cut(fill(positions, 0, pad)), at)
        padded = attend.State(*(cut(fill(x, 0, pad)) for x in state))
        banded = self.form.add(padded, cut(fill(q, 0, pad)), keys, mask, scale)
        join = (x.reshape(rows, bands * size, *x.shape[2:])[:, :tokens] for x in banded)
        return attend.State(*join)

    def mask(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """bool[R, S, K] of i32[R, S] query and i32[R, K] key positions."""
        gap = queries[:, :, None] - keys[:, None, :]
        return (gap >= 0) & (gap < self.width) & (keys >= 0)[:, None, :]
