"""How large the pages of each component are, and what other sizes would waste.

Tokens, entries, blocks and pages are different units; those of pages are converted here alone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NewType

from hetero_kv.contract import CacheSpec, History, LeafSlot

Pages = NewType("Pages", int)


@dataclasses.dataclass(frozen=True)
class PageSpec:
    """The pages of one History component; one page id stands for the rows of all its layers.

    span: tokens of a page. columns: of the block tables (whole tiles, like the rows of a contiguous
    leaf). count: pages of the pool. bytes: of one page, all layers together.
    """

    component: str
    contract: History
    span: int
    columns: Pages
    count: Pages
    bytes: int

    @property
    def entries(self) -> int:
        """Entries per page."""
        return self.span // self.contract.stride

    def pages_for(self, length: int) -> Pages:
        """Pages that hold the entries of `length` tokens."""
        return Pages(-(-int(self.contract.count(length)) // self.entries))


def history_slots(spec: CacheSpec) -> dict[str, list[LeafSlot]]:
    """The History leaves of each component, in the order of the cache."""
    found: dict[str, list[LeafSlot]] = {}
    for slot in spec.slots():
        if isinstance(slot.leaf.contract, History):
            found.setdefault(slot.leaf.component, []).append(slot)
    return found


@dataclasses.dataclass(frozen=True)
class Paging:
    """The pages of every History component of a cache with rows of `capacity` tokens."""

    capacity: int
    pages: tuple[PageSpec, ...]

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        batch: int,
        capacity: int,
        span: int | Mapping[str, int] | None = None,
        count: int | Mapping[str, int] | None = None,
    ) -> "Paging":
        """Pages for `batch` rows of `capacity` tokens.

        Args:
            span: tokens of a page, of all components or by component; default: the block. A
                multiple of the stride that holds whole blocks or divides one. Attention reads
                fastest where a tile (`Leaf.tile` entries) is one page or a few whole pages.
            count: pages of a pool; default: as many as all rows need, if none is shared.

        Raises ValueError for sizes that do not fit together, naming the component.
        """
        for name, given in (("batch", batch), ("capacity", capacity), *_given(span, count)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ValueError(f"{name} is an integer >= 1, got {given!r}")
        slots = history_slots(spec)
        for given in (span, count):
            if isinstance(given, Mapping) and (unknown := set(given) - set(slots)):
                raise ValueError(f"no components with history: {sorted(unknown)}; {list(slots)}")
        made = []
        for component, members in slots.items():
            wanted = span.get(component) if isinstance(span, Mapping) else span
            made.append(_page_spec(spec, component, members, capacity, wanted or spec.block))
            pool = count.get(component) if isinstance(count, Mapping) else count
            pool = max(1, batch * made[-1].pages_for(capacity)) if pool is None else pool
            if not 1 <= pool < 2**31:
                raise ValueError(f"{component!r}: {pool} pages; a pool has 1 to 2**31 - 1")
            made[-1] = dataclasses.replace(made[-1], count=Pages(pool))
        return cls(capacity, tuple(made))

    def page(self, component: str) -> PageSpec:
        """The pages of a component."""
        return next(x for x in self.pages if x.component == component)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(x.count * x.bytes for x in self.pages)

    @property
    def shared_span(self) -> int:
        """Prefixes of a multiple of so many tokens are shared without copying any entry."""
        return math.lcm(*(x.span for x in self.pages)) if self.pages else 1


def _page_spec(
    spec: CacheSpec, component: str, members: Sequence[LeafSlot], capacity: int, span: int
) -> PageSpec:
    leaf = members[0].leaf
    contract = leaf.contract
    if any((x.leaf.contract, x.leaf.tile) != (contract, leaf.tile) for x in members):
        raise ValueError(f"{component!r}: leaves of one component need one stride, span and tile")
    if span < 1 or span % contract.stride:
        raise ValueError(
            f"{component!r}: a page of {span} tokens is not a multiple of the stride "
            f"{contract.stride}"
        )
    if span % spec.block and spec.block % span:
        raise ValueError(
            f"{component!r}: a page of {span} tokens neither holds whole blocks nor divides one; "
            f"the block is {spec.block} tokens"
        )
    entries = span // contract.stride
    size = sum(x.repeats * entries * x.leaf.row_bytes for x in members)
    columns = -(-leaf.row_count(capacity) // entries)
    return PageSpec(component, contract, span, Pages(columns), Pages(columns), size)


@dataclasses.dataclass(frozen=True)
class Waste:
    """Bytes of pages that hold no entry, for one set of lengths.

    own: with each component's own pages. uniform: with one page size for all components (what
    paged allocators for uniform models do), `uniform_bytes` each.
    """

    used: int
    own: int
    uniform: int
    uniform_bytes: int


def compare_with_uniform(
    spec: CacheSpec, paging: Paging, lengths: Sequence[int], uniform_bytes: int = 0
) -> Waste:
    """Accounting in the manner of Jenga: what pages of one size for everything would waste.

    A uniform page belongs to one layer and holds as many of its entries as fit. uniform_bytes:
    default the largest page of a single layer of `paging`.
    """
    used = own = uniform = 0
    slots = history_slots(spec)
    if not uniform_bytes:
        uniform_bytes = max(
            paging.page(name).entries * x.leaf.row_bytes for name, xs in slots.items() for x in xs
        )
    for name, members in slots.items():
        page = paging.page(name)
        for length in lengths:
            held = int(page.contract.count(length))
            own += page.pages_for(length) * page.bytes
            for slot in members:
                size = slot.leaf.row_bytes
                if size > uniform_bytes:
                    raise ValueError(f"{uniform_bytes=} cannot hold one row of {slot.path}")
                used += slot.repeats * held * size
                uniform += slot.repeats * -(-held // (uniform_bytes // size)) * uniform_bytes
    return Waste(used, own - used, uniform - used, uniform_bytes)


def _given(
    span: int | Mapping[str, int] | None, count: int | Mapping[str, int] | None
) -> list[tuple[str, int]]:
    """The numbers in them, with names for errors."""
    found = []
    for name, given in (("span", span), ("count", count)):
        each = given.items() if isinstance(given, Mapping) else [("", given)]
        found += [(f"{name} {x}".strip(), value) for x, value in each if value is not None]
    return found
