"""Hybrid decode attention: one query a sequence, a joint softmax over window and entries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention import pool
from hetero_kv.attention.pool import Paged
from hetero_kv.kernels import dispatch
from hetero_kv.kernels.decode_attention import reference
from hetero_kv.kernels.decode_attention.operands import Entries, Operands, Window

TILE = 64
NUMPY = (np.ndarray, np.generic)


def decode_attention(
    q: jax.Array,
    *,
    layer: int | jax.Array,
    window: Window | None = None,
    entries: Entries | None = None,
    sinks: jax.Array | None = None,
    scale: float,
    tile: int = TILE,
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
        entries: the pool, and the entries to attend. None: a sliding layer.
        sinks: f32[H], logits without a value. None: there are none.
        scale: of logits.
        tile: entries that the reference attends at a time; the pool holds a whole number of them.
        implementation: see `dispatch.call`.
        tiles: tile sizes of the named kernel (its `Tiles`). None: see `tuning`.

    Returns:
        f32[R, H, c]; zero where nothing is seen and there are no sinks.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot take them. Quantised pools are among
            this: every implementation takes float32 and bfloat16 rows.
    """
    operands = Operands(q, sinks, layer, window, entries)
    operands = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, NUMPY) else x, operands)
    _validate(operands, tile)
    return dispatch.call(
        "decode_attention", _backends(scale, tile, tiles), implementation, operands
    )


def _backends(scale: float, tile: int, tiles: Any) -> dict[str, dispatch.Backend]:
    from hetero_kv.kernels import interpret
    from hetero_kv.kernels.decode_attention import pallas_tpu

    tpu = functools.partial(pallas_tpu.run, scale=scale, tiles=tiles)
    return {
        "reference": dispatch.Backend(functools.partial(reference.run, scale=scale, tile=tile)),
        "pallas_tpu": dispatch.Backend(tpu, pallas_tpu.check),
        "interpret": dispatch.Backend(
            functools.partial(tpu, interpret=interpret.tpu()), pallas_tpu.check
        ),
    }


def _validate(operands: Operands, tile: int) -> None:
    """Static checks; values are checked where they are used."""
    q, window, entries = operands.q, operands.window, operands.entries
    if q.ndim != 3:
        raise ValueError(f"q must be [R, H, c], got {q.shape=}")
    batch, heads, width = q.shape
    if operands.sinks is not None and operands.sinks.shape != (heads,):
        raise ValueError(f"sinks must be [H] = [{heads}], got {operands.sinks.shape}")
    if window is None and entries is None:
        raise ValueError("there is neither a window nor entries to attend to")
    floats = [("q", q)]
    if window is not None:
        _expect("window.rows", window.rows, (None, batch, None, width))
        _expect("window.position", window.position, (batch,), integer=True)
        _expect("window.stop", window.stop, (batch,), integer=True)
        floats.append(("window.rows", window.rows))
    if entries is not None:
        floats.append(("entries.pool", _validate_entries(entries, batch, width, tile)))
    for name, array in floats:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a floating type, got {array.dtype}")
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(
                f"{name} is {array.dtype}: quantised rows are not implemented; store bfloat16"
            )


def _validate_entries(entries: Entries, batch: int, width: int, tile: int) -> jax.Array:
    rows = entries.pool
    if isinstance(rows, Paged):
        rows = rows.pages
        _expect("entries.pool.pages", rows, (None, None, None, width))
        _expect("entries.pool.read", entries.pool.read, (batch, None), integer=True)
    else:
        _expect("entries.pool", rows, (None, batch, None, width))
    _expect("entries.visible", entries.visible, (batch,), integer=True)
    if entries.picked is not None:
        _expect("entries.picked", entries.picked, (batch, None), integer=True)
    elif tile < 1 or (not isinstance(entries.pool, Paged) and pool.rows(entries.pool) % tile):
        raise ValueError(
            f"{tile=} must divide the {pool.rows(entries.pool)} entries that a sequence can have"
        )
    return rows


def _expect(name: str, array: Any, shape: tuple[int | None, ...], integer: bool = False) -> None:
    fits = len(array.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits or 0 in array.shape:
        raise ValueError(f"{name} must be {list(shape)} without empty axes, got {array.shape}")
    if integer and array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}")
