"""Payloads: the bytes of one group, or only their number.

The store's policies never look inside a payload, so the same code runs with arrays and with sizes
alone. Array payloads are one flat buffer each, laid out from the CacheSpec: a section per leaf,
sections of a component side by side, a checksum per component.
"""

import dataclasses
import math
from typing import Protocol, Self

import jax.numpy as jnp
import numpy as np
import xxhash

from hetero_kv.contract import CacheSpec, Entries, History, LeafSlot
from hetero_kv.prefix.encoding import encode
from hetero_kv.validate import owner

ALIGN = 16  # bytes; sections start on it, so that views of any dtype are aligned


class Payload(Protocol):
    """What a tier stores."""

    @property
    def nbytes(self) -> int:
        """Bytes it is charged for."""

    def copy(self) -> Self:
        """An equal payload that shares no memory with this one."""

    def damaged(self, label: bytes) -> str:
        """The first component whose bytes are not those of the group `label`, or ""."""


@dataclasses.dataclass(frozen=True)
class SizedPayload:
    """A payload without bytes, for trace replay."""

    nbytes: int

    def copy(self) -> "SizedPayload":
        """Itself: there is no memory to share."""
        return self

    def damaged(self, label: bytes) -> str:
        """Always ""."""
        return ""


@dataclasses.dataclass(frozen=True)
class Section:
    """One leaf's part of a group: `shape` = [repeats, rows, *width], `offset` in bytes.

    first: index of the first row in the leaf (entries of a History leaf; 0 for others).
    component: that of the leaf, or of the leaf it vouches for.
    """

    slot: LeafSlot
    component: str
    offset: int
    first: Entries
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the section, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: np.ndarray) -> np.ndarray:
        """The section of a group's buffer as an array (a view)."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """Where each leaf of a group lies in its buffer."""

    sections: tuple[Section, ...]
    components: tuple[tuple[str, int, int], ...]  # (name, start, stop) in bytes
    nbytes: int


def _layout(parts: list[tuple[str, LeafSlot, int, tuple[int, ...]]]) -> GroupLayout:
    """parts: (component, slot, first row, shape), in the order of the cache."""
    order: dict[str, list] = {}
    for component, *rest in parts:
        order.setdefault(component, []).append(rest)
    sections, components, offset = [], [], 0
    for component, members in order.items():
        start = offset
        for slot, first, shape in members:
            section = Section(
                slot, component, offset, first, shape, np.dtype(jnp.dtype(slot.leaf.dtype))
            )
            sections.append(section)
            offset = -(-(offset + section.nbytes) // ALIGN) * ALIGN
        components.append((component, start, offset))
    return GroupLayout(tuple(sections), tuple(components), offset)


def history_layout(spec: CacheSpec, block: int) -> GroupLayout:
    """The history group of one block: the entries of every History leaf that complete in it."""
    parts = []
    for slot in spec.slots():
        if isinstance(slot.leaf.contract, History):
            first, last = spec.entries_of_block(slot.leaf, block)
            shape = (slot.repeats, last - first, *slot.leaf.width)
            parts.append((slot.leaf.component, slot, first, shape))
    return _layout(parts)


def checkpoint_layout(spec: CacheSpec) -> GroupLayout:
    """The checkpoint group: all Window and Point leaves with the evidence for them."""
    parts = []
    for slot in spec.slots():
        if spec.group_of(slot) == "checkpoint":
            component = owner(spec, slot).leaf.component
            parts.append((component, slot, 0, (slot.repeats, *slot.leaf.shape(0))))
    return _layout(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayPayload:
    """The bytes of one group in a buffer of their own: u8[layout.nbytes].

    Checksums cover the group's label too, which whoever reads must know: a whole payload that
    turns up in place of another one is as damaged as one with a flipped bit.
    """

    layout: GroupLayout
    buffer: np.ndarray
    checksums: tuple[int, ...]  # xxh3_64 per component, in layout order

    @classmethod
    def seal(cls, layout: GroupLayout, label: bytes, buffer: np.ndarray) -> "ArrayPayload":
        """Takes over a filled buffer and computes its checksums."""
        return cls(layout, buffer, _checksums(layout, label, buffer))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.layout.nbytes

    def copy(self) -> "ArrayPayload":
        """The same bytes in a fresh buffer, checksums as they were."""
        return dataclasses.replace(self, buffer=self.buffer.copy())

    def damaged(self, label: bytes) -> str:
        """The first component whose bytes are not those of the group `label`, or ""."""
        found = _checksums(self.layout, label, self.buffer)
        for (name, _, _), have, want in zip(
            self.layout.components, found, self.checksums, strict=True
        ):
            if have != want:
                return name
        return ""


def label(kind: str, key: bytes, depth: int) -> bytes:
    """What a group is: its kind, the key of its prefix, and how many blocks that has."""
    return encode((kind, key, depth))


def _checksums(layout: GroupLayout, label: bytes, buffer: np.ndarray) -> tuple[int, ...]:
    sums = []
    for name, start, stop in layout.components:
        state = xxhash.xxh3_64(label + encode(name))
        state.update(buffer[start:stop])
        sums.append(state.intdigest())
    return tuple(sums)
