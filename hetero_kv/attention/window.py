"""The sliding-window branch: the last W rows of a layer, the current token included.

Key j is visible to query t iff `0 <= t - j < W`. Shared by sliding, CSA and HCA layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, ring
from hetero_kv.attention.call import Call, View
from hetero_kv.contract import Evidence, Leaf, Window


@dataclasses.dataclass(frozen=True)
class WindowBranch:
    """width: tokens (>= 1); dim: channels of a row."""

    width: int
    dim: int
    dtype: str

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

        q [R, S, H, c], kv [R, S, c].
        """
        held = ring.read(view.leaves["window"], view.layer)
        before = call.start[:, None] - self.width + jnp.arange(self.width, dtype=jnp.int32)
        old = ring.ordered(held, call.start)
        # The oldest row, position start - W, is out of every query's sight.
        live = (before >= call.first[:, None]) & (before > call.start[:, None] - self.width)
        keys = jnp.concatenate([attend.clean(old, live), kv.astype(held.dtype)], axis=1)
        key_positions = jnp.concatenate(
            [jnp.where(live, before, -self.width - 1), call.positions], axis=1
        )
        gap = call.positions[:, :, None] - key_positions[:, None, :]
        mask = (gap >= 0) & (gap < self.width) & (key_positions >= 0)[:, None, :]
        state = attend.add(state, q, keys, mask, scale)
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
        self, state: attend.State, q: jax.Array, kv: jax.Array, scale: float
    ) -> attend.State:
        """All queries of a sequence from position 0, in bands of at least W tokens.

        q [B, T, H, c], kv [B, T, c]; the state's lead axes are [B, T, H].
        """
        batch, tokens, _, dim = q.shape
        size = min(max(self.width, 16), tokens)
        bands = -(-tokens // size)
        pad = bands * size - tokens

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
            return x.reshape(batch * bands, size, *x.shape[2:])

        keys = cut(kv).reshape(batch, bands, size, dim)
        before = jnp.pad(keys, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        keys = jnp.concatenate([before, keys], axis=2).reshape(batch * bands, 2 * size, dim)
        inner = jnp.arange(size)[:, None] + size - jnp.arange(2 * size)[None, :]
        mask = (inner >= 0) & (inner < self.width)
        mask = jnp.broadcast_to(mask, (bands, size, 2 * size))
        mask = mask & ((jnp.arange(bands) > 0)[:, None, None] | (jnp.arange(2 * size) >= size))
        mask = jnp.broadcast_to(mask, (batch, *mask.shape)).reshape(-1, size, 2 * size)
        banded = attend.add(attend.State(*map(cut, state)), cut(q), keys, mask, scale)

        def join(x: jax.Array) -> jax.Array:
            x = x.reshape(batch, bands * size, *x.shape[2:])
            return x[:, :tokens]

        return attend.State(*map(join, banded))
