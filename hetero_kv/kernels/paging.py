"""Pools as kernels read them: pages and a block table, also where the pool is contiguous."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.packing import Packed, Packing


class PageView(NamedTuple):
    """Entry i of sequence r is row `i % e` of page `table[r, i // e]`; other ids are no pages."""

    pages: jax.Array  # [L, P, e, w]
    table: jax.Array  # i32[R, n]

    @property
    def entries(self) -> int:
        """Entries per page, e."""
        return self.pages.shape[2]

    @property
    def capacity(self) -> int:
        """Entries that one sequence can have."""
        return self.table.shape[1] * self.entries


def packing(pool: Pool) -> Packing | None:
    """How the pool's rows are quantised; None: they are not."""
    return pool.packing if isinstance(pool, Packed) else None


def stored(pool: Pool) -> Pool:
    """The pool of what is stored: floats, or the bytes of a quantised one."""
    return pool.rows if isinstance(pool, Packed) else pool


def dtype(pool: Pool) -> jnp.dtype:
    """Of what is stored."""
    found = stored(pool)
    return (found.pages if isinstance(found, Paged) else found).dtype


def view(pool: Pool, most: int) -> PageView:
    """The pages of a pool; a contiguous one [L, R, N, w] is cut into pages of up to `most` rows.

    No bytes move: a page is a run of rows that lie together. Of a quantised pool w are bytes.
    """
    pool = stored(pool)
    if isinstance(pool, Paged):
        return PageView(pool.pages, pool.read)
    layers, batch, rows, width = pool.shape
    entries = math.gcd(rows, 1 << (most.bit_length() - 1))
    pages = pool.reshape(layers, batch * (rows // entries), entries, width)
    return PageView(pages, jnp.arange(pages.shape[1], dtype=jnp.int32).reshape(batch, -1))
