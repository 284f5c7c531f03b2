"""The cache pytree: built from a CacheSpec, updated by pure functions, donated to jitted steps."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hetero_kv.arguments import is_integer
from hetero_kv.contract import CacheSpec, Evidence, Leaf, LeafSlot, Point

LayerLeaves = dict[str, jax.Array]  # name -> [repeats, batch, *leaf.shape(capacity)]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("length", "grid_length", "layers", "pages"),
    meta_fields=("capacity",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """State of `batch` sequences.

    length: i32[R], tokens each row has consumed.
    grid_length: i32[R], how many of the leading tokens were computed by full prefill calls on the
        absolute chunk grid (or restored from such state). Only these may be published in the
        exact regime; decode and partial calls do not advance it.
    layers: per segment, per pattern position: leaf name -> [repeats, R, *leaf.shape].
    capacity: tokens each row can hold (static).
    pages: None, or the page tables (`pages.cache.Pages`) of a cache whose History leaves are pools
        of pages, [repeats, P, entries per page, *width].
    """

    length: jax.Array
    grid_length: jax.Array
    layers: tuple[tuple[LayerLeaves, ...], ...]
    capacity: int
    pages: Any = None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.length.shape[0]

    def leaf(self, slot: LeafSlot) -> jax.Array:
        """The stacked array of a slot: [repeats, R, *leaf.shape]."""
        return self.layers[slot.segment][slot.layer][slot.name]

    def replace(self, **changes) -> "Cache":
        """A copy with the named fields changed."""
        return dataclasses.replace(self, **changes)

    def with_leaves(self, leaves: dict[LeafSlot, jax.Array]) -> "Cache":
        """A copy with some stacked leaves exchanged."""
        layers = [[dict(layer) for layer in segment] for segment in self.layers]
        for slot, value in leaves.items():
            layers[slot.segment][slot.layer][slot.name] = value
        return self.replace(layers=tuple(tuple(segment) for segment in layers))


def _fill(leaf: Leaf) -> int:
    positions = isinstance(leaf.contract, Evidence) and leaf.contract.kind == "positions"
    return -1 if positions else 0


def _starts_live(leaf: Leaf) -> bool:
    """Whether the leaf is read before it is written: recurrent state, zero at length 0."""
    return isinstance(leaf.contract, Point) and not leaf.contract.group


def check_sizes(batch: int, capacity: int) -> None:
    """Raises ValueError unless a cache can have them."""
    for name, size in (("batch", batch), ("capacity", capacity)):
        if not is_integer(size):
            raise ValueError(f"{name} of a cache is an integer, got {size!r}")
    if batch < 1 or capacity < 1:
        raise ValueError(f"a cache needs batch >= 1 and capacity >= 1, got {batch=}, {capacity=}")


def _build(spec: CacheSpec, batch: int, capacity: int, make) -> Cache:
    check_sizes(batch, capacity)
    layers = tuple(
        tuple(
            {
                name: make((segment.repeats, batch, *leaf.shape(capacity)), leaf)
                for name, leaf in layer.leaves
            }
            for layer in segment.layers
        )
        for segment in spec.segments
    )
    counter = Leaf(contract=Evidence(of="", kind="count"), component="lengths", dtype="int32")
    length, grid_length = make((batch,), counter), make((batch,), counter)
    return Cache(length=length, grid_length=grid_length, layers=layers, capacity=capacity)


def abstract(spec: CacheSpec, batch: int, capacity: int) -> Cache:
    """Shapes and dtypes only (`jax.ShapeDtypeStruct` leaves)."""
    return _build(
        spec,
        batch,
        capacity,
        lambda shape, leaf: jax.ShapeDtypeStruct(shape, jnp.dtype(leaf.dtype)),
    )


def init(spec: CacheSpec, batch: int, capacity: int, poison: bool = False) -> Cache:
    """An empty cache. With `poison` every row of floats, packed or not, is NaN until it is written
    (rule 6)."""
    check_sizes(batch, capacity)
    return _filled(spec, batch, capacity, poison)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # one program, not one per shape
def _filled(spec: CacheSpec, batch: int, capacity: int, poison: bool) -> Cache:
    def make(shape: tuple[int, ...], leaf: Leaf) -> jax.Array:
        fill = _fill(leaf)
        if poison and leaf.poison is not None and not _starts_live(leaf):
            fill = leaf.poison
        return jnp.full(shape, fill, jnp.dtype(leaf.dtype))

    return _build(spec, batch, capacity, make)


def shardings(
    spec: CacheSpec, batch: int, capacity: int, mesh: jax.sharding.Mesh, axis: str
) -> Cache:
    """Shardings that split every leaf over rows of the batch along one mesh axis."""

    def make(shape: tuple[int, ...], leaf: Leaf) -> NamedSharding:
        rows = PartitionSpec(axis) if len(shape) == 1 else PartitionSpec(None, axis)
        return NamedSharding(mesh, rows)

    return _build(spec, batch, capacity, make)


def reset_row(spec: CacheSpec, cache: Cache, row: int | jax.Array) -> Cache:
    """Row `row` starts over at length 0.

    Evidence is reset, so stale rows can vouch for nothing, and recurrent state, which is live at
    length 0 already. Other leaves keep their stale bytes, which no contract counts as live.
    """
    fresh = {
        slot: cache.leaf(slot).at[:, row].set(_fill(slot.leaf))
        for slot in spec.slots()
        if isinstance(slot.leaf.contract, Evidence) or _starts_live(slot.leaf)
    }
    return cache.with_leaves(fresh).replace(
        length=cache.length.at[row].set(0), grid_length=cache.grid_length.at[row].set(0)
    )


def take_row(cache: Cache, row: int | jax.Array) -> Cache:
    """One row of a contiguous cache, as a cache of batch 1; traceable."""

    def cut(axis: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis)

    return Cache(
        length=cut(0)(cache.length),
        grid_length=cut(0)(cache.grid_length),
        layers=jax.tree.map(cut(1), cache.layers),
        capacity=cache.capacity,
    )


def put_row(cache: Cache, row: int | jax.Array, one: Cache) -> Cache:
    """The contiguous cache with one row exchanged for a cache of batch 1; traceable."""

    def paste(axis: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, axis)

    return Cache(
        length=paste(0)(cache.length, one.length),
        grid_length=paste(0)(cache.grid_length, one.grid_length),
        layers=jax.tree.map(paste(1), cache.layers, one.layers),
        capacity=cache.capacity,
    )
