"""Chunk attention over whole sequences from position 0, with a gradient: the form that trains.

The gradient recomputes scores, a band of the window and a tile of entries at a time, from the
softmax's maximum and denominator (FlashAttention, arXiv 2205.14135): no array of queries by keys
is kept or written. What was chosen is not differentiated.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, selection
from hetero_kv.kernels import checks, dispatch
from hetero_kv.kernels.chunk_attention.api import chunk_attention
from hetero_kv.kernels.chunk_attention.operands import Chosen, Entries, Rule, Window
from hetero_kv.kernels.chunk_attention.reference import BAND


class Inputs(NamedTuple):
    """What is differentiated."""

    q: jax.Array  # [B, T, H, c], rotated
    kv: jax.Array | None  # [B, T, c], rows of the window
    entries: jax.Array | None  # [B, n, c]
    sinks: jax.Array | None  # f32[H]


def sequence_attention(
    q: jax.Array,
    *,
    kv: jax.Array | None = None,
    entries: jax.Array | None = None,
    chosen: Chosen | None = None,
    sinks: jax.Array | None = None,
    width: int = 0,
    rule: Rule,
    implementation: dispatch.Implementation = "auto",
) -> jax.Array:
    """As `api.chunk_attention` for sequences of T tokens from position 0; differentiable.

    Args:
        q: [B, T, H, c], rotated.
        kv: [B, T, c], a row per token, seen by the next `width` - 1 tokens. None: no window.
        entries: [B, n, c], an entry per `rule.ratio` tokens. None: there are none.
        chosen: with order keys u32[B, T, n]. None: every visible entry.
        sinks: f32[H]. None: there are none.
        width: tokens of the window.
        rule, implementation: of the forward pass, see `api.chunk_attention`.

    Returns:
        f32[B, T, H, c].

    Raises:
        ValueError, NotImplementedError: see `api.chunk_attention`.
    """
    checks.shape("q", q, (None, None, None, None))
    batch, tokens, _, channels = q.shape
    if kv is not None:
        checks.shape("kv", kv, (batch, tokens, channels))
        checks.count("width", width)
    if entries is not None:
        checks.shape("entries", entries, (batch, None, channels))
        more = -entries.shape[1] % rule.tile
        entries = jnp.pad(entries, ((0, 0), (0, more), (0, 0)))
        if chosen is not None:  # a key of 0 is never chosen
            chosen = chosen._replace(order=jnp.pad(chosen.order, ((0, 0), (0, 0), (0, more))))
    return _attend((rule, width, implementation), Inputs(q, kv, entries, sinks), chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[Rule, int, str], inputs: Inputs, chosen: Chosen | None) -> jax.Array:
    rule, width, implementation = static
    batch, tokens, _, channels = inputs.q.shape
    zero, window, entries = jnp.zeros(batch, jnp.int32), None, None
    if inputs.kv is not None:
        ring = jnp.zeros((1, batch, width, channels), inputs.kv.dtype)
        window = Window(ring, inputs.kv, zero)
    if inputs.entries is not None:
        entries = Entries(inputs.entries[None], chosen)
    return chunk_attention(
        inputs.q,
        layer=0,
        start=zero,
        count=zero + tokens,
        window=window,
        entries=entries,
        sinks=inputs.sinks,
        rule=rule,
        implementation=implementation,
    )


def _forward(static, inputs: Inputs, chosen: Chosen | None):
    out = _attend(static, inputs, chosen)
    return out, (inputs, chosen, out)


def _backward(static, kept, cotangent: jax.Array):
    rule, width, _ = static
    inputs, chosen, out = kept
    state = _softmax(inputs, chosen, width, rule)
    at = _At(rule, inputs, chosen, width, state, cotangent, jnp.sum(cotangent * out, axis=-1))
    dq = jnp.zeros(inputs.q.shape, jnp.float32)
    dkv = dentries = dsinks = None
    if inputs.kv is not None:
        dq, dkv = at.over(dq, inputs.kv, at.band, at.bands)
        dkv = dkv.astype(inputs.kv.dtype)
    if inputs.entries is not None:
        tiles = inputs.entries.shape[1] // rule.tile
        dq, dentries = at.over(dq, inputs.entries, at.tile, tiles)
        dentries = dentries.astype(inputs.entries.dtype)
    if inputs.sinks is not None:
        share = jnp.exp(inputs.sinks.astype(jnp.float32) - state.top) / state.total
        dsinks = -jnp.sum(share * at.inner, axis=(0, 1)).astype(inputs.sinks.dtype)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jax.dtypes.float0), chosen)
    return Inputs(dq.astype(inputs.q.dtype), dkv, dentries, dsinks), nothing


_attend.defvjp(_forward, _backward)


class _Part(NamedTuple):
    """Some keys, and the queries that may see them."""

    first: jax.Array  # i32[], of the queries
    key: jax.Array  # i32[], the first key
    mask: jax.Array  # bool[B, queries, keys]


class _At:
    """What all parts of the gradient need."""

    def __init__(self, rule, inputs, chosen, width, state, cotangent, inner):
        self.rule, self.inputs, self.chosen, self.width = rule, inputs, chosen, width
        self.state, self.cotangent, self.inner = state, cotangent, inner
        self.tokens = inputs.q.shape[1]
        # Bands overlap at the end of a sequence, where they begin so that they fit.
        self.size = min(max(width, BAND), self.tokens)
        self.bands = -(-self.tokens // self.size)

    def band(self, b: jax.Array) -> _Part:
        """Queries of band b; the keys of it and of the band before."""
        first = jnp.minimum(b * self.size, self.tokens - self.size)
        keys = min(2 * self.size, self.tokens)
        key = jnp.clip(first + self.size - keys, 0, self.tokens - keys)
        query = first + jnp.arange(self.size, dtype=jnp.int32)
        gap = query[:, None] - (key + jnp.arange(keys, dtype=jnp.int32))
        fresh = (query >= b * self.size)[:, None]  # not those of the band before, once more
        return _Part(first, key, ((gap >= 0) & (gap < self.width) & fresh)[None])

    def tile(self, t: jax.Array) -> _Part:
        """All queries; the entries of tile t."""
        size, query = self.rule.tile, jnp.arange(self.tokens, dtype=jnp.int32)
        index = t * size + jnp.arange(size, dtype=jnp.int32)
        mask = (index < ((query + 1) // self.rule.ratio)[:, None])[None]
        if (chosen := self.chosen) is not None:
            order = jax.lax.dynamic_slice_in_dim(chosen.order, t * size, size, axis=2)
            mask = mask & selection.chosen(order, index, chosen.low, chosen.cut)
        return _Part(jnp.int32(0), t * size, mask)

    def over(self, dq, keys, part, many: int) -> tuple[jax.Array, jax.Array]:
        """Adds to dq f32[B, T, H, c] and makes that of keys [B, n, c], part by part."""

        def body(i: jax.Array, grads: tuple) -> tuple:
            at = part(i)
            queries, rows = at.mask.shape[1:]

            def cut(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(x, at.first, queries, axis=1)

            own = jax.lax.dynamic_slice_in_dim(keys, at.key, rows, axis=1)
            values = self.inputs.q, self.state.top, self.state.total, self.cotangent, self.inner
            q, top, total, cotangent, inner = map(cut, values)
            mine, theirs = _one(q, own, at.mask, top, total, cotangent, inner, self.rule.scale)
            return _add(grads[0], mine, at.first), _add(grads[1], theirs, at.key)

        return jax.lax.fori_loop(0, many, body, (dq, jnp.zeros(keys.shape, jnp.float32)))


def _add(total: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(total, at, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, at, axis=1)


def _one(q, keys, mask, top, total, cotangent, inner, scale) -> tuple[jax.Array, jax.Array]:
    """Gradients of queries f32[B, S, H, c] and of keys f32[B, K, c] that are also the values."""
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    rows = keys.astype(q.dtype)
    scores = dot("rshc,rkc->rshk", q, rows) * scale
    share = jnp.exp(scores - top[..., None]) / jnp.where(total > 0, total, 1.0)[..., None]
    share = jnp.where(mask[:, :, None], share, 0.0)
    given = cotangent.astype(q.dtype)
    wanted = dot("rshc,rkc->rshk", given, rows)
    push = (share * (wanted - inner[..., None]) * scale).astype(q.dtype)
    of_values = dot("rshk,rshc->rkc", share.astype(q.dtype), given)
    return dot("rshk,rkc->rshc", push, rows), of_values + dot("rshk,rshc->rkc", push, q)


def _softmax(inputs: Inputs, chosen: Chosen | None, width: int, rule: Rule) -> attend.State:
    """The maximum and the denominator of every query and head; `out` is not needed."""
    q = inputs.q
    state = attend.begin(q.shape[:-1], 0, inputs.sinks)
    at = _At(rule, inputs, chosen, width, state, None, None)

    def over(state: attend.State, keys: jax.Array, part, many: int) -> attend.State:
        def body(i: jax.Array, state: attend.State) -> attend.State:
            here = part(i)
            queries, rows = here.mask.shape[1:]

            def cut(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)

            own = cut(keys, here.key, rows).astype(q.dtype)
            scores = rule.scale * jnp.einsum(
                "rshc,rkc->rshk",
                cut(q, here.first, queries),
                own,
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(here.mask[:, :, None], scores, attend.MASKED)
            old, total = (cut(x, here.first, queries) for x in (state.top, state.total))
            top = jnp.maximum(old, jnp.max(scores, axis=-1))
            weight = jnp.where(here.mask[:, :, None], jnp.exp(scores - top[..., None]), 0.0)
            total = total * jnp.exp(old - top) + jnp.sum(weight, axis=-1)

            def put(x: jax.Array, new: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(x, new, here.first, axis=1)

            return state._replace(top=put(state.top, top), total=put(state.total, total))

        return jax.lax.fori_loop(0, many, body, state)

    if inputs.kv is not None:
        state = over(state, inputs.kv, at.band, at.bands)
    if inputs.entries is not None:
        state = over(state, inputs.entries, at.tile, inputs.entries.shape[1] // rule.tile)
    return state
