"""Full attention: grouped-query heads over every earlier token."""

import dataclasses

import jax

from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.entries import TILE, EntryPool
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.grouped_heads import GroupedHeads
from hetero_kv.attention.rope import Rope
from hetero_kv.contract import LayerSpec
from hetero_kv.params import Params, ParamTree


@dataclasses.dataclass(frozen=True)
class Full:
    """A layer that sees everything before it. cache: of ratio 1, a row per token."""

    kind: str
    heads: GroupedHeads
    cache: EntryPool

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The frequencies of queries and keys."""
        return (self.heads.rope,)

    def params(self) -> ParamTree:
        """The heads' weights."""
        return self.heads.params()

    def spec(self) -> LayerSpec:
        """One row per token."""
        return LayerSpec(self.kind, tuple(self.cache.leaves().items()))

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        rows = self.cache.settled(rows)
        mask = call.positions[:, None, :] <= call.positions[:, :, None]
        state = self.heads.begin(params, q)
        state = self.heads.form.add(state, q, rows, mask, self.heads.scale)
        return self.heads.output(params, state, x), {}

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`. In a replay the stored rows are read and none is written."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        view = self.cache.append(view, call, call.start, rows, call.count)
        state = self.heads.begin(params, q)
        state = self.cache.attend(state, q, view, call, self.heads.scale)
        return self.heads.output(params, state, x), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`: a prefill of one token."""
        return self.prefill(params, x, view, call)


def build(fields: Fields) -> Full:
    """From a layer type's fields (see `GroupedHeads.of`)."""
    heads = GroupedHeads.of(fields)
    cache = EntryPool(
        "kv",
        f"{fields.kind} kv",
        1,
        heads.width,
        heads.cache_dtype,
        2 * TILE,
        heads.form,
        packing=fields.packing("kv", heads.width, group=heads.dim),
    )
    return Full(fields.kind, heads, cache)
