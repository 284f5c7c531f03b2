"""A window and one compressed branch in a joint softmax: the body of CSA and HCA layers."""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, ring, selection
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.indexer import Indexer, teach
from hetero_kv.attention.latent_heads import Heads, LatentHeads
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.window import WindowBranch
from hetero_kv.contract import LayerSpec
from hetero_kv.kernels.chunk_attention import operands as chunk
from hetero_kv.kernels.chunk_attention.api import chunk_attention
from hetero_kv.kernels.chunk_attention.sequence import sequence_attention
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.kernels.decode_attention.operands import Entries
from hetero_kv.kernels.indexer.api import select
from hetero_kv.params import Params, ParamTree


@dataclasses.dataclass(frozen=True)
class Compressed:
    """A layer with a window (or none) and one compressed branch.

    With an indexer it is CSA; without one every visible entry is attended, which is HCA.
    """

    kind: str
    heads: LatentHeads
    window: WindowBranch | None
    compressor: Compressor
    entries: EntryPool
    indexer: Indexer | None = None
    index_keys: EntryPool | None = None

    @property
    def rope(self) -> Rope:
        """The frequencies of queries, keys, entries and index keys alike."""
        return self.heads.rope

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The same, for the tables of a call."""
        return (self.heads.rope,)

    def params(self) -> ParamTree:
        """The heads, the compressor, and the indexer with its own compressor."""
        tree = {**self.heads.params(), "compressor": self.compressor.params()}
        return tree | ({"indexer": self.indexer.params()} if self.indexer else {})

    def spec(self) -> LayerSpec:
        """Window, tail and entries; for CSA also the indexer's tail and keys."""
        leaves = self.window.leaves() if self.window else {}
        leaves |= self.compressor.leaves() | self.entries.leaves()
        if self.indexer:
            leaves |= self.indexer.compressor.leaves("index_") | self.index_keys.leaves()
        return LayerSpec(self.kind, tuple(leaves.items()))

    def _begin(self, params: Params, q: jax.Array) -> attend.State:
        return attend.begin(q.shape[:-1], q.shape[-1], params.get("sinks"))

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`. Auxiliaries with `train.aux`: see `indexer.teach`."""
        turn = call.tables[self.rope]
        heads = self.heads.project(params, x, turn)
        entries = self.entries.settled(self.compressor.forward(params["compressor"], x))
        index = jnp.arange(entries.shape[1], dtype=jnp.int32)
        mask = index < self.entries.visible(call.positions)[..., None]
        scores = chosen = None
        if self.indexer and index.size:
            scores = self.index_scores(params["indexer"], x, heads, call)
            if train.select == "topk":
                chosen = self.indexer.picks(scores, mask)
                mask = selection.chosen(chosen.order, index, chosen.low, chosen.cut)
        if self.heads.trains_with_kernels and not train.aux:
            out = sequence_attention(
                heads.q,
                kv=self.window.settled(heads.kv) if self.window else None,
                entries=entries if index.size else None,
                chosen=chosen,
                sinks=params.get("sinks"),
                width=self.window.width if self.window else 0,
                rule=chunk.Rule(self.heads.scale, self.entries.ratio, self.entries.tile),
                implementation=self.heads.kernels,
            )
            return self.heads.output(params, out, turn, x.dtype), {}
        state = self._begin(params, heads.q)
        if self.window:
            state = self.window.forward(state, heads.q, heads.kv, call.positions, self.heads.scale)
        if not index.size:
            return self.heads.output(params, attend.finish(state), turn, x.dtype), {}
        state = attend.add(state, heads.q, entries, mask, self.heads.scale)
        y = self.heads.output(params, attend.finish(state), turn, x.dtype)
        if not (train.aux and self.indexer):
            return y, {}
        return y, teach(scores, state, heads.q, entries, mask, self.heads.scale)

    def index_scores(self, params: Params, x: jax.Array, heads: Heads, call: Call) -> jax.Array:
        """f32[B, T, N]; inputs are detached, so only the indexer's weights learn from them."""
        x, latent = jax.lax.stop_gradient((x, heads.latent))
        q, weights = self.indexer.queries(params, x, latent, call.tables[self.rope])
        keys = self.indexer.compressor.forward(params["compressor"], x)
        keys = self.index_keys.settled(keys)
        return self.indexer.scores(q, weights, keys)

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`. Entries are written first, so that queries see their own."""
        turn = call.tables[self.rope]
        q, kv, latent = self.heads.project(params, x, turn)
        view = self._emit(
            params["compressor"], self.compressor, self.entries, "tail", x, view, call
        )
        chosen = None
        if self.indexer:
            own, pool_ = params["indexer"], self.index_keys
            view = self._emit(
                own["compressor"], self.indexer.compressor, pool_, "index_tail", x, view, call
            )
            index_q, weights = self.indexer.queries(own, x, latent, turn)
            chosen = self.indexer.choose(index_q, weights, pool_, view, call, self.entries)
        out = chunk_attention(
            q,
            layer=view.layer,
            start=call.start,
            count=call.count,
            window=self.window.before(kv, view, call) if self.window else None,
            entries=chunk.Entries(view.leaves[self.entries.name], chosen),
            sinks=params.get("sinks"),
            rule=chunk.Rule(self.heads.scale, self.entries.ratio, self.entries.tile),
        )
        if self.window:
            view = self.window.advance(kv, view, call)
        return self.heads.output(params, out, turn, x.dtype), view

    def _emit(
        self,
        params: Params,
        compressor: Compressor,
        entries: EntryPool,
        tail: str,
        x: jax.Array,
        view: View,
        call: Call,
    ) -> View:
        """Raw rows into the tail ring, and the entries that close into their pool."""
        raw = compressor.raw(params, x, call.positions)
        rows = view.leaves[tail]
        view = entries.close(view, call, compressor.pooling, params["norm"], rows, raw)
        held = ring.read(rows, view.layer)
        seen = ring.read(view.leaves[f"{tail}_pos"], view.layer)
        held = ring.advance(held, call.start, raw, call.count)
        seen = ring.advance(seen, call.start, call.positions, call.count)
        return view.update(
            **{
                tail: ring.store(view.leaves[tail], view.layer, held),
                f"{tail}_pos": ring.store(view.leaves[f"{tail}_pos"], view.layer, seen),
            }
        )

    def _emit_one(
        self,
        params: Params,
        compressor: Compressor,
        entries: EntryPool,
        tail: str,
        x: jax.Array,
        view: View,
        call: Call,
    ) -> View:
        """As `_emit` for one token a row."""
        position, keep = call.positions[:, 0], call.count > 0
        raw = compressor.raw(params, x, call.positions)[:, 0]
        rows = ring.write_one(view.leaves[tail], view.layer, position, raw, keep)
        seen = view.leaves[f"{tail}_pos"]
        seen = ring.write_one(seen, view.layer, position, position, keep)
        view = view.update(**{tail: rows, f"{tail}_pos": seen})
        return entries.close(view, call, compressor.pooling, params["norm"], rows, None)

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`. A group that closes is seen by the token that closes it."""
        turn = call.tables[self.rope]
        q, kv, latent = self.heads.project(params, x, turn)
        view = self._emit_one(
            params["compressor"], self.compressor, self.entries, "tail", x, view, call
        )
        window = None
        if self.window:
            view = self.window.write(kv[:, 0], view, call)
            window = self.window.held(view, call)
        picked = None
        if self.indexer:
            view, picked = self._pick(params["indexer"], x, latent, view, call)
        visible = jnp.where(call.count > 0, self.entries.visible(call.stop - 1), 0)
        out = decode_attention(
            q[:, 0],
            layer=view.layer,
            window=window,
            entries=Entries(view.leaves[self.entries.name], visible, picked),
            sinks=params.get("sinks"),
            scale=self.heads.scale,
            tile=self.entries.tile,
            implementation=self.heads.kernels,
        )
        return self.heads.output(params, out[:, None], turn, x.dtype), view

    def _pick(
        self, params: Params, x: jax.Array, latent: jax.Array, view: View, call: Call
    ) -> tuple[View, jax.Array]:
        """The selected entries of one query a row, i32[R, k]; -1: fewer are visible."""
        keys = self.index_keys
        view = self._emit_one(
            params["compressor"], self.indexer.compressor, keys, "index_tail", x, view, call
        )
        q, weights = self.indexer.queries(params, x, latent, call.tables[self.rope])
        picked = select(
            q[:, 0],
            weights[:, 0],
            view.leaves[keys.name],
            layer=view.layer,
            visible=jnp.where(call.count > 0, keys.visible(call.stop - 1), 0),
            k=self.indexer.topk,
            tile=keys.tile,
            implementation=self.heads.kernels,
        )
        return view, picked
