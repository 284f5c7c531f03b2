"""The decoder as pure functions of parameters and cache: one prefill call, one step, forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hetero_kv import params as params_lib
from hetero_kv.attention import rope
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.norm import rms_norm
from hetero_kv.contract import Segment
from hetero_kv.linear import linear
from hetero_kv.pages import views
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix
from hetero_kv.state import Cache
from models import prepared
from models.layers import Layer
from models.prepared import Flat, Prepared
from models.quantised import leaf


@dataclasses.dataclass(frozen=True)
class Group:
    """A pattern of layers that repeats; parameters and leaves are stacked over the repeats."""

    layers: tuple[Layer, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Embedding, groups of layers, head. All static, so methods can be jitted as they are."""

    groups: tuple[Group, ...]
    vocab: int
    d_model: int
    eps: float
    tied: bool
    dtype: str
    param_dtype: str
    init_scale: float
    chunk: int
    embed_scale: float = 1.0
    softcap: float = 0.0

    # -- declarations --------------------------------------------------------------------------

    def _top_params(self) -> ParamTree:
        shape = (self.vocab, self.d_model)
        tree: dict = {
            "embed": ParamSpec(shape, "normal", self.init_scale),
            "norm": ParamSpec((self.d_model,), "ones", dtype="float32"),
        }
        if not self.tied:
            tree["head"] = matrix(*shape[::-1])
        hyper = self.groups[0].layers[0].hyper
        if hyper:
            tree["head_hc"] = hyper.head_params()
        return tree

    def param_specs(self) -> ParamTree:
        """`embed`, `norm`, `head`, `head_hc`, and `segments/<s>/<i>` of one repeat each."""
        segments = {
            str(s): {str(i): layer.params() for i, layer in enumerate(group.layers)}
            for s, group in enumerate(self.groups)
        }
        return {**self._top_params(), "segments": segments}

    def init(self, key: jax.Array) -> Params:
        """Initial weights; those of a segment have a leading axis of its repeats."""
        params = params_lib.init(self._top_params(), key, self.param_dtype)
        params["segments"] = {
            s: params_lib.init_stacked(
                tree,
                jax.random.fold_in(key, 1 + int(s)),
                self.param_dtype,
                self.groups[int(s)].repeats,
            )
            for s, tree in self.param_specs()["segments"].items()
        }
        return params

    def abstract_params(self) -> Params:
        """As `init`, shapes and dtypes only."""
        params = params_lib.abstract(self._top_params(), self.param_dtype)
        params["segments"] = {
            s: params_lib.abstract(tree, self.param_dtype, self.groups[int(s)].repeats)
            for s, tree in self.param_specs()["segments"].items()
        }
        return params

    def prepare(self, params: Params, blocks: bool | None = None) -> Params | Prepared:
        """See `Decoder.prepare`."""
        self.check(params)
        if isinstance(params, Prepared):
            return params
        if blocks is None:
            blocks = jax.default_backend() == "cpu"
        many, few = dict(params["segments"]), dict(params["segments"])
        for s, group in enumerate(self.groups):
            if group.repeats > 1:  # a scan needs its weights in one array
                continue
            layers = {str(i): layer for i, layer in enumerate(group.layers)}
            weights = {i: x.prepare(many[str(s)][i], 1) for i, x in layers.items()}
            many[str(s)] = weights
            if blocks:
                few[str(s)] = {i: prepared.few(x.params(), weights[i]) for i, x in layers.items()}
        params = {**params, "segments": many}
        if not blocks:
            return params
        return Prepared({**prepared.laid_out(self._top_params(), params), "segments": few}, params)

    def weights(self, params: Params | Prepared | Flat, rows: int) -> Params | Flat:
        """What a call of so many rows reads: picked before the call, it is given fewer arrays."""
        return params.read(rows) if isinstance(params, Prepared) else params

    def _tree(self, params: Params | Prepared | Flat, rows: int) -> Params:
        """The same in their places, within the call."""
        params = self.weights(params, rows)
        return params.tree if isinstance(params, Flat) else params

    def cache_segments(self) -> tuple[Segment, ...]:
        """The cached leaves of every group."""
        return tuple(
            Segment(group.repeats, tuple(layer.attention.spec() for layer in group.layers))
            for group in self.groups
        )

    # -- pieces --------------------------------------------------------------------------------

    def _tables(self, positions: jax.Array) -> dict[rope.Rope, rope.Table]:
        layers = [layer for group in self.groups for layer in group.layers]
        kinds = {kind for layer in layers for kind in layer.attention.ropes}
        return {kind: rope.table(kind, positions, jnp.dtype(self.dtype)) for kind in kinds}

    @functools.cached_property
    def _wanted(self) -> Params:
        """Made once, as `_specs`: an eager `forward` asks at every call."""
        return self.abstract_params()

    @functools.cached_property
    def _specs(self) -> ParamTree:
        return self.param_specs()

    def _declared(self, params: Params) -> Params:
        """Shapes of the weights in the places of `param_specs`, prepared or not."""
        segments = dict(params.get("segments", {}))
        for s, tree in self._specs["segments"].items():
            layers = dict(segments.get(s, {}))
            for i in tree.keys() & layers.keys():
                layers[i] = prepared.declared(tree[i], layers[i])
            segments[s] = layers
        top = {k: v for k, v in params.items() if k != "segments"}
        specs = {k: v for k, v in self._specs.items() if k != "segments"}
        return {**prepared.declared(specs, top), "segments": segments}

    def check(self, params: Params) -> None:
        """Raises ValueError unless these are weights of this model, prepared or not."""
        if isinstance(params, Prepared):
            self.check(params.few)
            params = params.many
        wrong = params_lib.difference(self._declared(leaf.logical(params)), self._wanted)
        if wrong:
            raise ValueError(f"the weights are not of this model: {wrong}")

    def _embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        self.check(params)  # free of cost where this is compiled: it is done at the trace
        x = params["embed"].astype(self.dtype)[tokens]
        if self.embed_scale != 1.0:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        hyper = self.groups[0].layers[0].hyper
        return hyper.expand(x) if hyper else x

    def _head(self, params: Params, x: jax.Array) -> jax.Array:
        """Hidden states [..., d] (or their streams) to logits f32[..., V]."""
        hyper = self.groups[0].layers[0].hyper
        if hyper:
            x = hyper.collapse(params["head_hc"], x)
        x = rms_norm(x, params["norm"], self.eps)
        head = params["embed"].T if self.tied else params["head"]
        logits = linear(x, head.astype(x.dtype), jnp.float32)
        return self.softcap * jnp.tanh(logits / self.softcap) if self.softcap else logits

    # -- training ------------------------------------------------------------------------------

    def forward(
        self, params: Params, tokens: jax.Array, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """tokens i32[B, T] to logits f32[B, T, V]; auxiliaries (see `Compressed.forward`).

        "indexer_kl" is the mean over layers with an indexer; the others are lists.
        """
        params = self._tree(params, tokens.size)
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        zero = jnp.zeros(batch, jnp.int32)
        call = Call(zero, zero + length, positions, self._tables(positions), zero, False)
        x, found = self._embed(params, tokens), []

        for s, group in enumerate(self.groups):

            def body(x: jax.Array, weights: Params, group: Group = group):
                extras = []
                for i, layer in enumerate(group.layers):
                    own = layer.plain(weights[str(i)], x)
                    x, aux = layer.forward(own, x, tokens, call, train)
                    extras.append(aux)
                return x, extras

            x, extras = jax.lax.scan(body, x, params["segments"][str(s)])
            found += [aux for aux in extras if aux]

        aux: dict = {}
        if train.aux:
            losses = [layer["indexer_kl"] for layer in found]
            total = jnp.mean(jnp.concatenate(losses)) if losses else jnp.float32(0)
            aux = {
                "indexer_kl": total,
                "targets": [layer["targets"] for layer in found],
                "index_scores": [layer["index_scores"] for layer in found],
            }
        return self._head(params, x), aux

    # -- inference -----------------------------------------------------------------------------

    def _run(
        self, params: Params, tokens: jax.Array, cache: Cache, call: Call, decode: bool
    ) -> tuple[jax.Array, Cache]:
        """All layers over tokens i32[R, S]; lengths are left to the caller."""
        x = self._embed(params, tokens)
        new, tables = [], views.tables(cache)
        for s, group in enumerate(self.groups):
            weights, leaves = params["segments"][str(s)], cache.layers[s]

            def body(
                layer_index: int | jax.Array,
                carry: tuple,
                weights: Params,
                group: Group = group,
            ) -> tuple:
                x, leaves = carry[0], list(carry[1])
                for i, layer in enumerate(group.layers):
                    held = views.wrap(leaves[i], layer.attention.spec(), tables)
                    view = View(held, layer_index)
                    own = layer.plain(weights[str(i)], x)
                    x, view = layer.step(own, x, tokens, view, call, decode)
                    leaves[i] = views.unwrap(view.leaves)
                return x, tuple(leaves)

            if group.repeats == 1:
                x, leaves = body(0, (x, leaves), jax.tree.map(lambda w: w[0], weights))
            else:

                def scanned(carry: tuple, item: tuple, body=body) -> tuple:
                    return body(item[0], carry, item[1]), None

                index = jnp.arange(group.repeats, dtype=jnp.int32)
                (x, leaves), _ = jax.lax.scan(scanned, (x, leaves), (index, weights))
            new.append(leaves)
        cache = cache.replace(layers=tuple(new))
        # A replay writes no History.
        stop = jnp.where(call.replay, call.start, call.stop)
        return x, views.wrote(cache, call.start, stop, tokens.shape[1], tables)

    def call(
        self,
        params: Params,
        tokens: jax.Array,
        count: jax.Array,
        cache: Cache,
        first: jax.Array,
        logits: str,
        replay: bool | jax.Array,
        verified: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """One prefill call: the first i32[R] `count` columns of tokens i32[R, S] run.

        logits: "all" → f32[R, S, V], "last" → f32[R, V] at each row's last token that runs,
        "none" → f32[R, 0]. first: window rows of earlier positions are absent (replay). verified:
        the caller has seen to it that the pages of rows that run suffice.
        """
        params, start = self._tree(params, tokens.size), cache.length
        fits = start + count <= cache.capacity
        if cache.pages is not None and not verified:
            first_new = jnp.where(replay, start + count, start)  # a replay writes no History
            fits &= views.suffices(cache, first_new, start + count)
        refused = ~fits & (count > 0)
        count = jnp.where(fits, count, 0)  # refused: nothing is written
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        call = Call(start, count, positions, self._tables(positions), first, replay)
        x, cache = self._run(params, tokens, cache, call, False)
        whole = (cache.grid_length == start) & (start % self.chunk == 0) & (count == self.chunk)
        cache = cache.replace(
            length=start + count,
            grid_length=jnp.where(whole, start + count, cache.grid_length),
        )
        if logits == "none":
            return jnp.zeros((tokens.shape[0], 0), jnp.float32), cache
        if logits == "last":
            last = jnp.maximum(count - 1, 0).reshape((-1,) + (1,) * (x.ndim - 1))
            x = jnp.take_along_axis(x, last, axis=1)[:, 0]
        out = self._head(params, x)
        if cache.pages is not None:
            out = jnp.where(refused.reshape((-1,) + (1,) * (out.ndim - 1)), jnp.nan, out)
        return out, cache

    def step(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        active: jax.Array | None,
        verified: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """One decode step: token i32[R] to logits f32[R, V].

        Rows that are not `active` (bool[R]; None: all are) do not move. Neither does a row whose
        cache is full, or whose pages do not suffice: its logits are NaN (fail closed). verified: as
        in `call`.
        """
        params, start = self._tree(params, token.size), cache.length
        fits = start < cache.capacity
        if cache.pages is not None and not verified:
            fits &= views.suffices(cache, start, start + 1)
        runs = fits if active is None else active & fits
        tables = self._tables(start[:, None])
        zero = jnp.zeros_like(start)
        call = Call(start, runs.astype(jnp.int32), start[:, None], tables, zero, False)
        x, cache = self._run(params, token[:, None], cache, call, True)
        logits = self._head(params, x[:, 0])
        refused = ~fits if active is None else active & ~fits
        logits = jnp.where(refused[:, None], jnp.nan, logits)
        return logits, cache.replace(length=call.stop)
