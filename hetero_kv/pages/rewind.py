"""Rewinding rows by a few tokens: what a draft overwrites is copied before, and goes back.

History is append-only, so entries of rejected tokens are dead rows that the next call overwrites;
windows, tails, recurrent state and all evidence are copied. Pages count their valid entries: the
counts go back as well, so that an entry that was rejected is nobody's. Traceable.
"""

from typing import NamedTuple

import jax

from hetero_kv.contract import CacheSpec, History, LeafSlot
from hetero_kv.state import Cache


class Mark(NamedTuple):
    """All rows of a cache at one moment, but for their History."""

    leaves: list[jax.Array]
    length: jax.Array
    grid_length: jax.Array
    counts: dict[str, jax.Array]  # valid entries of pages, by component


def mark(spec: CacheSpec, cache: Cache) -> Mark:
    """Where `back` goes to."""
    tables = cache.pages.tables if cache.pages is not None else {}
    counts = {name: x.count for name, x in tables.items()}
    leaves = [cache.leaf(x) for x in _slots(spec)]
    return Mark(leaves, cache.length, cache.grid_length, counts)


def back(spec: CacheSpec, cache: Cache, to: Mark) -> Cache:
    """The rows as they were at the mark; they may have moved on by a few tokens since."""
    cache = cache.with_leaves(dict(zip(_slots(spec), to.leaves, strict=True)))
    cache = cache.replace(length=to.length, grid_length=to.grid_length)
    if not to.counts:
        return cache
    tables = {x: y._replace(count=to.counts[x]) for x, y in cache.pages.tables.items()}
    return cache.replace(pages=cache.pages.replace(tables=tables))


def _slots(spec: CacheSpec) -> list[LeafSlot]:
    return [x for x in spec.slots() if not isinstance(x.leaf.contract, History)]
