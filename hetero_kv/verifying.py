"""Guessed tokens of all rows verified in one call, some of them accepted; traceable.

The model runs each row's last token and its guess, and chooses a token after each. The guesses that
it would have chosen itself stay (with the same seeds, so that answers are those of the model at any
temperature); the others leave no trace.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from hetero_kv import sampling
from hetero_kv.calls import Ask, Told
from hetero_kv.contract import CacheSpec
from hetero_kv.pages import rewind
from hetero_kv.params import Params
from hetero_kv.state import Cache


class Rows(Protocol):
    """What it needs of `rows.Rows`."""

    spec: CacheSpec
    model: Any
    keep_logits: bool

    def verdict(self, cache: Cache, ask: Ask, count: jax.Array) -> jax.Array:
        """u32[R, components]: what forbids the rows to go on by i32[R] `count` tokens."""

    def vocab(self, params: Params, cache: Cache) -> int:
        """Of the logits."""


def verify(rows: Rows, params: Params, cache: Cache, ask: Ask) -> tuple[Told, Cache]:
    """One call for all rows with a budget.

    ask: `token` and the first `budget - 1` of `forced` are fed; of these guesses `known` are
    accepted whatever the model would choose.

    Whether or not all are accepted, the state that stays is made by the one body of a loop, so that
    it has the same bits: its second round runs the accepted tokens alone, from where it began.
    """
    spec, columns = rows.spec, ask.forced.shape[1] + 1
    runs = ask.budget > 0
    bits = rows.verdict(cache, ask, ask.budget)
    count = jnp.where(runs & jnp.all(bits == 0, axis=-1), ask.budget, 0)
    wide = next(x for x in rows.model.call_sizes if x >= columns)
    tokens = jnp.concatenate([ask.token[:, None], ask.forced], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, wide - columns)))
    start, first = rewind.mark(spec, cache), jnp.zeros(cache.batch, jnp.int32)
    vocab = rows.vocab(params, cache)

    def body(carry: tuple) -> tuple:
        i, fed, cache, logits = carry
        cache = rewind.back(spec, cache, start)
        out, cache = rows.model.stack.call(
            params, tokens, fed, cache, first, "all", jnp.bool_(False), verified=True
        )
        logits = jnp.where(i == 0, out[:, :columns], logits)
        # What it makes is never exact, wherever it lies on the chunk grid.
        cache = cache.replace(grid_length=start.grid_length)
        return i + 1, jnp.where(i == 0, _accepted(ask, count, logits)[0], fed), cache, logits

    def goes_on(carry: tuple) -> jax.Array:
        i, fed, _, _ = carry
        return (i == 0) | ((i == 1) & jnp.any(fed != count))

    logits = jnp.zeros((cache.batch, columns, vocab), jnp.float32)
    _, _, cache, logits = jax.lax.while_loop(goes_on, body, (0, count, cache, logits))
    fed, new, finite, differs = _accepted(ask, count, logits)
    moves = count > 0
    told = Told(
        tokens=new,
        ran=fed - (moves & ~finite),
        finite=finite | ~moves,
        differs=differs & moves,
        bits=bits,
        logits=logits if rows.keep_logits else logits[..., :0],
    )
    return told, cache


def _accepted(ask: Ask, count: jax.Array, logits: jax.Array) -> tuple[jax.Array, ...]:
    """(tokens fed that stay i32[R], tokens i32[R, columns] after each, whether the logits of the
    last are finite bool[R], whether a known token is not the one chosen bool[R])."""
    columns = jnp.arange(logits.shape[1], dtype=jnp.int32)

    def choose(logits: jax.Array, column: jax.Array) -> jax.Array:
        return sampling.choose(logits, ask.index + column, ask.choice)

    chosen = jax.vmap(choose, in_axes=(1, 0), out_axes=1)(logits, columns)
    guess = jnp.pad(jnp.asarray(ask.forced), ((0, 0), (0, 1)))  # the token after each column
    known = columns < ask.known[:, None]
    new = jnp.where(known, guess, chosen)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    stops = jnp.any(new[:, :, None] == ask.stops[:, None], axis=-1)
    goes_on = (new == guess) & finite & ~stops & (columns < count[:, None] - 1)
    accepted = jnp.sum(jnp.cumprod(goes_on, axis=1), axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(finite, accepted[:, None], axis=1)[:, 0]
    differs = jnp.any(known & (chosen != guess) & (columns < count[:, None] - 1), axis=-1)
    return jnp.where(count > 0, accepted + 1, 0), new, last, differs
