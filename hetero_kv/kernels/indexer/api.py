"""The indexer of one query a sequence: the top k entries by ReLU-weighted scores of index keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hetero_kv.attention.pool import Pool
from hetero_kv.kernels import checks, dispatch, unpack_tpu
from hetero_kv.kernels.indexer import reference
from hetero_kv.kernels.indexer.operands import Operands


def select(
    q: jax.Array,
    weights: jax.Array,
    keys: Pool,
    *,
    layer: int | jax.Array,
    visible: jax.Array,
    k: int,
    tile: int = checks.TILE,
    implementation: dispatch.Implementation = "auto",
    tiles: Any = None,
) -> jax.Array:
    """Picks the k entries with the highest scores of those that the query sees.

    `I[i] = sum_h weights[h] * relu(q[h] . key[i])` (V4 report, 2.3), in float32. Where scores are
    equal the lower index is picked. The result is the same set whatever the capacity and the batch.

    Nothing is compiled anew for other lengths, tables or layers: they are values.

    Args:
        q: [R, heads, dim] float32 or bfloat16, rotated.
        weights: f32[R, heads], scaled; may be negative.
        keys: the pool of index keys; those that are not visible may hold anything. Quantised ones
            are read as they are stored, and unpacked on the chip.
        layer: i32[], which of the L stacked layers.
        visible: i32[R], entries that each query sees, the first ones of its sequence.
        k: entries to pick.
        tile: entries that the reference scores at a time; the pool holds a whole number of them.
        implementation: see `dispatch.call`.
        tiles: tile sizes of the named kernel (its `Tiles`). None: see `tuning`.

    Returns:
        i32[R, k]: min(k, visible) entries, then -1. Their order is that of the implementation: by
        descending score in the reference and on GPU, by ascending index on TPU.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot take them: on a GPU, packed keys that
            are not a multiple of 128 bytes a row.
    """
    operands = checks.as_jax(Operands(q, weights, layer, keys, visible))
    _validate(operands, k, tile)
    return dispatch.call("indexer", _backends(k, tile, tiles), implementation, operands)


def _backends(k: int, tile: int, tiles: Any) -> dict[str, dispatch.Backend]:
    from hetero_kv.kernels import interpret
    from hetero_kv.kernels.indexer import pallas_gpu, pallas_tpu

    tpu = functools.partial(pallas_tpu.run, k=k, tiles=tiles)
    gpu = functools.partial(pallas_gpu.run, k=k, tiles=tiles)
    check = functools.partial(pallas_tpu.check, tiles=tiles)
    return {
        "reference": dispatch.Backend(
            functools.partial(reference.run, k=k, tile=tile), packed=True
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
    unpack_tpu.row_major("indexer", operands.keys)


def _validate(operands: Operands, k: int, tile: int) -> None:
    """Static checks; values are checked where they are used."""
    checks.shape("q", operands.q, (None, None, None))
    batch, heads, dim = operands.q.shape
    checks.shape("weights", operands.weights, (batch, heads))
    checks.shape("visible", operands.visible, (batch,), integer=True)
    checks.floating("keys", checks.pool("keys", operands.keys, batch, dim))
    checks.tile(tile, operands.keys)
    checks.floating("q", operands.q)
    if operands.weights.dtype != jnp.float32:
        raise ValueError(f"weights must be float32, got {operands.weights.dtype}")
    checks.count("k", k)
    checks.layer(operands.layer)
