"""One row's state as plain arrays, and back: what a bundle keeps of a cache."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.contract import CacheSpec, Derived, History, LeafSlot, Scratch
from hetero_kv.state import Cache


def kept(spec: CacheSpec) -> Iterator[LeafSlot]:
    """The leaves that a row's state consists of."""
    return (x for x in spec.slots() if not isinstance(x.leaf.contract, Derived | Scratch))


def take_leaves(spec: CacheSpec, cache: Cache, length: int, row: int = 0) -> dict[str, np.ndarray]:
    """By LeafSlot.path: [repeats, rows, *width] on the host, History as far as `length` tokens.

    Pages are put together into rows; a page that is not there is NaN, or 0.
    """
    found = {}
    for slot in kept(spec):
        leaf = cache.leaf(slot)
        if not isinstance(slot.leaf.contract, History):
            found[slot.path] = np.array(leaf[:, row])
            continue
        count = int(slot.leaf.contract.count(length))
        if cache.pages is None:
            found[slot.path] = np.array(leaf[:, row, :count])
            continue
        pages = cache.pages.tables[slot.leaf.component]
        entries = cache.pages.paging.page(slot.leaf.component).entries
        index = jnp.arange(count)
        ids = pages.safe(pages.table)[row, index // entries]
        values = leaf.at[:, ids, index % entries].get(mode="fill", fill_value=slot.leaf.poison or 0)
        found[slot.path] = np.array(values)
    return found


def put_leaves(
    spec: CacheSpec,
    cache: Cache,
    leaves: Mapping[str, np.ndarray],
    at: int,
    grid: int,
) -> Cache:
    """A contiguous cache of batch 1 with these leaves, standing at `at`.

    Leaves that are not given stay as they are. Raises ValueError, naming it, for a leaf that the
    cache does not have or that does not fit.
    """
    slots = {x.path: x for x in kept(spec)}
    if unknown := sorted(leaves.keys() - slots.keys()):
        raise ValueError(f"the model has no leaves {unknown}")
    changed = {}
    for path, value in leaves.items():
        slot = slots[path]
        leaf = np.array(cache.leaf(slot))
        target = leaf[:, 0]
        if isinstance(slot.leaf.contract, History):
            target = target[:, : value.shape[1]] if value.ndim > 1 else target
        if target.shape != value.shape or target.dtype != value.dtype:
            raise ValueError(
                f"{path} is {value.dtype}{list(value.shape)}, and {target.dtype}"
                f"{list(target.shape)} in the model"
            )
        np.copyto(target, value)
        changed[slot] = jnp.array(leaf)
    lengths = dict(length=jnp.array([at], jnp.int32), grid_length=jnp.array([grid], jnp.int32))
    return jax.block_until_ready(cache.with_leaves(changed).replace(**lengths))
