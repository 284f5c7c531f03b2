"""The sliding-window branch: the last W rows of a layer, the current token included.

Key j is visible to query t iff `0 <= t - j < W`. Shared by all layers with a window. Where rows are
packed, queries see what is read of the bytes of every row, those of their own call too: a row is
the same however the tokens are split into calls.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv import contract
from hetero_kv.attention import attend, ring
from hetero_kv.attention.call import Call, View
from hetero_kv.attention.fields import Fields
from hetero_kv.contract import Evidence, Leaf
from hetero_kv.kernels.chunk_attention import operands as chunk
from hetero_kv.kernels.chunk_attention import reference
from hetero_kv.kernels.decode_attention.operands import Window
from hetero_kv.packing import Packing


@dataclasses.dataclass(frozen=True)
class WindowBranch:
    """width: tokens (>= 1); dim: channels of a row; form: what a row is to a query.

    packing: how rows are stored; None: as they are, in `dtype`.
    """

    width: int
    dim: int
    dtype: str
    form: attend.Form = attend.LATENT
    packing: Packing | None = None

    @classmethod
    def of(cls, fields: Fields, rope: int) -> "WindowBranch | None":
        """The window of shared-latent rows that a layer type's fields ask for; None: window = 0.

        rope: rotated channels, the last ones of a row.
        """
        if fields.window < 1:
            return None
        packing = fields.packing("window", fields.head_dim, rope)
        return cls(fields.window, fields.head_dim, fields.cache_dtype, packing=packing)

    def leaves(self) -> dict[str, Leaf]:
        """The ring of rows and the position of each."""
        evidence = Evidence(of="window", kind="positions")
        return {
            "window": Leaf.of_rows(
                self.dim,
                self.dtype,
                self.packing,
                contract=contract.Window(self.width),
                component="windows",
                rows=self.width,
            ),
            "window_pos": Leaf(
                contract=evidence, component="windows", rows=self.width, dtype="int32"
            ),
        }

    def settled(self, kv: jax.Array) -> jax.Array:
        """Rows [..., dim] as they are read once they are stored."""
        return kv if self.packing is None else self.packing.settled(kv)

    def before(self, kv: jax.Array, view: View, call: Call) -> chunk.Window:
        """The operand of chunk attention: the ring before the call, and the call's rows [R, S, c].

        It is to be read before `advance` overwrites the ring.
        """
        return chunk.Window(view.leaves["window"], self.settled(kv), call.first)

    def advance(self, kv: jax.Array, view: View, call: Call) -> View:
        """Moves the ring on by a call's rows [R, S, c]."""
        window, seen = view.leaves["window"], view.leaves["window_pos"]
        return view.update(
            window=ring.move(window, view.layer, call.start, kv, call.count),
            window_pos=ring.move(seen, view.layer, call.start, call.positions, call.count),
        )

    def prefill(
        self,
        state: attend.State,
        q: jax.Array,
        kv: jax.Array,
        view: View,
        call: Call,
        scale: float,
    ) -> tuple[attend.State, View]:
        """Adds the window to queries at the call's positions, and moves the ring on.

        q [R, S, H, c] (or grouped, see `Form`), kv [R, S, c].
        """
        window = self.before(kv, view, call)
        state = reference.window(
            state, q, window, view.layer, call.start, call.positions, scale, self.form, self.mask
        )
        return state, self.advance(kv, view, call)

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

    def held(self, view: View, call: Call) -> Window:
        """The ring, and what one query at `start` sees of it: the operand of decode attention."""
        return Window(view.leaves["window"], call.start, call.stop)

    def forward(
        self, state: attend.State, q: jax.Array, kv: jax.Array, positions: jax.Array, scale: float
    ) -> attend.State:
        """All queries of sequences from position 0. q [B, T, H, c], kv [B, T, c]."""
        none, kv = jnp.zeros((kv.shape[0], 0), jnp.int32), self.settled(kv)
        return reference.bands(
            state, q, kv, kv[:, :0], none, positions, self.width, scale, self.form, self.mask
        )

    def mask(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """bool[R, S, K] of i32[R, S] query and i32[R, K] key positions, for forward and prefill."""
        return reference.near(queries, keys, self.width)
