"""The seam between an engine and a cache: compiled functions over the rows of one Cache.

Nothing else of the engine touches the arrays of a cache. Prompts run through the model in calls of
batch 1, on a row that is cut out of the cache and put back within one compiled function. So the
numeric regime of published state is that of batch 1, whatever the number of slots, and no call
works on rows that have nothing to do. Decoding runs all rows, with a mask.

Every call verifies the rows that it reads: one whose verdict is bad writes nothing and does not
move. History is in rows of the cache, or in pages (`paging`); both give the same bits.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import differences, sampling, state, validate, verifying
from hetero_kv.calls import Ask, Told
from hetero_kv.contract import CacheSpec, Derived, LeafSlot, Scratch
from hetero_kv.differences import Difference
from hetero_kv.guard import Guard
from hetero_kv.pages import admission
from hetero_kv.pages import brought as at_first_use
from hetero_kv.pages import cache as paged
from hetero_kv.pages import slots as slots_lib
from hetero_kv.pages import validate as at_use
from hetero_kv.pages.admission import Given, Settled, Some, Want
from hetero_kv.pages.brought import Brought
from hetero_kv.pages.layout import Paging
from hetero_kv.pages.table import Ledger, PageTable
from hetero_kv.pages.validate import Expected
from hetero_kv.params import Params
from hetero_kv.sampling import Choice
from hetero_kv.state import Cache

_ALL = sum(validate.BITS.values())
_OF_WINDOWS = validate.POSITIONS | validate.JOINT
_OF_PAGES = validate.GENERATION | validate.OWNER | validate.MISSING


class Program(Protocol):
    """The traceable inside of a model, see `models.stack.Stack`."""

    def weights(self, params: Params, rows: int) -> Params:
        """The weights that a call of so many rows reads; `call` and `step` pick them as well."""

    def call(
        self,
        params: Params,
        tokens: jax.Array,
        count: jax.Array,
        cache: Cache,
        first: jax.Array,
        logits: str,
        replay: jax.Array,
        verified: bool,
    ) -> tuple[jax.Array, Cache]:
        """One prefill or replay call."""

    def step(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        active: jax.Array,
        verified: bool,
    ) -> tuple[jax.Array, Cache]:
        """One decode step."""


class Model(Protocol):
    """What an engine needs of a model, see `models.decoder.Decoder`."""

    cache_spec: CacheSpec
    call_sizes: tuple[int, ...]
    stack: Program

    def init_cache(self, batch: int, capacity: int, poison: bool = False) -> Cache:
        """An empty cache."""

    def init_paged_cache(
        self, batch: int, capacity: int, paging: Paging | None = None, poison: bool = False
    ) -> Cache:
        """An empty cache in pages."""


class Rows:
    """Compiled functions for caches of `slots` rows, and of one row (scratch).

    It holds no state but the compiled functions, so engines of the same sizes may share one.

    Args:
        burst: tokens that a decode call makes at most.
        max_stops: stop ids per request.
        keep_logits: whether decode calls return logits.
        keep_prompt_logits: whether prefill calls return logits at all tokens, not at the last.
        check: whether every call verifies the state of the rows it reads (DESIGN rules 1, 11).
            Without, only lengths are compared with the host's.
        paging: pages that the rows share; None: a contiguous cache. Scratch rows are contiguous.
        draft_tokens: of a guess that `verify` can verify; 0: it is never called.
        poison: whether rows start as NaN, and become NaN again when they are given up (rule 6).
        strict: see Guard.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        capacity: int,
        burst: int = 8,
        max_stops: int = 4,
        keep_logits: bool = False,
        keep_prompt_logits: bool = False,
        check: bool = True,
        poison: bool = False,
        strict: bool = False,
        paging: Paging | None = None,
        draft_tokens: int = 0,
    ):
        if not 0 <= draft_tokens < model.cache_spec.chunk:
            raise ValueError(
                f"{draft_tokens=} and the token before them must fit into the rewind budget, a "
                f"chunk of {model.cache_spec.chunk}: draft fewer, or make a model with a larger one"
            )
        if paging is not None and paging.capacity != capacity:
            raise ValueError(
                f"pages for rows of {paging.capacity} tokens, not of {capacity=}: use "
                "Paging.of(spec, slots, capacity, …)"
            )
        if slots < 1 or burst < 1 or max_stops < 1:
            raise ValueError(f"need at least one of each, got {slots=}, {burst=}, {max_stops=}")
        self.model, self.spec = model, model.cache_spec
        self.slots, self.capacity, self.burst, self.max_stops = slots, capacity, burst, max_stops
        self.keep_logits, self.keep_prompt_logits = keep_logits, keep_prompt_logits
        self.check, self.poison, self.paging = check, poison, paging
        self.draft_tokens = draft_tokens
        self.components = validate.components(self.spec)
        self._nothing = at_first_use.nothing(self.spec, len(paging.pages) if paging else 0)
        self.guard = Guard(strict)
        self.compared = [
            x for x in self.spec.slots() if not isinstance(x.leaf.contract, Derived | Scratch)
        ]
        self._reset = self._jit("reset", self._traced_reset)
        self._stand = self._jit("stand", self._traced_stand)
        spec = self.spec
        self._put = self._jit("put", functools.partial(slots_lib.put, spec))
        self._wipe = self._jit("wipe", functools.partial(slots_lib.poison, spec))
        self._take = self.guard.jit("take", functools.partial(slots_lib.take, spec), _batch)
        self._admit = self._jit("admit", functools.partial(admission.admit, spec))
        self._settle = self._jit("settle", functools.partial(admission.settle, spec))
        self._fail_load = self._jit("fail_load", admission.fail_load)
        self._revoke = self._jit("revoke", self._traced_revoke)
        self._keep = self._jit("keep", admission.keep)
        self._drop = self._jit("drop", functools.partial(admission.drop, spec, poison=poison))
        self._ledgers = self.guard.jit("ledgers", paged.ledgers, _batch)
        differ = functools.partial(differences.differ, spec, self.compared)
        self._differ = self.guard.jit("differ", differ, _batch)
        self._pick = self.guard.jit("pick", sampling.choose, lambda *_: "1 row")
        self._prefill = self.guard.jit(
            "prefill",
            self._traced_prefill,
            lambda params, cache, row, tokens, *_: f"{_batch(cache)}, {tokens.shape[1]} columns",
            donate_argnums=1,
        )
        self._decode = self.guard.jit(
            "decode", self._traced_decode, lambda params, cache, *_: _batch(cache), donate_argnums=1
        )
        self._verify = self.guard.jit(
            "verify",
            functools.partial(verifying.verify, self),
            lambda params, cache, *_: _batch(cache),
            donate_argnums=1,
        )

    def _jit(self, name: str, function: Callable) -> Callable:
        return self.guard.jit(name, function, _batch, donate_argnums=0)

    # -- caches and rows -----------------------------------------------------------------------

    def new(self, batch: int | None = None) -> Cache:
        """An empty cache of `slots` rows, or a contiguous one of `batch` (1: scratch)."""
        if batch is None and self.paging is not None:
            return self.model.init_paged_cache(self.slots, self.capacity, self.paging, self.poison)
        return self.model.init_cache(batch or self.slots, self.capacity, self.poison)

    def reset(self, cache: Cache, row: int) -> Cache:
        """The row starts over at length 0. The cache given is donated, as in all that follows."""
        return self._reset(cache, self._row(cache, row))

    def stand(self, cache: Cache, row: int, length: int, grid_length: int) -> Cache:
        """The row claims other lengths, as before a replay."""
        return self._stand(cache, self._row(cache, row), np.int32(length), np.int32(grid_length))

    def take(self, cache: Cache, row: int) -> Cache:
        """A copy of one row, as a contiguous cache of batch 1. The cache given is only read."""
        return self._take(cache, self._row(cache, row))

    def put(self, cache: Cache, row: int, one: Cache) -> Cache:
        """The cache with its row exchanged for the only one of `one`; in pages: open ones."""
        return self._put(cache, self._row(cache, row), one)

    def leave(self, cache: Cache, row: int) -> Cache:
        """The row is given up: with `poison` its numbers become NaN, else nothing happens."""
        return self._wipe(cache, self._row(cache, row)) if self.poison else cache

    # -- pages of a row, see pages/admission.py ------------------------------------------------

    def admit(self, cache: Cache, row: int, want: Want) -> tuple[Cache, Given]:
        """Gives the row all its pages; what was given, on the host."""
        cache, given = self._admit(cache, self._row(cache, row), want)
        return cache, jax.device_get(given)

    def settle(
        self, cache: Cache, row: int, keys: np.ndarray, restored: int, tokens: int
    ) -> tuple[Cache, Settled]:
        """Ends the copy into the row's pages, and seals what is exact; told on the host."""
        numbers = np.int32(restored), np.int32(tokens)
        cache, settled = self._settle(cache, self._row(cache, row), keys, *numbers)
        return cache, jax.device_get(settled)

    def fail_load(self, cache: Cache, row: int) -> Cache:
        """The copy into the row's pages has failed."""
        return self._fail_load(cache, self._row(cache, row))

    def revoke(self, cache: Cache, row: int, ids: np.ndarray, left: np.ndarray) -> Cache:
        """Takes the row's pages by the host's books; the row starts over."""
        return self._revoke(cache, self._row(cache, row), ids, left)

    def keep(self, cache: Cache, some: Some) -> tuple[Cache, np.ndarray]:
        """Pins pages beyond the rows that hold them; flags by component, on the host."""
        cache, flags = self._keep(cache, some)
        return cache, jax.device_get(flags)

    def drop(self, cache: Cache, ids: np.ndarray) -> Cache:
        """Kept pages i32[C, n] that no row holds become free, by the host's books."""
        return self._drop(cache, ids)

    def page_books(self, cache: Cache) -> tuple[dict[str, PageTable], dict[str, Ledger]]:
        """The page table of each component and its ledger, on the host."""
        return jax.device_get((cache.pages.tables, self._ledgers(cache)))

    # -- the model -----------------------------------------------------------------------------

    def piece(self, start: int, stop: int) -> tuple[int, int]:
        """(tokens, columns) of the next call from `start` towards `stop`, on the chunk grid."""
        chunk = self.spec.chunk
        count = min(stop, start // chunk * chunk + chunk) - start
        return count, next(x for x in self.model.call_sizes if x >= count)

    def prefill(
        self,
        params: Params,
        cache: Cache,
        row: int,
        tokens: np.ndarray,
        start: int,
        stop: int,
        *,
        first: int = 0,
        replay: bool = False,
        check: bool = True,
        expected: Expected | None = None,
        brought: Brought | None = None,
    ) -> tuple[jax.Array, Cache, jax.Array]:
        """One call from `start`, where the row must stand, towards `stop`; see `piece`.

        tokens: i32[n], the whole prompt. first: see `Call.first`. expected: of the row alone, what
            its pages were given as. brought: what was restored into it, for the first call after.

        Returns logits f32[1, V], or f32[1, columns, V] with `keep_prompt_logits`, the cache, and
        the verdict u32[components] on the row as it was before: unless 0 it did not move. In a
        replay, and with check = False (after an approximate one), windows and tails are not
        verified.
        """
        count, columns = self.piece(start, stop)
        part = np.zeros((1, columns), np.int32)
        part[0, :count] = tokens[start : start + count]
        return self._prefill(
            self.model.stack.weights(params, columns),
            cache,
            self._row(cache, row),
            part,
            np.array([count], np.int32),
            np.int32(start),
            np.array([first], np.int32),
            np.bool_(replay),
            np.bool_(check and not replay),
            expected,
            self._nothing if brought is None else brought,
        )

    def pick(self, logits: np.ndarray, choice: Choice) -> int:
        """Token 0 of a request, from logits f32[1, V]."""
        return int(self._pick(logits, np.zeros(1, np.int32), choice)[0])

    def decode(self, params: Params, cache: Cache, ask: Ask, steps: int) -> tuple[Told, Cache]:
        """Up to `steps` <= burst decode steps of all rows that have a budget."""
        params = self.model.stack.weights(params, cache.batch)
        return self._decode(params, cache, ask, np.int32(min(steps, self.burst)))

    def verify(self, params: Params, cache: Cache, ask: Ask) -> tuple[Told, Cache]:
        """Guesses i32[R, draft_tokens] `ask.forced` of all rows with a budget; see verifying.py.

        Of a row that is asked for as many tokens as `ask.budget`, as many run as are accepted.
        """
        params = self.model.stack.weights(params, cache.batch * (ask.forced.shape[1] + 1))
        return self._verify(params, cache, ask)

    def differ(self, one: Cache, two: Cache, floor: float = 0.0) -> list[Difference]:
        """Where two caches of batch 1 differ on live rows, per leaf of `compared` (host side).

        An error above `floor` counts; with 0 the comparison is bitwise.
        """
        return jax.device_get(self._differ(one, two, np.float32(floor)))

    # -- traced ----------------------------------------------------------------------------------

    def _traced_reset(self, cache: Cache, row: jax.Array) -> Cache:
        return state.reset_row(self.spec, cache, row)

    def _traced_stand(
        self, cache: Cache, row: jax.Array, length: jax.Array, grid_length: jax.Array
    ) -> Cache:
        return cache.replace(
            length=cache.length.at[row].set(length),
            grid_length=cache.grid_length.at[row].set(grid_length),
        )

    def _traced_revoke(
        self, cache: Cache, row: jax.Array, ids: jax.Array, left: jax.Array
    ) -> Cache:
        cache = admission.revoke(self.spec, cache, row, ids, left, self.poison)
        return slots_lib.poison(self.spec, cache, row) if self.poison else cache

    def _traced_prefill(
        self,
        params: Params,
        cache: Cache,
        row: jax.Array,
        tokens: jax.Array,
        count: jax.Array,
        start: jax.Array,
        first: jax.Array,
        replay: jax.Array,
        check: jax.Array,
        expected: Expected | None,
        brought: Brought,
    ) -> tuple[jax.Array, Cache, jax.Array]:
        # The barriers keep the model's program what it is alone, so that its bits do not depend on
        # the number of slots around it.
        one = jax.lax.optimization_barrier(slots_lib.cut(self.spec, cache, row))
        bits = self._verdict(one, expected, count, count > 0, check[None], replay[None])[0]
        bits = bits.at[-1].set(bits[-1] | _wrong_length(one.length[0] != start))
        if self.check:
            found, one = at_first_use.changed(self.spec, one, brought)
            bits |= found
        count = jnp.where(jnp.all(bits == 0), count, 0)
        kind = "all" if self.keep_prompt_logits else "last"
        logits, one = self.model.stack.call(
            params, tokens, count, one, first, logits=kind, replay=replay, verified=True
        )
        one = jax.lax.optimization_barrier(one)
        return logits, slots_lib.paste(self.spec, cache, row, one), bits

    def _traced_decode(
        self, params: Params, cache: Cache, ask: Ask, steps: jax.Array
    ) -> tuple[Told, Cache]:
        rows, vocab = cache.batch, self.vocab(params, cache)
        bits = self.verdict(cache, ask, jnp.minimum(ask.budget, steps))
        budget = jnp.where(jnp.all(bits == 0, axis=-1), ask.budget, 0)

        def active(i: jax.Array, done: jax.Array) -> jax.Array:
            return ~done & (i < budget)

        def goes_on(carry: tuple) -> jax.Array:
            i, _, _, done, _ = carry
            return (i < steps) & jnp.any(active(i, done))

        # A loop of traced length: one program, whatever the number of steps, so the same bits.
        def body(carry: tuple) -> tuple:
            i, token, cache, done, told = carry
            moves = active(i, done)
            logits, cache = self.model.stack.step(params, token, cache, moves, verified=True)
            finite = jnp.all(jnp.isfinite(logits), axis=-1)
            chosen = sampling.choose(logits, ask.index + i, ask.choice)
            known = i < ask.known
            forced = jax.lax.dynamic_index_in_dim(ask.forced, i, 1, keepdims=False)
            new = jnp.where(known, forced, chosen)
            told = told._replace(
                tokens=told.tokens.at[:, i].set(new),
                ran=told.ran + (moves & finite),
                finite=told.finite & (finite | ~moves),
                differs=told.differs | (moves & known & (chosen != forced)),
            )
            if self.keep_logits:
                told = told._replace(logits=told.logits.at[:, i].set(logits))
            ends = jnp.any(new[:, None] == ask.stops, axis=-1) | ~finite
            return i + 1, jnp.where(moves, new, token), cache, done | (moves & ends), told

        told = Told(
            tokens=jnp.full((rows, self.burst), -1, jnp.int32),
            ran=jnp.zeros(rows, jnp.int32),
            finite=jnp.ones(rows, bool),
            differs=jnp.zeros(rows, bool),
            bits=bits,
            logits=jnp.zeros((rows, self.burst, vocab if self.keep_logits else 0), jnp.float32),
        )
        begin = (jnp.int32(0), ask.token, cache, jnp.zeros(rows, bool), told)
        _, _, cache, _, told = jax.lax.while_loop(goes_on, body, begin)
        return told, cache

    def verdict(self, cache: Cache, ask: Ask, count: jax.Array) -> jax.Array:
        """u32[R, components] on the rows with a budget, for i32[R] `count` tokens; traceable."""
        runs = ask.budget > 0
        none = jnp.zeros(cache.batch, bool)
        bits = self._verdict(cache, ask.expected, count, runs, ask.check, none)
        wrong = _wrong_length(runs & (cache.length != ask.length))
        return bits.at[:, -1].set(bits[:, -1] | wrong)

    def vocab(self, params: Params, cache: Cache) -> int:
        """Of the logits of a step."""
        token = jax.ShapeDtypeStruct((cache.batch,), jnp.int32)
        moves = jax.ShapeDtypeStruct((cache.batch,), jnp.bool_)
        return jax.eval_shape(self.model.stack.step, params, token, cache, moves)[0].shape[-1]

    def _verdict(
        self,
        cache: Cache,
        expected: Expected | None,
        count: jax.Array,
        rows: jax.Array,
        check: jax.Array,
        replay: jax.Array,
    ) -> jax.Array:
        """u32[R, components]: whether bool[R] `rows` may go on by i32[R] `count` tokens.

        Where `check` is False windows and tails are left out; in a replay all but whose the pages
        are, since lengths are behind the state then.
        """
        if not self.check:
            return jnp.zeros((cache.batch, len(self.components)), jnp.uint32)
        if cache.pages is None:
            return validate.evidence(self.spec, cache, rows=rows & check).bits
        found = at_use.check(self.spec, cache, expected, count, rows, writes=~replay)
        kept = jnp.where(check, jnp.uint32(_ALL), jnp.uint32(_ALL & ~_OF_WINDOWS))
        kept = jnp.where(replay, jnp.uint32(_OF_PAGES), kept)
        return found.bits & kept[:, None]

    @staticmethod
    def _row(cache: Cache, row: int) -> np.int32:
        # JAX would clamp a bad index to a neighbour's row.
        if not 0 <= row < cache.batch:
            raise ValueError(f"{row=} is not within {cache.batch=}")
        return np.int32(row)


def position_of(spec: CacheSpec, slot: LeafSlot, row: int, length: int) -> int:
    """The last token position that row `row` of a leaf depends on directly, at `length`."""
    leaf = validate.owner(spec, slot).leaf
    if leaf.is_ring:
        return int(leaf.ring_positions(length)[row])
    if hasattr(leaf.contract, "stride") and not _is_count(slot):
        return row * leaf.contract.stride + leaf.contract.span - 1
    return length - 1


def _is_count(slot: LeafSlot) -> bool:
    return getattr(slot.leaf.contract, "kind", "") == "count"


def _wrong_length(wrong: jax.Array) -> jax.Array:
    return validate.bit(wrong, validate.LENGTH)


def _batch(cache: Cache, *_: object) -> str:
    return f"{cache.batch} rows" if cache.pages is None else f"{cache.batch} rows in pages"
