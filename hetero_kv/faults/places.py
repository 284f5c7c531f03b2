"""Where faults are put: payloads in host memory, records on disk, rows of a cache.

This reaches into tiers behind their backs, as faults do.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from hetero_kv.contract import CacheSpec, History
from hetero_kv.faults import kinds
from hetero_kv.prefix.disk import record
from hetero_kv.prefix.disk.record import Header, SegmentHeader
from hetero_kv.prefix.disk.segment import Place
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, Group, Node
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.payload import ArrayPayload
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.state import Cache

Arrays = Mapping[str, np.ndarray]


def path(store: PrefixStore, keys: Keys, length: int) -> list[Node]:
    """The nodes of a stored prefix."""
    blocks = store.spec.blocks_in(length)
    nodes = store.catalog.index.match(keys)[:blocks]
    keeps = any(store.spec.group_of(slot) == CHECKPOINT for slot in store.spec.slots())
    if len(nodes) < blocks or (keeps and nodes[-1].checkpoint is None):
        raise ValueError(f"{length} tokens are not stored: there is nothing to put a fault in")
    return nodes


def groups(nodes: list[Node], kind: str, extent: str) -> list[Group]:
    """The groups that a fault hits."""
    if kind == CHECKPOINT:
        return [nodes[-1].checkpoint]
    return [x.history for x in nodes[-1 if extent == kinds.LAST else 0 :]]


def kind_of(spec: CacheSpec, component: str) -> str:
    """Which kind of group holds a component."""
    for slot in spec.slots():
        if slot.leaf.component == component and isinstance(slot.leaf.contract, History):
            return HISTORY
    return CHECKPOINT


# -- bytes of groups -------------------------------------------------------------------------------


def filled(payload: ArrayPayload, leaves: Arrays, earlier: int = 0) -> np.ndarray:
    """A copy of a payload's buffer with the leaves that are given.

    earlier: entries are those of so many blocks before, as far as there are any.
    """
    buffer = payload.buffer.copy()
    for section in payload.layout.sections:
        value = leaves.get(section.slot.path)
        if value is None:
            continue
        if isinstance(section.slot.leaf.contract, History):
            first = section.first - earlier * section.shape[1]
            value = value[:, max(0, first) : max(0, first) + section.shape[1]]
        np.copyto(section.view(buffer), value)
    return buffer


def sealed(payload: ArrayPayload, buffer: np.ndarray, name: bytes | None) -> ArrayPayload:
    """name: the label to seal it under; None: the checksums stay as they were."""
    if name is None:
        return dataclasses.replace(payload, buffer=buffer)
    return ArrayPayload.seal(payload.layout, name, buffer)


def without(payload: ArrayPayload, component: str, name: bytes) -> ArrayPayload:
    """A payload that was made and sealed without a component."""
    layout = dataclasses.replace(
        payload.layout,
        sections=tuple(x for x in payload.layout.sections if x.component != component),
        components=tuple(x for x in payload.layout.components if x[0] != component),
    )
    return ArrayPayload.seal(layout, name, payload.buffer.copy())


def held(store: PrefixStore, group: Group) -> ArrayPayload:
    """The payload of a group, wherever it is."""
    if group.on_host:
        return store.catalog.tier.payload(group.ticket)
    fetched = store.disk.read(group.disk, group.label)
    if fetched.payload is None:
        raise ValueError(f"{group.kind} at depth {group.node.depth}: {fetched.failure} already")
    return fetched.payload


def put(store: PrefixStore, group: Group, payload: ArrayPayload, generation: int = 0) -> None:
    """Puts other bytes in a group's place. generation: how far its record's is off (disk)."""
    if group.on_host:
        store.catalog.tier._payloads[group.slot] = payload
        return
    place, header, head = _record(store, group)
    parts = zip(header.components, payload.checksums, strict=True)
    components = tuple(dataclasses.replace(x, checksum=total) for x, total in parts)
    wrong = dataclasses.replace(
        header, components=components, generation=header.generation + generation
    )
    packed = record.pack(wrong, head, place.offset)
    _overwrite(store, group, packed + payload.buffer.tobytes())


def kill(store: PrefixStore, group: Group) -> None:
    """The group's record is gone from the disk."""
    _overwrite(store, group, record.DEAD)


def evict(store: PrefixStore, group: Group) -> None:
    """It leaves, with what hangs on it."""
    store.catalog.discard(group, "evicted by a fault")


def recycle(store: PrefixStore, group: Group, payload: ArrayPayload) -> None:
    """Host memory that the evicted group had is given to another object."""
    tier = store.catalog.tier
    tier._vacant.remove(group.slot)
    tier._payloads[group.slot] = payload
    tier.free -= payload.nbytes


def to_disk(store: PrefixStore) -> None:
    """Everything is on disk, and nowhere else."""
    flushed = store.flush()
    if not flushed.ok:
        raise RuntimeError(f"the disk does not take what it must: {flushed.failure}")
    for group in store.catalog.groups():
        if group.on_host and not store.catalog.leave_host(group, group.ticket):
            raise RuntimeError(f"{group.kind} at depth {group.node.depth} is not on disk")


def _record(store: PrefixStore, group: Group) -> tuple[Place, Header, SegmentHeader]:
    entry = store.disk._books.entries[group.disk.generation]
    place, head = entry.place, entry.segment.head
    with open(entry.segment.path, "rb") as file:
        file.seek(place.offset)
        data = file.read(place.header_bytes)
    header: Header | None = record.parse(data, head, place.offset)
    if header is None:
        raise ValueError(f"{group.kind} at depth {group.node.depth}: no record there")
    return place, header, head


def _overwrite(store: PrefixStore, group: Group, data: bytes) -> None:
    entry = store.disk._books.entries[group.disk.generation]
    with open(entry.segment.path, "r+b") as file:
        file.seek(entry.place.offset)
        file.write(data)


# -- rows ------------------------------------------------------------------------------------------


def overwrite_row(
    spec: CacheSpec, cache: Cache, row: int, leaves: Arrays, first: Mapping[str, int]
) -> Cache:
    """The row with other leaves. first: per History leaf the entry from which on it is hit.

    In pages: whatever the page table says of them."""
    changed = {}
    for slot in spec.slots():
        if slot.path not in leaves:
            continue
        leaf, value = np.array(cache.leaf(slot)), leaves[slot.path]
        if isinstance(slot.leaf.contract, History):
            index = np.arange(first.get(slot.path, 0), value.shape[1])
            if cache.pages is None:
                leaf[:, row, index] = value[:, index]
            else:
                pages = cache.pages.tables[slot.leaf.component]
                entries = cache.pages.paging.page(slot.leaf.component).entries
                ids = np.asarray(pages.table)[row, index // entries]
                leaf[:, ids, index % entries] = value[:, index]
        else:
            leaf[:, row] = value
        changed[slot] = jnp.array(leaf)
    return cache.with_leaves(changed)


def claim_length(cache: Cache, row: int, change: int) -> Cache:
    """The row says that it stands elsewhere."""
    length, grid = np.array(cache.length), np.array(cache.grid_length)
    length[row] += change
    grid[row] += change
    return cache.replace(length=jnp.array(length), grid_length=jnp.array(grid))


def starts(spec: CacheSpec, length: int, extent: str) -> dict[str, int]:
    """For `overwrite_row`: per History leaf the first entry that a fault of this extent hits."""
    block = spec.blocks_in(length) - 1 if extent == kinds.LAST else 0
    return {
        slot.path: int(spec.entries_of_block(slot.leaf, block)[0])
        for slot in spec.slots()
        if isinstance(slot.leaf.contract, History)
    }
