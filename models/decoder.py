"""The hybrid decoder as users meet it: init, forward, prefill, decode, replay (DESIGN §6)."""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state
from hetero_kv.attention.call import Train
from hetero_kv.contract import CacheSpec, strides_lcm
from hetero_kv.pages import cache as paged
from hetero_kv.pages import views
from hetero_kv.pages.layout import Paging
from hetero_kv.pages.validate import Expected
from hetero_kv.params import Params, ParamTree
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict
from models import checked, pieces, schedule, speculative
from models.checks import check_config, check_names, check_tokens
from models.config import DecoderConfig
from models.layers import layer
from models.prepared import Flat, Prepared
from models.sampling import Sampler
from models.stack import Group, Stack


class Decoder:
    """A model without its weights. All methods are pure functions of parameters and cache.

    `prefill`, `decode_step`, `decode_many` and `replay` donate the cache they are given: use the
    one they return.
    """

    def __init__(self, config: DecoderConfig):
        check_config(config)
        if len(config.layer_types) != len(config.mlp_types) or not config.layer_types:
            raise ValueError(
                "layer_types and mlp_types must name the same number of layers, at least one: got "
                f"{len(config.layer_types)} and {len(config.mlp_types)}"
            )
        # Later changes to the caller's object do not reach us.
        self.config = copy.deepcopy(config)
        kinds = list(zip(config.layer_types, config.mlp_types, strict=True))
        self.runs = schedule.cut(kinds, config.scan_layers)
        self.stack = Stack(
            groups=tuple(
                Group(tuple(layer(config, *kind) for kind in run.pattern), run.repeats)
                for run in self.runs
            ),
            vocab=config.vocab_size,
            d_model=config.d_model,
            eps=config.norm_eps,
            tied=config.tie_embeddings,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            init_scale=config.init_scale,
            chunk=config.chunk,
            embed_scale=config.embed_scale,
            softcap=config.final_softcap,
        )
        segments = self.stack.cache_segments()
        check_names(config.cache_layouts, [x for part in segments for x in part.layers])
        lcm = strides_lcm(segments)
        block = config.block or lcm * math.ceil(16 / lcm)
        self.cache_spec = CacheSpec(segments, chunk=config.chunk, block=block)

    # -- parameters ----------------------------------------------------------------------------

    def param_specs(self) -> ParamTree:
        """Every weight's declaration; those under `segments/<s>` repeat `runs[s].repeats` times."""
        return self.stack.param_specs()

    def init(self, key: jax.Array) -> Params:
        """Random weights: a nested dict of arrays."""
        return self.stack.init(key)

    def abstract_params(self) -> Params:
        """Shapes and dtypes of `init`."""
        return self.stack.abstract_params()

    def prepare(self, params: Params, blocks: bool | None = None) -> Params | Prepared:
        """The weights as inference reads them fastest, for every method but training's.

        In layers that are not scanned (`scan_layers=False`) experts become arrays of their own, and
        a layer's small weights one array; everything else is shared with `params`. Results are
        those of `params` up to rounding, so that a store's identity must be made of the weights in
        use.

        blocks: have small float32 matrices a second time, as calls of `linear.FEW` rows or fewer
            read them fastest (`linear.laid`): at most twice the memory. Default: on a CPU.
        """
        return self.stack.prepare(params, blocks)

    # -- training ------------------------------------------------------------------------------

    def forward(
        self, params: Params, tokens: jax.Array, *, aux: bool = False, select: str = "topk"
    ):
        """tokens i32[B, T] → logits f32[B, T, V]; with `aux` also a dict of auxiliaries.

        Differentiable, without a cache, equal to `prefill` to 1e-5. select="all" attends every
        visible entry (dense warm-up of the indexer). Auxiliaries: "indexer_kl" f32[], "targets"
        and "index_scores" per layer with an indexer.
        """
        if select not in ("topk", "all"):
            raise ValueError(f"select must be 'topk' or 'all', got {select!r}")
        check_tokens(tokens, (None, None), self.config.vocab_size)
        logits, found = self.stack.forward(params, jnp.asarray(tokens), Train(select, aux))
        return (logits, found) if aux else logits

    # -- inference -----------------------------------------------------------------------------

    def init_cache(self, batch: int, capacity: int, poison: bool = False) -> Cache:
        """An empty cache for `batch` rows of `capacity` tokens."""
        return state.init(self.cache_spec, batch, capacity, poison)

    def abstract_cache(self, batch: int, capacity: int) -> Cache:
        """Shapes and dtypes of `init_cache`."""
        return state.abstract(self.cache_spec, batch, capacity)

    def init_paged_cache(
        self, batch: int, capacity: int, paging: Paging | None = None, poison: bool = False
    ) -> Cache:
        """An empty cache whose History lies in pages; rows have none (see `pages.cache.reserve`).

        All methods take it in place of a contiguous one, and give the same bits. paging: sizes,
        default `Paging.of(cache_spec, batch, capacity)`.
        """
        paging = paging or Paging.of(self.cache_spec, batch, capacity)
        if paging.capacity != capacity:
            raise ValueError(f"the paging is for {paging.capacity} tokens a row, not {capacity}")
        return paged.init(self.cache_spec, batch, paging, poison)

    @functools.cached_property
    def call_sizes(self) -> tuple[int, ...]:
        """Columns of the compiled prefill calls, ascending; the last is the chunk."""
        return tuple(sorted({min(16, self.config.chunk), self.config.chunk}))

    @functools.cached_property
    def _call(self):
        return jax.jit(self.stack.call, static_argnames=("logits",), donate_argnames=("cache",))

    def _wide(self, params: Params, cache: Cache) -> Params | Flat:
        """The weights that prefill calls read, whatever their size."""
        return self.stack.weights(params, cache.batch * self.call_sizes[0])

    @functools.cached_property
    def _step(self):
        return jax.jit(self.stack.step, donate_argnames=("cache",))

    def prefill(
        self,
        params: Params,
        tokens: jax.Array | np.ndarray,
        cache: Cache,
        valid: jax.Array | np.ndarray | None = None,
        logits: str = "all",
    ) -> tuple[jax.Array, Cache]:
        """Runs tokens i32[R, S] after what the cache holds; any S >= 1, from any length.

        Rows may advance by fewer: `valid` i32[R] (default S); padding enters no state. The work is
        split on the absolute chunk grid into calls of `call_sizes` columns.

        Returns logits f32[R, S, V] ("all"; rows beyond `valid` are 0), f32[R, V] ("last": at the
        last token that ran, 0 for rows that did not move) or f32[R, 0] ("none"), and the new
        cache. Raises ValueError where a row would not fit its capacity or its pages (inside a trace
        such a row is refused: it does not move).
        """
        check_tokens(tokens, (cache.batch, None), self.config.vocab_size)
        run = functools.partial(self._call, self._wide(params, cache), replay=False)
        return pieces.drive(
            run, tokens, valid, cache, self.cache_spec.chunk, self.call_sizes, logits
        )

    def decode_step(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """token i32[R] → logits f32[R, V] and the cache one token on.

        Rows with active = False (bool[R]) do not move. A row whose cache is full does not move
        either, and its logits are NaN.
        """
        check_tokens(token, (cache.batch,), self.config.vocab_size)
        return self._step(self.stack.weights(params, cache.batch), token, cache, active)

    @functools.cached_property
    def _checked(self) -> checked.Checked:
        return checked.Checked(self.stack, self.cache_spec)

    def checked_step(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        expected: Expected | None = None,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, Verdict]:
        """As `decode_step`, with the state of active rows verified in the same compiled call.

        expected: what each row's pages were when they were leased (`pages.validate.expect`).
        A row whose verdict is bad writes nothing and does not move, and its logits are NaN; the
        other rows are as if it were not active. Returns logits, cache, and the verdict, which is
        ok for rows that are not active.
        """
        check_tokens(token, (cache.batch,), self.config.vocab_size)
        params = self.stack.weights(params, cache.batch)
        return self._checked.step(params, token, cache, expected, active)

    def checked_prefill(
        self,
        params: Params,
        tokens: jax.Array | np.ndarray,
        cache: Cache,
        expected: Expected | None = None,
        valid: np.ndarray | None = None,
        logits: str = "last",
    ) -> tuple[jax.Array, Cache, Verdict]:
        """As `prefill`, with every call verified like a `checked_step`.

        A row that one call refuses is refused by the later ones too; its verdict has the reasons of
        the first. Its pages may be too few: that is part of the verdict, and not an error.
        """
        check_tokens(tokens, (cache.batch, None), self.config.vocab_size)
        if any(isinstance(x, jax.core.Tracer) for x in (tokens, cache.length)):
            raise ValueError("checked_prefill plans its calls on the host: do not trace it")
        run = self._checked.run(self._wide(params, cache), expected, cache)
        chunk, sizes = self.cache_spec.chunk, self.call_sizes
        out, cache = pieces.drive(run, tokens, valid, cache, chunk, sizes, logits, False)
        return out, cache, run.verdict

    @functools.cached_property
    def _many(self):
        def many(params, token, cache, key, active, steps, sampler):
            def body(carry, i):
                token, cache = carry
                logits, cache = self.stack.step(params, token, cache, active)
                token = sampler(logits, jax.random.fold_in(key, i))
                return (token, cache), token

            (_, cache), tokens = jax.lax.scan(body, (token, cache), jnp.arange(steps))
            return tokens.T, cache

        return jax.jit(many, static_argnames=("steps", "sampler"), donate_argnames=("cache",))

    def decode_many(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        steps: int,
        sampler: Sampler | None = None,
        key: jax.Array | None = None,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Decodes `steps` tokens in one compiled scan, from token i32[R]: i32[R, steps].

        Raises ValueError where an active row would not fit its capacity or its pages.
        """
        check_tokens(token, (cache.batch,), self.config.vocab_size)
        moves = True if active is None else active
        if not any(isinstance(x, jax.core.Tracer) for x in (cache.length, moves)):
            ends = np.where(np.asarray(moves), np.asarray(cache.length) + steps, 0)
            if (ends > cache.capacity).any():
                raise ValueError(
                    f"{steps=} would not fit: lengths {np.asarray(cache.length)}, capacity "
                    f"{cache.capacity}; make the cache larger or decode fewer steps"
                )
            views.check_suffices(cache, np.where(np.asarray(moves), steps, 0))
        key = jax.random.key(0) if key is None else key
        params = self.stack.weights(params, cache.batch)
        return self._many(params, token, cache, key, active, steps, sampler or Sampler())

    @functools.cached_property
    def _drafts(self) -> speculative.Drafts:
        return speculative.Drafts(self)

    @property
    def rewind_budget(self) -> int:
        """Tokens that a draft may have, and so by which a cache can be rewound."""
        return self.config.chunk

    def verify(
        self, params: Params, tokens: np.ndarray, cache: Cache, active: np.ndarray | None = None
    ) -> tuple[jax.Array, speculative.Draft]:
        """Runs drafted tokens i32[R, d] in one call: logits f32[R, d, V] and what to accept from.

        The cache is donated; `accept` gives it back. Rows that are not `active` do not move, and
        their logits mean nothing. Raises ValueError for d beyond `rewind_budget`, or where an
        active row would not fit its capacity or its pages.
        """
        check_tokens(tokens, (cache.batch, None), self.config.vocab_size)
        return self._drafts.verify(params, tokens, cache, active)

    def accept(self, params: Params, draft: speculative.Draft, count: np.ndarray) -> Cache:
        """The cache after the first i32[R] `count` drafted tokens of each row, 0 <= count <= d.

        Its state is bit for bit that of a cache for which only these had been drafted. It is not
        published: `grid_length` stays. A draft is accepted from once.
        """
        return self._drafts.accept(params, draft, count)

    def replay(
        self,
        params: Params,
        tokens: jax.Array | np.ndarray,
        cache: Cache,
        start: int,
        stop: int,
        rows: np.ndarray | None = None,
    ) -> Cache:
        """Rebuilds windows and tails at `stop` by running tokens `start .. stop - 1` again.

        History is read and not written: the cache must already hold the entries of `stop` tokens.
        Exact (bitwise, in float32 on the chunk grid) iff start is 0 or at least
        `cache_spec.replay_length` tokens before `stop`; otherwise the windows are truncated to the
        replayed tokens, and the result is approximate and marked as not publishable.

        Args:
            tokens: i32[R, T] whole sequences from position 0, T >= stop.
            start: a multiple of the chunk.
            rows: bool[R], which rows to rebuild (default all).
        """
        spec = self.cache_spec
        if not 0 <= start < stop or start % spec.chunk:
            raise ValueError(
                f"replay needs 0 <= start < stop and start on the chunk grid: got {start=}, "
                f"{stop=}, chunk={spec.chunk}"
            )
        if np.shape(tokens)[1] < stop:
            raise ValueError(f"replay to {stop} needs that many tokens, got {np.shape(tokens)[1]}")
        rows = np.ones(cache.batch, bool) if rows is None else np.asarray(rows, bool)
        views.check_holds(cache, stop, rows)
        exact = start == 0 or stop - start >= spec.replay_tokens(stop)
        cache = cache.replace(
            length=jnp.where(rows, start, cache.length),
            grid_length=jnp.where(rows, start if exact else 0, cache.grid_length),
        )
        first = jnp.where(rows, start, 0).astype(jnp.int32)
        valid = np.where(rows, stop - start, 0)
        part = np.asarray(tokens)[:, start:stop]

        params = self._wide(params, cache)

        def run(tokens, count, cache, _, logits):
            return self._call(params, tokens, count, cache, first, logits=logits, replay=True)

        sizes = self.call_sizes
        _, cache = pieces.drive(run, part, valid, cache, spec.chunk, sizes, "none", False)
        return cache
