"""A short causal convolution of every channel by itself, and the rows that it reaches back to.

`y_t = act(sum_i w[i] x_{t - K + 1 + i} + b)`, with x = 0 before the first token. What is kept is x,
not y: the last K - 1 rows, at exactly the length that they are for.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, ring
from hetero_kv.attention.call import Call, View
from hetero_kv.contract import Evidence, Leaf, Point
from hetero_kv.params import Params, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """width: K taps (>= 2); channels; bias: whether there is one; dtype: of the rows that are kept.

    Followed by SiLU. Leaves: conv, a ring of K rows, and conv_pos.
    """

    component: str
    width: int
    channels: int
    dtype: str
    bias: bool = False

    def __post_init__(self):
        if self.width < 2:
            raise ValueError(f"a convolution needs conv_width >= 2 taps, got {self.width}")

    def params(self) -> ParamTree:
        """conv: [K, channels], the current token's tap last."""
        tree = {"conv": ParamSpec((self.width, self.channels))}
        if self.bias:
            tree["conv_bias"] = ParamSpec((self.channels,), "zeros")
        return tree

    def leaves(self) -> dict[str, Leaf]:
        """Rows of the last K - 1 positions: a copy of exactly this length, or none."""
        rows = Leaf(
            contract=Point(group=1, keep=self.width - 1),
            component=self.component,
            rows=self.width,
            width=(self.channels,),
            dtype=self.dtype,
        )
        positions = Leaf(
            contract=Evidence(of="conv", kind="positions"),
            component=self.component,
            rows=self.width,
            dtype="int32",
        )
        return {"conv": rows, "conv_pos": positions}

    def forward(self, params: Params, x: jax.Array) -> jax.Array:
        """x [B, T, channels] from position 0 to f32[B, T, channels]."""
        return self._apply(params, jnp.pad(x, ((0, 0), (self.width - 1, 0), (0, 0))), x.shape[1])

    def run(self, params: Params, x: jax.Array, view: View, call: Call) -> tuple[jax.Array, View]:
        """x [R, S, channels] of one call: (f32[R, S, channels], leaves after it)."""
        held = ring.read(view.leaves["conv"], view.layer)
        old = ring.ordered(held, call.start)[:, 1:]
        before = call.start[:, None] - self.width + 1 + jnp.arange(self.width - 1, dtype=jnp.int32)
        # In a replay rows of before its beginning are absent, as before position 0.
        old = attend.clean(old, before >= call.first[:, None])
        x = x.astype(held.dtype)
        y = self._apply(params, jnp.concatenate([old, x], axis=1), x.shape[1])
        seen = ring.read(view.leaves["conv_pos"], view.layer)
        held = ring.advance(held, call.start, x, call.count)
        seen = ring.advance(seen, call.start, call.positions, call.count)
        return y, view.update(
            conv=ring.store(view.leaves["conv"], view.layer, held),
            conv_pos=ring.store(view.leaves["conv_pos"], view.layer, seen),
        )

    def _apply(self, params: Params, rows: jax.Array, tokens: int) -> jax.Array:
        rows, taps = rows.astype(jnp.float32), params["conv"].astype(jnp.float32)
        y = sum(taps[i] * rows[:, i : i + tokens] for i in range(self.width))
        if self.bias:
            y = y + params["conv_bias"].astype(jnp.float32)
        return jax.nn.silu(y)
