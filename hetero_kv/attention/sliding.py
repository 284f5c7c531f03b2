"""SWA: sliding-window attention over shared-latent rows."""

import dataclasses

import jax

from hetero_kv.attention import attend
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.window import WindowBranch
from hetero_kv.contract import LayerSpec
from hetero_kv.kernels.chunk_attention.api import chunk_attention
from hetero_kv.kernels.chunk_attention.operands import Rule
from hetero_kv.kernels.chunk_attention.sequence import sequence_attention
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.params import Params, ParamTree


@dataclasses.dataclass(frozen=True)
class Sliding:
    """A layer that sees its window and nothing else."""

    kind: str
    heads: LatentHeads
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

    def _begin(self, params: Params, q: jax.Array) -> attend.State:
        return attend.begin(q.shape[:-1], q.shape[-1], params.get("sinks"))

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        turn = call.tables[self.heads.rope]
        q, kv, _ = self.heads.project(params, x, turn)
        if self.heads.trains_with_kernels:
            out = sequence_attention(
                q,
                kv=self.window.settled(kv),
                sinks=params.get("sinks"),
                width=self.window.width,
                rule=Rule(self.heads.scale),
                implementation=self.heads.kernels,
            )
            return self.heads.output(params, out, turn, x.dtype), {}
        state = self.window.forward(self._begin(params, q), q, kv, call.positions, self.heads.scale)
        return self.heads.output(params, attend.finish(state), turn, x.dtype), {}

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`."""
        turn = call.tables[self.heads.rope]
        q, kv, _ = self.heads.project(params, x, turn)
        out = chunk_attention(
            q,
            layer=view.layer,
            start=call.start,
            count=call.count,
            window=self.window.before(kv, view, call),
            sinks=params.get("sinks"),
            rule=Rule(self.heads.scale),
        )
        view = self.window.advance(kv, view, call)
        return self.heads.output(params, out, turn, x.dtype), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`."""
        turn = call.tables[self.heads.rope]
        q, kv, _ = self.heads.project(params, x, turn)
        view = self.window.write(kv[:, 0], view, call)
        out = decode_attention(
            q[:, 0],
            layer=view.layer,
            window=self.window.held(view, call),
            sinks=params.get("sinks"),
            scale=self.heads.scale,
            implementation=self.heads.kernels,
        )
        return self.heads.output(params, out[:, None], turn, x.dtype), view


def build(fields: Fields) -> Sliding:
    """From a layer type's fields; its own: rope."""
    if fields.window < 1:
        raise ValueError(
            f"a {fields.kind!r} layer needs window >= 1; window=0 suits csa and hca only"
        )
    heads = LatentHeads.of(fields, fields.rope_of(fields.rope_theta))
    return Sliding(fields.kind, heads, WindowBranch.of(fields, heads.rope.dim))
