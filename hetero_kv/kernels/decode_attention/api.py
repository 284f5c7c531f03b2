"""Hybrid decode attention: one query a sequence, a joint softmax over window and entries."""

import functools
from typing import Any

import jax

from hetero_kv.kernels import checks, dispatch, unpack_tpu
from hetero_kv.kernels.decode_attention import reference
from hetero_kv.kernels.decode_attention.operands import Entries, Operands, Window


def decode_attention(
    q: jax.Array,
    *,
    layer: int | jax.Array,
    window: Window | None = None,
    entries: Entries | None = None,
    sinks: jax.Array | None = None,
    scale: float,
    tile: int = checks.TILE,
    implementation: dispatch.Implementation = "auto",
    tiles: Any = None,
) -> jax.Array:
    """Attends with one query per sequence to its window and its compressed entries.

    `o[h] = sum_j p[h, j] * row[j]` with `p[h, j] = exp(q[h] . row[j] * scale) / (sum_j' exp(..) +
    exp(sinks[h]))`, j over the rows of the window that the query sees and the entries (V4 report,
    2.3): rows are both keys and values of all heads. Entries that are not seen, pages that nobody
    owns and ring rows that are dead may hold anything, NaN too. A block table's id that is no page,
    where the query would read, gives NaN for that sequence.

    Nothing is compiled anew for other lengths, tables, picks or layers: they are values.

    Args:
        q: [R, H, c] float32 or bfloat16, rotated.
        layer: i32[], which of the L stacked layers.
        window: the ring, [L, R, W, c], and what is seen of it. None: a layer without a window.
        entries: the pool, and the entries to attend. A quantised pool is read as it is stored, and
            unpacked on the chip. None: a sliding layer.
        sinks: f32[H], logits without a value. None: there are none.
        scale: of logits.
        tile: entries that the reference attends at a time; the pool holds a whole number of them.
        implementation: see `dispatch.call`.
        tiles: tile sizes of the named kernel (its `Tiles`). None: see `tuning`.

    Returns:
        f32[R, H, c]; zero where nothing is seen and there are no sinks.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot take them: on a GPU, packed entries
            that are not a multiple of 128 bytes a row, or have two values in a byte.
    """
    operands = checks.as_jax(Operands(q, sinks, layer, window, entries))
    _validate(operands, tile)
    backends = _backends(scale, tile, tiles)
    return dispatch.call("decode_attention", backends, implementation, operands)


def _backends(scale: float, tile: int, tiles: Any) -> dict[str, dispatch.Backend]:
    from hetero_kv.kernels import interpret
    from hetero_kv.kernels.decode_attention import pallas_gpu, pallas_tpu

    tpu = functools.partial(pallas_tpu.run, scale=scale, tiles=tiles)
    gpu = functools.partial(pallas_gpu.run, scale=scale, tiles=tiles)
    check = functools.partial(pallas_tpu.check, tiles=tiles)
    return {
        "reference": dispatch.Backend(
            functools.partial(reference.run, scale=scale, tile=tile), packed=True
        ),
        "pallas_tpu": dispatch.Backend(tpu, check, _row_major, packed=True),
        "pallas_gpu": dispatch.Backend(
            gpu, functools.partial(pallas_gpu.check, tiles=tiles), packed=True
        ),
        "interpret": dispatch.Backend(
            functools.partial(tpu, interpret=interpret.tpu()), check, packed=True
        ),
    }


def _row_major(operands: Operands) -> None:
    if operands.entries is not None:
        unpack_tpu.row_major("decode_attention", operands.entries.pool)


def _validate(operands: Operands, tile: int) -> None:
    """Static checks; values are checked where they are used."""
    q, window, entries = operands.q, operands.window, operands.entries
    checks.shape("q", q, (None, None, None))
    batch, heads, width = q.shape
    checks.floating("q", q)
    checks.layer(operands.layer)
    checks.count("tile", tile)
    if operands.sinks is not None:
        checks.shape("sinks", operands.sinks, (heads,))
    if window is None and entries is None:
        raise ValueError("there is neither a window nor entries to attend to")
    if window is not None:
        rows = checks.ring("window.rows", window.rows, batch, width)
        checks.shape("window.position", window.position, (batch,), integer=True)
        checks.shape("window.stop", window.stop, (batch,), integer=True)
        checks.floating("window.rows", rows)
    if entries is not None:
        rows = checks.pool("entries.pool", entries.pool, batch, width)
        checks.floating("entries.pool", rows)
        checks.shape("entries.visible", entries.visible, (batch,), integer=True)
        if entries.picked is not None:
            checks.shape("entries.picked", entries.picked, (batch, None), integer=True)
        else:
            checks.tile(tile, entries.pool)
