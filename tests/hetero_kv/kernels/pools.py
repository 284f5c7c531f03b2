"""Pools of pages for kernel tests: permuted, shared, and poisoned wherever nobody may read.

What nobody may read is NaN, also where rows are quantised: bytes that are all ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.packing import Packed, Packing


class Pages(NamedTuple):
    """pages [L, P, e, w]; table i32[R, n] (P: no page); layer: the one that holds the rows."""

    pages: np.ndarray
    table: np.ndarray
    layer: np.int32


def poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that reads as NaN."""
    return np.full(shape, 255 if dtype == np.uint8 else np.nan, np.float32).astype(dtype)


def quantised(packing: Packing | None, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as they are stored, and as they are read."""
    if packing is None:
        return rows, rows
    stored, read = _quantised(packing, jnp.asarray(rows, jnp.float32))
    return np.asarray(stored), np.asarray(read, np.float32)


@functools.partial(jax.jit, static_argnums=0)  # one program in place of thirty
def _quantised(packing: Packing, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    stored = packing.pack(rows)
    return stored, packing.unpack(stored)


def packed(packing: Packing | None, pool: Any) -> Any:
    """The operand of an op."""
    return pool if packing is None else Packed(pool, packing)


def paged(
    rng: np.random.Generator,
    rows: np.ndarray,
    visible: np.ndarray,
    entries: int,
    *,
    layers: int = 2,
    spare: int = 3,
    shared: int = 0,
) -> Pages:
    """Spreads rows [R, N, w] over pages of `entries` rows in a random order.

    Everything but the first i32[R] `visible` rows of each sequence is NaN: the rest of a page,
    `spare` pages that nobody owns, other layers. The first `shared` pages of all sequences are
    those of sequence 0; the caller's rows must then be equal there.
    """
    batch, count, width = rows.shape
    columns = -(-count // entries)
    total = batch * columns + spare
    ids = rng.permutation(total)[: batch * columns].reshape(batch, columns)
    ids[:, :shared] = ids[0, :shared]
    pages = poison((layers, total, entries, width), rows.dtype)
    layer = int(rng.integers(layers))
    table = np.full((batch, columns), total, np.int32)
    for r in range(batch):
        for column in range(-(-int(visible[r]) // entries)):
            part = rows[r, column * entries : min(int(visible[r]), (column + 1) * entries)]
            pages[layer, ids[r, column], : len(part)] = part
            table[r, column] = ids[r, column]
    return Pages(pages, table, np.int32(layer))
