"""Chunk attention: the queries of a prefill call, a joint softmax over window and entries."""

import functools
from typing import Any

import jax

from hetero_kv.attention import pool
from hetero_kv.kernels import checks, dispatch, unpack_tpu
from hetero_kv.kernels.chunk_attention import reference
from hetero_kv.kernels.chunk_attention.operands import Entries, Operands, Rule, Window


def chunk_attention(
    q: jax.Array,
    *,
    layer: int | jax.Array,
    start: jax.Array,
    count: jax.Array,
    window: Window | None = None,
    entries: Entries | None = None,
    sinks: jax.Array | None = None,
    rule: Rule,
    implementation: dispatch.Implementation = "auto",
    tiles: Any = None,
) -> jax.Array:
    """Attends with the queries of a call to their windows and the compressed entries they see.

    As decode attention, for queries at positions t = start .. start + count - 1 of each row. A row
    of position j is seen iff `0 <= t - j < W`; entry i iff `i < (t + 1) // ratio` (the token that
    closes a group sees its entry), and where queries have chosen, iff it is among the chosen.
    Whatever no query may see may hold anything, NaN too.

    Nothing is compiled anew for other lengths, tables, choices or layers: they are values.

    Args:
        q: [R, S, H, c] float32 or bfloat16, rotated.
        layer: i32[], which of the L stacked layers.
        start: i32[R], tokens before the call.
        count: i32[R], queries that run. Outputs of the others are finite, and nothing else.
        window: the ring and the call's own rows. None: a layer without a window.
        entries: the pool, with the entries of this call in it. None: a sliding layer.
        sinks: f32[H], logits without a value. None: there are none.
        rule: what is static.
        implementation: see `dispatch.call`.
        tiles: tile sizes of the named kernel (its `Tiles`). None: see `tuning`.

    Returns:
        f32[R, S, H, c]; zero where nothing is seen and there are no sinks.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot take them.
    """
    operands = Operands(q, sinks, layer, start, count, window, entries)
    operands = checks.as_jax(operands)
    _validate(operands, rule)
    return dispatch.call("chunk_attention", _backends(rule, tiles), implementation, operands)


def _backends(rule: Rule, tiles: Any) -> dict[str, dispatch.Backend]:
    from hetero_kv.kernels import interpret
    from hetero_kv.kernels.chunk_attention import pallas_gpu, pallas_tpu

    tpu = functools.partial(pallas_tpu.run, rule, tiles=tiles)
    check = functools.partial(pallas_tpu.check, rule, tiles=tiles)
    gpu = functools.partial(pallas_gpu.run, rule)
    return {
        "reference": dispatch.Backend(functools.partial(reference.run, rule), packed=True),
        "pallas_tpu": dispatch.Backend(tpu, check, _row_major, packed=True),
        "pallas_gpu": dispatch.Backend(gpu, functools.partial(pallas_gpu.check, rule)),
        "interpret": dispatch.Backend(
            functools.partial(tpu, interpret=interpret.tpu()), check, packed=True
        ),
    }


def _row_major(operands: Operands) -> None:
    if operands.entries is not None:
        unpack_tpu.row_major("chunk_attention", operands.entries.pool)


def _validate(operands: Operands, rule: Rule) -> None:
    """Static checks; values are checked where they are used."""
    q, window, entries = operands.q, operands.window, operands.entries
    checks.shape("q", q, (None, None, None, None))
    batch, size, heads, width = q.shape
    checks.floating("q", q)
    checks.layer(operands.layer)
    for name in ("start", "count"):
        checks.shape(name, getattr(operands, name), (batch,), integer=True)
    if operands.sinks is not None:
        checks.shape("sinks", operands.sinks, (heads,))
    if window is None and entries is None:
        raise ValueError("there is neither a window nor entries to attend to")
    if window is not None:
        rows = checks.ring("window.rows", window.rows, batch, width)
        checks.shape("window.kv", window.kv, (batch, size, width))
        checks.shape("window.first", window.first, (batch,), integer=True)
        checks.floating("window.rows", rows)
    if entries is not None:
        if rule.ratio < 2:
            raise ValueError(f"entries need a ratio of at least 2 tokens, got {rule.ratio=}")
        checks.floating("entries.pool", checks.pool("entries.pool", entries.pool, batch, width))
        rows = pool.rows(entries.pool)
        checks.tile(rule.tile, entries.pool)
        if (chosen := entries.chosen) is not None:
            checks.shape("chosen.order", chosen.order, (batch, size, rows))
            checks.shape("chosen.low", chosen.low, (batch, size))
            checks.shape("chosen.cut", chosen.cut, (batch, size), integer=True)
