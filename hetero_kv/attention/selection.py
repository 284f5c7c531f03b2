"""Top-k selection of entries with exact ties: a higher score first, then the lower index.

Scores are compared as integers (an order-preserving map of float32), so that thresholds are found
exactly by bisection; 0 means "not visible" and is never selected.
"""

import jax
import jax.numpy as jnp

from hetero_kv.attention.when import when

HIDDEN = 0  # key of an invisible entry; every finite score maps above it


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """`sum_h w[h] * relu(q[h] . key)`, f32[R, S, n], of index keys [R, n, dim].

    q [R, S, heads, dim]; weights f32[R, S, heads], scaled already.
    """
    dots = jnp.einsum("rshc,rnc->rshn", q, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    # Unrolled: XLA's CPU code for a sum over a non-minor axis is many times slower.
    total = weights[..., 0, None] * jax.nn.relu(dots[..., 0, :])
    for head in range(1, q.shape[2]):
        total = total + weights[..., head, None] * jax.nn.relu(dots[..., head, :])
    return total


def order_keys(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """f32 scores to u32 keys of the same order (-0 equals +0); invisible ones become HIDDEN."""
    scores = jnp.where(scores == 0, 0.0, scores)
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    flipped = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(visible, flipped, jnp.uint32(HIDDEN))


def _count(keys: jax.Array, tiles: jax.Array, size: int, test) -> jax.Array:
    """Per query, how many keys of the first `tiles` tiles pass `test(keys, index)`: i32[R, S]."""

    def body(t: jax.Array, total: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(keys, t * size, size, axis=2)
        index = t * size + jnp.arange(size, dtype=jnp.int32)
        return total + jnp.sum(test(part, index), axis=-1, dtype=jnp.int32)

    return jax.lax.fori_loop(0, tiles, body, jnp.zeros(keys.shape[:2], jnp.int32))


def thresholds(keys: jax.Array, k: int, tiles: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """What `chosen` needs to pick the top k of u32[R, S, N] keys.

    Only the first `tiles` tiles of `size` entries are looked at (the rest is invisible).

    Returns: the k-th largest key u32[R, S] (HIDDEN where fewer than k are visible), and the index
    i32[R, S] below which keys equal to it are chosen.
    """

    def raise_bit(b: jax.Array, low: jax.Array) -> jax.Array:
        trial = low | (jnp.uint32(1) << (31 - b).astype(jnp.uint32))
        enough = _count(keys, tiles, size, lambda u, _: u >= trial[..., None]) >= k
        return jnp.where(enough, trial, low)

    low = jax.lax.fori_loop(0, 32, raise_bit, jnp.zeros(keys.shape[:2], jnp.uint32))
    above = _count(keys, tiles, size, lambda u, _: u > low[..., None])
    equal = _count(keys, tiles, size, lambda u, _: u == low[..., None])
    spare = k - above

    bits = keys.shape[2].bit_length()

    def settle(keys: jax.Array, low: jax.Array, spare: jax.Array) -> jax.Array:
        def lower_cut(b: jax.Array, cut: jax.Array) -> jax.Array:
            trial = cut + (jnp.int32(1) << (bits - 1 - b))
            ties = _count(
                keys, tiles, size, lambda u, i: (u == low[..., None]) & (i < trial[..., None])
            )
            return jnp.where(ties <= spare, trial, cut)

        return jax.lax.fori_loop(0, bits, lower_cut, jnp.zeros(low.shape, jnp.int32))

    everything = jnp.full(low.shape, keys.shape[2], jnp.int32)
    cut = when(jnp.any((equal > spare) & (low != HIDDEN)), settle, everything, keys, low, spare)
    return low, cut


def chosen(keys: jax.Array, index: jax.Array, low: jax.Array, cut: jax.Array) -> jax.Array:
    """Which of u32[R, S, n] keys, the entries i32[n], are among the top k: bool[R, S, n]."""
    low, cut = low[..., None], cut[..., None]
    return (keys != HIDDEN) & ((keys > low) | ((keys == low) & (index < cut)))
