"""Choosing tokens on the device, row by row: what one row draws depends on that row alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.requests import Sampling


class Choice(NamedTuple):
    """`Sampling` of R rows as arrays, so that no value is ever compiled in."""

    temperature: jax.Array | np.ndarray  # f32[R]
    top_k: jax.Array | np.ndarray  # i32[R], 0: all
    top_p: jax.Array | np.ndarray  # f32[R]
    seed: jax.Array | np.ndarray  # u32[R]


def stack(samplings: list[Sampling]) -> Choice:
    """The arrays of some rows."""
    return Choice(
        np.array([x.temperature for x in samplings], np.float32),
        np.array([x.top_k for x in samplings], np.int32),
        np.array([x.top_p for x in samplings], np.float32),
        np.array([x.seed for x in samplings], np.uint32),
    )


def choose(logits: jax.Array, index: jax.Array, choice: Choice) -> jax.Array:
    """Tokens i32[R] from logits f32[R, V]; i32[R] `index` numbers each row's token from 0.

    Ties of the greedy choice go to the lowest token.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        return jnp.where(choice.temperature > 0, jax.vmap(_draw)(logits, index, choice), greedy)

    # Sorting the vocabulary costs more than a small model's step: only if a row asks for it.
    return jax.lax.cond(jnp.any(choice.temperature > 0), drawn, lambda: greedy)


def _draw(logits: jax.Array, index: jax.Array, choice: Choice) -> jax.Array:
    """One row."""
    temperature = jnp.where(choice.temperature > 0, choice.temperature, 1.0)
    logits = logits / temperature
    order = jnp.sort(logits)[::-1]
    last = jnp.where(choice.top_k > 0, choice.top_k, logits.size)
    inside = jnp.arange(logits.size) < last
    share = jax.nn.softmax(jnp.where(inside, order, -jnp.inf))
    # The first token is always inside; with top_p = 1 rounding must leave none out.
    inside &= (jnp.cumsum(share) - share < choice.top_p) | (choice.top_p >= 1)
    floor = jnp.min(jnp.where(inside, order, jnp.inf))
    key = jax.random.fold_in(jax.random.key(choice.seed), index)
    kept = jnp.where(logits >= floor, logits, -jnp.inf)
    return jax.random.categorical(key, kept).astype(jnp.int32)
