"""Joint softmax over several sets of keys, accumulated set by set, with attention sinks.

The running (maximum, denominator, weighted sum) of online softmax (arXiv 1805.02867). A set that is
fully masked changes no bit of the state, so a result does not depend on how many empty tiles a pool
has. Values equal keys in the shared-latent form (`add`); `add_grouped` is the GQA form.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a fully masked row gives zeros and not NaN


class State(NamedTuple):
    """Running softmax: maximum and denominator [..., H], weighted sum [..., H, c], all float32."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


def begin(shape: tuple[int, ...], width: int, sinks: jax.Array | None) -> State:
    """No keys yet. A sink is a logit in the denominator without a value (f32[H] or None)."""
    out = jnp.zeros((*shape, width), jnp.float32)
    if sinks is None:
        return State(jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), out)
    top = jnp.broadcast_to(sinks.astype(jnp.float32), shape)
    return State(top, jnp.ones(shape, jnp.float32), out)


def _merge(state: State, scores: jax.Array, mask: jax.Array) -> tuple[State, jax.Array]:
    # Masked before the exponential too: where nothing is visible it would be infinite, and the
    # gradient of what is masked after it not a number.
    scores = jnp.where(mask, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(state.top - top)
    total = state.total * shrink + jnp.sum(weights, axis=-1)
    return State(top, total, state.out * shrink[..., None]), weights


def add(state: State, q: jax.Array, keys: jax.Array, mask: jax.Array, scale: float) -> State:
    """Adds keys [R, K, c], which are also the values, for queries q [R, S, H, c].

    mask: bool[R, S, K]. Rows that no query sees must be finite (see `clean`).
    """
    keys = keys.astype(q.dtype)
    scores = jnp.einsum("rshc,rkc->rshk", q, keys, preferred_element_type=jnp.float32) * scale
    state, weights = _merge(state, scores, mask[:, :, None, :])
    new = jnp.einsum(
        "rshk,rkc->rshc", weights.astype(q.dtype), keys, preferred_element_type=jnp.float32
    )
    return state._replace(out=state.out + new)


def add_grouped(
    state: State,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scale: float,
    softcap: float = 0.0,
) -> State:
    """Adds keys k and values v [R, K, G, c] for queries q [R, S, G, h, c] (h heads per key head).

    The state's lead axes are [R, S, G, h]; mask: bool[R, S, K], or [R, S, G, K]. softcap: x becomes
    `softcap * tanh(x / softcap)`; 0: logits stay as they are.
    """
    scores = jnp.einsum(
        "rsghc,rkgc->rsghk", q, k.astype(q.dtype), preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = mask[:, :, None] if mask.ndim == 3 else mask
    state, weights = _merge(state, scores, mask[..., None, :])
    new = jnp.einsum(
        "rsghk,rkgc->rsghc",
        weights.astype(q.dtype),
        v.astype(q.dtype),
        preferred_element_type=jnp.float32,
    )
    return state._replace(out=state.out + new)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a cached row [w] is to a query.

    kv_heads = 0: key and value of all heads, for queries [R, S, H, w]. Otherwise the keys and then
    the values of kv_heads heads, for queries [R, S, G, h, c] with 2 * G * c = w.
    """

    kv_heads: int = 0
    softcap: float = 0.0  # grouped heads only

    def add(
        self, state: State, q: jax.Array, rows: jax.Array, mask: jax.Array, scale: float
    ) -> State:
        """Adds rows [R, K, w]; mask: bool[R, S, K]."""
        if not self.kv_heads:
            return add(state, q, rows, mask, scale)
        halves = rows.reshape(*rows.shape[:-1], 2, self.kv_heads, -1)
        k, v = halves[..., 0, :, :], halves[..., 1, :, :]
        return add_grouped(state, q, k, v, mask, scale, self.softcap)


LATENT = Form()


def finish(state: State) -> jax.Array:
    """The attention output, f32[..., H, c]; zero where nothing was visible and no sink exists."""
    total = jnp.where(state.total > 0, state.total, 1.0)
    return state.out / total[..., None]


def clean(rows: jax.Array, live: jax.Array) -> jax.Array:
    """Zeroes rows [R, K, w] that nobody may read (bool[R, K]): a weight of 0 times NaN is NaN."""
    return jnp.where(live[..., None], rows, jnp.zeros((), rows.dtype))
