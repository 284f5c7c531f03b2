"""Contracts: one declaration per cached leaf that says when the leaf can be resumed.

Everything else (store, validators, planner, accounting, fault injection) is written against the
declarations here and never against layer names. Lengths are counted in tokens; the other units
have types of their own and are converted by `CacheSpec` alone.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NewType

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.packing import POISON, Packing

Tokens = NewType("Tokens", int)
Entries = NewType("Entries", int)
Blocks = NewType("Blocks", int)

Length = int | np.ndarray | jax.Array  # tokens; contracts accept concrete and traced lengths

LAYOUT_VERSION = 1  # part of every identity: bump when bytes of a leaf change their meaning


@dataclasses.dataclass(frozen=True)
class History:
    """Append-only rows; resumable at P iff all `count(P)` entries are present.

    Entry i covers the tokens `i * stride .. i * stride + span - 1`.
    """

    stride: int
    span: int = 0  # tokens; 0: equal to the stride

    def __post_init__(self):
        if self.stride < 1 or self.span < 0:
            raise ValueError(f"History needs stride >= 1 and span >= 0, got {self}")
        if not self.span:
            object.__setattr__(self, "span", self.stride)

    def count(self, length: Length) -> Length:
        """Complete entries after `length` tokens."""
        count = (length - self.span) // self.stride + 1
        if isinstance(length, jax.Array):
            return jnp.maximum(count, 0)
        return np.maximum(count, 0) if isinstance(length, np.ndarray) else max(count, 0)


@dataclasses.dataclass(frozen=True)
class Window:
    """A ring over positions; resumable at P iff the last `min(P, width - 1)` rows are present."""

    width: int  # tokens, the current one included

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"Window needs width >= 1, got {self.width}")


@dataclasses.dataclass(frozen=True)
class Point:
    """Resumable at P iff a copy taken at exactly P is present.

    With `group` > 0 the leaf is a ring over positions whose live rows are the open rows of the
    current group of `group` tokens and the `keep` tokens before it (overlap). With `group` = 0
    (recurrent state) every row is live and there are no positions.
    """

    group: int = 0
    keep: int = 0

    def __post_init__(self):
        if self.group < 0 or self.keep < 0 or (self.keep and not self.group):
            raise ValueError(f"Point needs group >= 0, and keep only with a group, got {self}")


@dataclasses.dataclass(frozen=True)
class Derived:
    """Always resumable: rebuilt from other leaves."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Restored with the leaf it vouches for.

    kind "positions": i32[rows], the absolute position of every ring row (-1: never written).
    kind "count": i32[], entries written to a History leaf, bumped where the pool is written.
    """

    of: str
    kind: str

    def __post_init__(self):
        if self.kind not in ("positions", "count"):
            raise ValueError(f"Evidence.kind must be 'positions' or 'count', got {self.kind!r}")


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Never stored."""


Contract = History | Window | Point | Derived | Evidence | Scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One cached array of one layer and one sequence: `[rows, *width]`, or `width` if rows = 0.

    For a History leaf `rows` is 0 here and follows from the capacity of the cache. packing: None,
    or how float rows are stored as bytes; width and dtype are then those bytes (see `of_rows`).
    """

    contract: Contract
    component: str  # "csa entries", "csa index keys", "windows", "tails", ...
    rows: int = 0
    width: tuple[int, ...] = ()
    dtype: str = "float32"
    align: int = 1  # bytes; a row's stride in a page is padded to a multiple of it
    tile: int = 1  # History rows come in multiples of it, so that tiles never leave the pool
    packing: Packing | None = None

    def __post_init__(self):
        if not isinstance(self.contract, Contract):
            raise ValueError(
                f"a leaf without a contract is refused: {self.component!r} has "
                f"contract={self.contract!r}; declare one of History, Window, Point, Derived, "
                "Evidence, Scratch"
            )
        if isinstance(self.contract, History) and self.rows:
            raise ValueError(f"History leaf {self.component!r}: rows follow from the capacity")
        if isinstance(self.contract, Window) and self.rows < max(1, self.contract.width - 1):
            raise ValueError(
                f"{self.component!r}: {self.rows=} must be >= 1 and >= {self.contract.width - 1=}"
            )
        if self.is_ring and isinstance(self.contract, Point):
            need = self.contract.group + self.contract.keep
            if self.rows < need:
                raise ValueError(f"{self.component!r}: {self.rows=} < group + keep = {need}")
        if self.packing is not None:
            if not isinstance(self.contract, History | Window):
                raise ValueError(
                    f"{self.component!r}: only rows of History and Window leaves can be packed, "
                    f"not of {type(self.contract).__name__}"
                )
            if (self.width, self.dtype) != ((self.packing.bytes,), "uint8"):
                raise ValueError(
                    f"{self.component!r}: packed rows are uint8[{self.packing.bytes}], not "
                    f"{self.dtype}{list(self.width)}"
                )

    @classmethod
    def of_rows(cls, width: int, dtype: str, packing: Packing | None = None, **fields) -> "Leaf":
        """A leaf of float rows of `width` values, as they are or as `packing` stores them."""
        if packing is None:
            return cls(width=(width,), dtype=dtype, **fields)
        if (packing.width, packing.dtype) != (width, dtype):
            raise ValueError(f"{packing} does not store {dtype}[{width}]")
        return cls(width=(packing.bytes,), dtype="uint8", packing=packing, **fields)

    @property
    def poison(self) -> float | None:
        """What rows are filled with to read as NaN (rule 6); None: nothing reads so."""
        if self.packing is not None:
            return POISON
        return math.nan if jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating) else None

    def numbers(self, rows: jax.Array) -> jax.Array:
        """Stored rows [..., *width] as numbers: the rows themselves, or what they are read as."""
        return rows if self.packing is None else self.packing.unpack(rows)

    @property
    def is_ring(self) -> bool:
        """Whether row `p % rows` holds position p."""
        ring = isinstance(self.contract, Window)
        return ring or (isinstance(self.contract, Point) and self.contract.group > 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without alignment."""
        return math.prod(self.width) * jnp.dtype(self.dtype).itemsize

    @property
    def stride_bytes(self) -> int:
        """Bytes from one row to the next in a page (aligned)."""
        return -(-self.row_bytes // self.align) * self.align

    def row_count(self, capacity: int) -> int:
        """Rows for a cache of `capacity` tokens (0: the leaf has no row axis)."""
        if isinstance(self.contract, History):
            return -(-max(1, int(self.contract.count(capacity))) // self.tile) * self.tile
        return self.rows

    def shape(self, capacity: int) -> tuple[int, ...]:
        """Shape for one layer and one sequence."""
        rows = self.row_count(capacity)
        return (rows, *self.width) if rows else self.width

    def ring_positions(self, length: Length) -> jax.Array | np.ndarray:
        """The position each ring row holds after `length` tokens: i32[..., rows], -1: none."""
        xp = jnp if isinstance(length, jax.Array) else np
        last = xp.asarray(length, dtype=xp.int32)[..., None] - 1
        slots = _range(xp, self.rows, last.ndim)
        held = last - (last - slots) % self.rows
        return xp.where(held >= 0, held, -1)

    def live_rows(self, length: Length, capacity: int = 0) -> jax.Array | np.ndarray:
        """Rows whose value matters at `length`: bool[..., rows] (bool[..., 1] without rows).

        Works on Python ints, numpy and traced arrays; `capacity` matters to History only.
        """
        xp = jnp if isinstance(length, jax.Array) else np
        length = xp.asarray(length, dtype=xp.int32)
        contract = self.contract
        if isinstance(contract, History):
            index = _range(xp, self.row_count(capacity), length.ndim + 1)
            return index < contract.count(length)[..., None]
        if isinstance(contract, Window):
            held = self.ring_positions(length)
            return (held >= 0) & (held > length[..., None] - contract.width)
        if self.is_ring:
            held = self.ring_positions(length)
            start = length // contract.group * contract.group - contract.keep
            return (held >= 0) & (held >= start[..., None])
        dead = isinstance(contract, Derived | Scratch)
        return xp.full((*length.shape, max(self.rows, 1)), not dead)


def _range(xp, size: int, ndim: int) -> jax.Array | np.ndarray:
    """0 .. size - 1 along the last of `ndim` axes: ranks are never promoted silently."""
    return xp.arange(size, dtype=xp.int32).reshape((1,) * (ndim - 1) + (size,))


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The leaves of one layer, and a name for humans."""

    kind: str
    leaves: tuple[tuple[str, Leaf], ...]

    def __post_init__(self):
        names = dict(self.leaves)
        for name, leaf in self.leaves:
            if not isinstance(leaf, Leaf):
                raise ValueError(
                    f"a leaf without a contract is refused: {self.kind}.{name} is {leaf!r}; "
                    "declare it as contract.Leaf(contract=…)"
                )
            if isinstance(leaf.contract, Evidence) and leaf.contract.of not in names:
                raise ValueError(f"{self.kind}.{name} vouches for {leaf.contract.of!r}: no leaf")

    @property
    def window(self) -> int:
        """Tokens of the widest window (0: none)."""
        widths = [x.contract.width for _, x in self.leaves if isinstance(x.contract, Window)]
        return max(widths, default=0)

    def tail(self, length: int | None) -> float:
        """Tokens that must be run again to rebuild the Point leaves at `length`; inf: all.

        `None` asks for the worst case over all lengths.
        """
        worst = 0.0
        for _, leaf in self.leaves:
            if isinstance(leaf.contract, Point):
                group, keep = leaf.contract.group, leaf.contract.keep
                if not group:
                    return math.inf
                open_rows = group - 1 if length is None else length % group
                worst = max(worst, keep + open_rows)
        return worst


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` copies of a pattern of layers; leaves are stacked over the copies."""

    repeats: int
    layers: tuple[LayerSpec, ...]


def strides_lcm(segments: tuple[Segment, ...]) -> int:
    """Least common multiple of all strides and tail groups, in tokens."""
    strides = [1]
    for segment in segments:
        for layer in segment.layers:
            for _, leaf in layer.leaves:
                if isinstance(leaf.contract, History):
                    strides.append(leaf.contract.stride)
                elif isinstance(leaf.contract, Point) and leaf.contract.group:
                    strides.append(leaf.contract.group)
    return math.lcm(*strides)


@dataclasses.dataclass(frozen=True)
class LeafSlot:
    """One stacked leaf of a cache: where it is, how often it repeats, and its declaration."""

    segment: int
    layer: int
    name: str
    repeats: int
    kind: str
    leaf: Leaf

    @property
    def path(self) -> str:
        """A stable name, e.g. `s0.1.entries`."""
        return f"s{self.segment}.{self.layer}.{self.name}"


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """All leaves of a model's cache, in the order of its layers, and the reuse geometry.

    block: tokens of one prefix block. chunk: tokens of one prefill call, on the absolute grid.
    """

    segments: tuple[Segment, ...]
    chunk: int
    block: int

    def __post_init__(self):
        if self.chunk < 1 or self.block < 1:
            raise ValueError(f"chunk and block are tokens >= 1, got {self.chunk=}, {self.block=}")
        stride = self.strides_lcm
        if self.block % stride:
            raise ValueError(
                f"block={self.block} is not a multiple of the strides' lcm {stride}: an entry "
                f"would lie in two blocks; use a multiple of {stride}"
            )

    # -- geometry, in tokens -----------------------------------------------------------------

    @property
    def strides_lcm(self) -> int:
        """Least common multiple of all strides and tail groups, in tokens."""
        return strides_lcm(self.segments)

    @property
    def granularity(self) -> int:
        """G = lcm(block, chunk): every resumable length is a multiple of it."""
        return math.lcm(self.block, self.chunk)

    @property
    def minimum_resumable(self) -> int:
        """The shortest prefix that can be resumed, in tokens (its prompt is one token longer)."""
        return self.granularity

    def largest_boundary(self, length: int) -> int:
        """The largest multiple of G that a prompt of `length` tokens can resume at.

        At most `length - 1`: the last token is always computed (DESIGN rule 2).
        """
        return max(0, length - 1) // self.granularity * self.granularity

    @property
    def replay_length(self) -> float:
        """Tokens of exact replay at a boundary, rounded up to the chunk grid; inf: all of them."""
        return self.replay_tokens(self.granularity)

    def replay_tokens(self, length: int | None = None, round_up: bool = True) -> float:
        """Tokens to replay so that windows and tails at `length` are exact.

        Backward over layers, top first: `n = max(n + max(W - 1, 0), tail)`; for V4 this is
        L * (W - 1). `None`: worst case over lengths.
        """
        need = 0.0
        for layer in reversed(list(self.layers())):
            need = max(need + max(layer.window - 1, 0), layer.tail(length))
        if not round_up or math.isinf(need):
            return need
        return math.ceil(need / self.chunk) * self.chunk

    # -- units: the one place where they are converted ------------------------------------------

    def blocks_in(self, length: int) -> Blocks:
        """Complete blocks in `length` tokens."""
        return Blocks(length // self.block)

    def tokens_of(self, blocks: int) -> Tokens:
        """Tokens covered by so many blocks."""
        return Tokens(blocks * self.block)

    def entries_of_block(self, leaf: Leaf, block: int) -> tuple[Entries, Entries]:
        """First and one-past-last entry of a History leaf that *complete* within a block.

        For overlapping entries (span > stride) an entry belongs to the block of its last token.
        """
        contract = leaf.contract
        if not isinstance(contract, History):
            raise ValueError(f"{leaf.component!r} has no entries: {contract}")
        start, stop = block * self.block, (block + 1) * self.block
        return Entries(int(contract.count(start))), Entries(int(contract.count(stop)))

    # -- walking -----------------------------------------------------------------------------

    def layers(self) -> Iterator[LayerSpec]:
        """Every layer, bottom first."""
        for segment in self.segments:
            for _ in range(segment.repeats):
                yield from segment.layers

    def slots(self) -> Iterator[LeafSlot]:
        """Every stacked leaf."""
        for s, segment in enumerate(self.segments):
            for i, layer in enumerate(segment.layers):
                for name, leaf in layer.leaves:
                    yield LeafSlot(s, i, name, segment.repeats, layer.kind, leaf)

    def group_of(self, slot: LeafSlot) -> str:
        """ "history", "checkpoint" or "none": the atomic group that stores the leaf.

        Evidence belongs to the group of the leaf it vouches for. A history counter follows from
        the number of blocks restored, so it is checked against bytes rather than stored.
        """
        contract = slot.leaf.contract
        if isinstance(contract, Evidence):
            siblings = dict(self.segments[slot.segment].layers[slot.layer].leaves)
            contract = siblings[contract.of].contract
        if isinstance(contract, History):
            return "history"
        return "checkpoint" if isinstance(contract, Window | Point) else "none"

    # -- bytes -------------------------------------------------------------------------------

    def history_bytes_per_token(self) -> float:
        """Bytes that one more token adds to the History leaves of one sequence."""
        return sum(
            slot.repeats * slot.leaf.stride_bytes / slot.leaf.contract.stride
            for slot in self.slots()
            if isinstance(slot.leaf.contract, History)
        )

    def block_bytes(self) -> int:
        """Bytes of the history group of one block."""
        total = 0
        for slot in self.slots():
            if isinstance(slot.leaf.contract, History):
                first, last = self.entries_of_block(slot.leaf, 1)
                total += slot.repeats * (last - first) * slot.leaf.row_bytes
        return total

    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoint group at one position (Window and Point leaves, evidence)."""
        return sum(
            slot.repeats * max(slot.leaf.rows, 1) * slot.leaf.row_bytes
            for slot in self.slots()
            if self.group_of(slot) == "checkpoint"
        )

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Bytes of a whole cache pytree."""
        per_row = sum(
            slot.repeats
            * math.prod(slot.leaf.shape(capacity))
            * jnp.dtype(slot.leaf.dtype).itemsize
            for slot in self.slots()
        )
        return batch * per_row + 2 * 4 * batch  # length and grid_length
