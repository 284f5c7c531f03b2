"""Decode attention in jnp: what the CPU runs, and what the kernels are compared with."""

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool, ring
from hetero_kv.kernels.decode_attention.operands import Entries, Operands, Window


def run(operands: Operands, *, scale: float, tile: int) -> jax.Array:
    """See `api.decode_attention`. Picked entries are gathered, all others read tile by tile."""
    q = operands.q[:, None]
    state = attend.begin(q.shape[:-1], q.shape[-1], operands.sinks)
    rows, live = [], []
    if operands.window is not None:
        own, seen = _window(operands.window, operands.layer)
        rows, live = [own], [seen]
    entries = operands.entries
    if entries is not None and entries.picked is not None:
        picked = jnp.maximum(entries.picked, 0)
        seen = entries.picked >= 0
        found = attend.clean(pool.gather(entries.pool, operands.layer, picked), seen)
        rows, live = [*rows, found], [*live, seen]
    if rows:
        keys, mask = jnp.concatenate(rows, axis=1), jnp.concatenate(live, axis=1)
        state = attend.add(state, q, keys, mask[:, None], scale)
    if entries is not None and entries.picked is None:
        state = _all(state, q, entries, operands.layer, scale, tile)
    return attend.finish(state)[:, 0]


def _window(window: Window, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [R, W, c] of the ring, and which are seen: [R, W]."""
    held = ring.held_positions(ring.size(window.rows), window.position + 1)
    live = (held >= 0) & (held < window.stop[:, None])
    return attend.clean(ring.read(window.rows, layer), live), live


def _all(
    state: attend.State,
    q: jax.Array,
    entries: Entries,
    layer: int | jax.Array,
    scale: float,
    tile: int,
) -> attend.State:
    def body(t: jax.Array, state: attend.State) -> attend.State:
        index = t * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = index < entries.visible[:, None]
        rows = attend.clean(pool.tile(entries.pool, layer, t, tile), seen)
        return attend.add(state, q, rows, seen[:, None], scale)

    tiles = -(-jnp.max(entries.visible) // tile)
    return jax.lax.fori_loop(0, tiles, body, state)
