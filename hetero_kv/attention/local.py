"""Local attention: grouped-query heads over a sliding window."""

import dataclasses

import jax

from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.grouped_heads import GroupedHeads
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.window import WindowBranch
from hetero_kv.contract import LayerSpec
from hetero_kv.params import Params, ParamTree


@dataclasses.dataclass(frozen=True)
class Local:
    """A layer that sees its window and nothing else."""

    kind: str
    heads: GroupedHeads
    window: WindowBranch

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The frequencies of queries and keys."""
        return (self.heads.rope,)

    def params(self) -> ParamTree:
        """The heads' weights."""
        return self.heads.params()

    def spec(self) -> LayerSpec:
        """Window rows and their positions."""
        return LayerSpec(self.kind, tuple(self.window.leaves().items()))

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        state = self.heads.begin(params, q)
        state = self.window.forward(state, q, rows, call.positions, self.heads.scale)
        return self.heads.output(params, state, x), {}

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        state = self.heads.begin(params, q)
        state, view = self.window.prefill(state, q, rows, view, call, self.heads.scale)
        return self.heads.output(params, state, x), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        view = self.window.write(rows[:, 0], view, call)
        held, live = self.window.rows(view, call)
        state = self.heads.begin(params, q)
        state = self.window.form.add(state, q, held, live[:, None], self.heads.scale)
        return self.heads.output(params, state, x), view


def build(fields: Fields) -> Local:
    """From a layer type's fields: its window, and what `GroupedHeads.of` reads."""
    heads = GroupedHeads.of(fields)
    if fields.window < 1:
        raise ValueError(f"a {fields.kind!r} layer needs window >= 1, got {fields.window}")
    packing = fields.packing("window", heads.width, group=heads.dim)
    window = WindowBranch(fields.window, heads.width, heads.cache_dtype, heads.form, packing)
    return Local(fields.kind, heads, window)
