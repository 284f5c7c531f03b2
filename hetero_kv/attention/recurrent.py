"""Layers whose past is a matrix per head, and perhaps the last rows of a short convolution.

A kind of layer says what its tokens do to the matrix (`Form`); prefill runs in parallel blocks, a
decode step touches the state once. The state is float32 and right at exactly one length: it can be
resumed from a copy of that length, and nothing can be cut off it.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from hetero_kv.attention import recurrence, ring
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.recurrence import Operands
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.short_conv import ShortConv
from hetero_kv.contract import LayerSpec, Leaf, Point
from hetero_kv.params import Params, ParamTree


class Form(Protocol):
    """What one kind of recurrent layer computes of its tokens; frozen and hashable."""

    @property
    def state(self) -> tuple[int, int, int]:
        """Heads, key channels, value channels."""

    def params(self) -> ParamTree:
        """Its weights, without those of the convolution."""

    def raw(self, params: Params, x: jax.Array) -> jax.Array:
        """x [R, S, d] to what is convolved, [R, S, channels]."""

    def operands(self, params: Params, x: jax.Array, mixed: jax.Array) -> Operands:
        """float32, lead axes [R, S, H]; mixed: f32, `raw` after its convolution, if any."""

    def output(self, params: Params, out: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """What the state gave, f32[R, S, H, V], to [R, S, d] in x's dtype."""


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Leaves: state [H, K, V], and with a convolution conv and conv_pos."""

    kind: str
    form: Form
    conv: ShortConv | None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """None: the order of tokens is in the state."""
        return ()

    def params(self) -> ParamTree:
        """The form's weights, and the convolution's."""
        return {**self.form.params(), **(self.conv.params() if self.conv else {})}

    def spec(self) -> LayerSpec:
        """Copies at exactly one length."""
        state = Leaf(
            contract=Point(), component=f"{self.kind} state", width=self.form.state, dtype="float32"
        )
        leaves = {"state": state} | (self.conv.leaves() if self.conv else {})
        return LayerSpec(self.kind, tuple(leaves.items()))

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        mixed = self.form.raw(params, x)
        mixed = self.conv.forward(params, mixed) if self.conv else mixed.astype(jnp.float32)
        empty = jnp.zeros((x.shape[0], *self.form.state), jnp.float32)
        out, _ = recurrence.chunked(self.form.operands(params, x, mixed), empty)
        return self.form.output(params, out, x, mixed), {}

    def _begin(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[Operands, jax.Array, jax.Array, View]:
        """Operands, what they are made of, the state before the call, and the view."""
        mixed = self.form.raw(params, x)
        if self.conv:
            mixed, view = self.conv.run(params, mixed, view, call)
        mixed = mixed.astype(jnp.float32)
        held = ring.read(view.leaves["state"], view.layer)
        # Nothing is before the first token, nor before the beginning of a replay.
        empty = (call.start == call.first)[:, None, None, None]
        held = jnp.where(empty, 0.0, held)
        runs = jnp.arange(x.shape[1], dtype=jnp.int32) < call.count[:, None]
        return self.form.operands(params, x, mixed).only(runs), mixed, held, view

    def _end(self, view: View, call: Call, state: jax.Array) -> View:
        """The view with the state of rows that run."""
        held = ring.read(view.leaves["state"], view.layer)
        state = jnp.where((call.count > 0)[:, None, None, None], state, held)
        return view.update(state=ring.store(view.leaves["state"], view.layer, state))

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`."""
        operands, mixed, held, view = self._begin(params, x, view, call)
        out, state = recurrence.chunked(operands, held)
        return self.form.output(params, out, x, mixed), self._end(view, call, state)

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`."""
        operands, mixed, held, view = self._begin(params, x, view, call)
        out, state = recurrence.step(jax.tree.map(lambda y: y[:, 0], operands), held)
        return self.form.output(params, out[:, None], x, mixed), self._end(view, call, state)
