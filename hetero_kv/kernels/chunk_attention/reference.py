"""Chunk attention in jnp: what the CPU runs, and what the kernels are compared with."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool, ring, selection
from hetero_kv.kernels.chunk_attention.operands import Entries, Operands, Rule, Window

BAND = 64  # shortest band of queries that is attended at a time
ABSENT = -1  # position of a key that is not there
Mask = Callable[[jax.Array, jax.Array], jax.Array]  # positions of queries and keys -> who sees whom


def run(rule: Rule, operands: Operands) -> jax.Array:
    """See `api.chunk_attention`."""
    q, start, count = operands.q, operands.start, operands.count
    positions = start[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    state = attend.begin(q.shape[:-1], q.shape[-1], operands.sinks)
    if operands.window is not None:
        state = window(state, q, operands.window, operands.layer, start, positions, rule.scale)
    if operands.entries is not None:
        visible = (positions + 1) // rule.ratio, (start + count) // rule.ratio
        most = jnp.max(jnp.where(count > 0, visible[1], 0))
        tiles = -(-most // rule.tile)
        state = entries(state, q, operands.entries, operands.layer, visible, tiles, rule)
    return attend.finish(state)


def window(
    state: attend.State,
    q: jax.Array,
    operand: Window,
    layer: int | jax.Array,
    start: jax.Array,
    positions: jax.Array,
    scale: float,
    form: attend.Form = attend.LATENT,
    mask: Mask | None = None,
) -> attend.State:
    """Adds the rows of the window for queries at i32[R, S] `positions`."""
    held = ring.read(operand.rows, layer)
    width = held.shape[1]
    before = start[:, None] - width + jnp.arange(width, dtype=jnp.int32)
    # The oldest row, position start - W, is out of every query's sight.
    live = (before >= operand.first[:, None]) & (before > start[:, None] - width)
    old = attend.clean(ring.ordered(held, start), live)
    before = jnp.where(live, before, ABSENT)
    rows = operand.kv.astype(held.dtype)
    return bands(state, q, rows, old, before, positions, width, scale, form, mask)


def bands(
    state: attend.State,
    q: jax.Array,
    kv: jax.Array,
    old: jax.Array,
    before: jax.Array,
    positions: jax.Array,
    width: int,
    scale: float,
    form: attend.Form = attend.LATENT,
    mask: Mask | None = None,
) -> attend.State:
    """Adds keys to queries in bands: each sees its own band of keys and the one before.

    A band is at least as long as the window, so no visible key is missed; the work grows with
    tokens times window, not with tokens squared.

    Args:
        state, q: lead axes [R, S, H], and [R, S, H, c]; or grouped (see `attend.Form`).
        kv: [R, S, c] own rows of the queries, at i32[R, S] `positions`.
        old: [R, n, c] rows before them, n <= W, at i32[R, n] `before` (ABSENT: not there).
        width: W; key j is visible to query t iff `0 <= t - j < W`.
        mask: another rule within the window, of the same signature as `near`. None: `near`.
    """
    mask = mask or functools.partial(near, width=width)
    rows, tokens = positions.shape
    size = max(width, BAND)
    if tokens <= size:  # one band: exactly the rows there are
        keys = jnp.concatenate([old, kv], axis=1)
        at = jnp.concatenate([before, positions], axis=1)
        return form.add(state, q, keys, mask(positions, at), scale)
    count = -(-tokens // size)
    pad, front = count * size - tokens, size - old.shape[1]

    def fill(x: jax.Array, head: int, tail: int, value: int = 0) -> jax.Array:
        edges = ((0, 0), (head, tail)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, edges, constant_values=value)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(rows * count, size, *x.shape[2:])

    def pairs(old: jax.Array, new: jax.Array, value: int) -> jax.Array:
        x = jnp.concatenate([fill(old, front, 0, value), fill(new, 0, pad, value)], axis=1)
        return jnp.concatenate([cut(x[:, :-size]), cut(x[:, size:])], axis=1)

    keys, at = pairs(old, kv, 0), pairs(before, positions, ABSENT)
    mask = mask(cut(fill(positions, 0, pad)), at)
    padded = attend.State(*(cut(fill(x, 0, pad)) for x in state))
    banded = form.add(padded, cut(fill(q, 0, pad)), keys, mask, scale)
    join = (x.reshape(rows, count * size, *x.shape[2:])[:, :tokens] for x in banded)
    return attend.State(*join)


def near(queries: jax.Array, keys: jax.Array, width: int) -> jax.Array:
    """bool[R, S, K] of i32[R, S] query and i32[R, K] key positions."""
    gap = queries[:, :, None] - keys[:, None, :]
    return (gap >= 0) & (gap < width) & (keys >= 0)[:, None, :]


def entries(
    state: attend.State,
    q: jax.Array,
    operand: Entries,
    layer: int | jax.Array,
    visible: tuple[jax.Array, jax.Array],
    tiles: jax.Array,
    rule: Rule,
    form: attend.Form = attend.LATENT,
) -> attend.State:
    """Adds entries, tile by tile.

    visible: to each query i32[R, S], and to the last one that runs i32[R] (what is written).
    """
    seen, written = visible[0][..., None], visible[1]

    def body(t: jax.Array, state: attend.State) -> attend.State:
        index = t * rule.tile + jnp.arange(rule.tile, dtype=jnp.int32)
        rows = pool.tile(operand.pool, layer, t, rule.tile)
        rows = attend.clean(rows, index < written[:, None])
        mask = index < seen
        if (chosen := operand.chosen) is not None:
            part = jax.lax.dynamic_slice_in_dim(chosen.order, t * rule.tile, rule.tile, axis=2)
            mask = mask & selection.chosen(part, index, chosen.low, chosen.cut)
        return form.add(state, q, rows, mask, rule.scale)

    return jax.lax.fori_loop(0, tiles, body, state)
