"""Pools of pages for kernel tests: permuted, shared, and poisoned wherever nobody may read."""

from typing import NamedTuple

import numpy as np


class Pages(NamedTuple):
    """pages [L, P, e, w]; table i32[R, n] (P: no page); layer: the one that holds the rows."""

    pages: np.ndarray
    table: np.ndarray
    layer: np.int32


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
    pages = np.full((layers, total, entries, width), np.nan, np.float32).astype(rows.dtype)
    layer = int(rng.integers(layers))
    table = np.full((batch, columns), total, np.int32)
    for r in range(batch):
        for column in range(-(-int(visible[r]) // entries)):
            part = rows[r, column * entries : min(int(visible[r]), (column + 1) * entries)]
            pages[layer, ids[r, column], : len(part)] = part
            table[r, column] = ids[r, column]
    return Pages(pages, table, np.int32(layer))
