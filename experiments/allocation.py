"""How many requests fit the same bytes under four ways of giving out pages.

Layers of one kind keep pages of their own form. A page holds `block` tokens of one layer's
component; windows and other fixed state are one page each. Arms:

uniform: one block table for all layers (vLLM's first form): a page has a block of tokens of every
    layer and stays as long as the sequence, rows that have left the windows included.
largest: a table per form, windows are given back, but every page has the size of the largest.
static: a pool per form, its share what an average request would take.
lcm: large pages of the least common multiple of all sizes, cut into pages of one form each and
    given back when the last of these is free (Jenga, SOSP'25).
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from hetero_kv.contract import CacheSpec, History, Window

WHOLE = 0  # in a holding: large pages that are its own
ARMS = ("uniform", "largest", "static", "lcm")


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of page: `size` bytes hold `tokens` of one layer; `layers` keep such pages.

    window: tokens after which a page is given back; 0: never.
    """

    component: str
    size: int
    tokens: int
    layers: int
    window: int = 0

    def pages(self, length: int) -> int:
        """Pages that a sequence of `length` tokens takes."""
        if not self.window:
            return self.layers * -(-length // self.tokens)
        # The window may begin anywhere in a page.
        reach = min(length, self.window + self.tokens - 1)
        return self.layers * -(-reach // self.tokens)

    def row_bytes(self, length: int) -> float:
        """Bytes of the rows that matter at `length`."""
        live = min(length, self.window) if self.window else length
        return self.layers * live * self.size / self.tokens


def forms_of(spec: CacheSpec, block: int) -> list[Form]:
    """The forms of a model's cache: History per component and row size, and windows.

    Raises:
        ValueError: the block is not a multiple of the strides.
    """
    found: dict[tuple, int] = {}
    for slot in spec.slots():
        leaf, contract = slot.leaf, slot.leaf.contract
        if isinstance(contract, History):
            if block % contract.stride:
                raise ValueError(f"{block=} is not a multiple of the stride {contract.stride}")
            key = leaf.component, block // contract.stride * leaf.row_bytes, block, 0
        elif isinstance(contract, Window):
            key = leaf.component, block * leaf.row_bytes, block, contract.width
        else:
            continue
        found[key] = found.get(key, 0) + slot.repeats
    return [
        Form(component, size, tokens, layers, window)
        for (component, size, tokens, window), layers in found.items()
    ]


class Pool:
    """Bytes given out by one arm. `take` and `give` go by sequence."""

    def __init__(self, arm: str, forms: Sequence[Form], capacity: int, lengths: Sequence[int]):
        if arm not in ARMS:
            raise ValueError(f"arm={arm!r} must be one of {ARMS}")
        self.arm, self.forms, self.capacity = arm, forms, capacity
        self.free = capacity  # bytes, of uniform and largest
        if arm == "static":
            mean = [statistics.fmean(f.pages(n) * f.size for n in lengths) for f in forms]
            self.left = [
                int(capacity * x / sum(mean)) // f.size for x, f in zip(mean, forms, strict=True)
            ]
        self.large = math.lcm(*(f.size for f in forms))
        self.large_free = capacity // self.large
        # Per form: large pages with room, by how many small ones are free in each.
        self.partial: list[dict[int, int]] = [{} for _ in forms]
        self.room = [0] * len(forms)  # small pages free in them
        self.numbers = 0

    def take(self, length: int) -> object | None:
        """A holding for one sequence, or None where it does not fit."""
        if self.arm in ("uniform", "largest"):
            need = self.need(length)
            if need > self.free:
                return None
            self.free -= need
            return need
        wanted = [f.pages(length) for f in self.forms]
        if self.arm == "static":
            if any(w > x for w, x in zip(wanted, self.left, strict=True)):
                return None
            self.left = [x - w for x, w in zip(self.left, wanted, strict=True)]
            return wanted
        return self._take_lcm(wanted)

    def give(self, holding: object) -> None:
        """Takes a holding back."""
        if self.arm in ("uniform", "largest"):
            self.free += holding
        elif self.arm == "static":
            self.left = [x + w for x, w in zip(self.left, holding, strict=True)]
        else:
            for kind, pages in enumerate(holding):
                per = self.large // self.forms[kind].size
                self.large_free += pages.pop(WHOLE)
                for number, count in pages.items():
                    room = self.partial[kind].pop(number, 0) + count
                    self.room[kind] += count
                    if room == per:
                        self.large_free += 1
                        self.room[kind] -= per
                    else:
                        self.partial[kind][number] = room

    def need(self, length: int) -> int:
        """Bytes of a sequence under uniform or largest."""
        if self.arm == "largest":
            return sum(f.pages(length) for f in self.forms) * max(f.size for f in self.forms)
        whole = sum(f.layers * f.size for f in self.forms)
        return -(-length // self.forms[0].tokens) * whole

    def _take_lcm(self, wanted: Sequence[int]) -> list[dict[int, int]] | None:
        per = [self.large // f.size for f in self.forms]
        new = [-(-max(0, w - r) // p) for w, r, p in zip(wanted, self.room, per, strict=True)]
        if sum(new) > self.large_free:
            return None
        self.large_free -= sum(new)
        return [self._cut(kind, want, new[kind], per[kind]) for kind, want in enumerate(wanted)]

    def _cut(self, kind: int, want: int, new: int, per: int) -> dict[int, int]:
        """Small pages by large page: from partial ones, fullest first, and from new ones."""
        partial, got = self.partial[kind], {WHOLE: 0}
        self.room[kind] += new * per - want
        for number in sorted(partial, key=partial.__getitem__):
            if not want:
                break
            got[number] = min(want, partial[number])
            want -= got[number]
            partial[number] -= got[number]
            if not partial[number]:
                del partial[number]
        got[WHOLE] = want // per
        if want % per:
            self.numbers += 1
            got[self.numbers] = want % per
            partial[self.numbers] = per - want % per
        return got


@dataclasses.dataclass(frozen=True)
class Usage:
    """concurrency: sequences at a time, on average. waste: bytes not of live rows, of all."""

    concurrency: float
    waste: float


def simulate(
    arm: str, forms: Sequence[Form], capacity: int, lengths: Sequence[int], seed: int = 0
) -> Usage:
    """Keeps as many of the sequences running as fit, in order; a random one ends at a time.

    The first eighth of them fills the pool and is not counted.

    Raises:
        ValueError: a sequence does not fit an empty pool.
    """
    rng = np.random.default_rng(seed)
    pool = Pool(arm, forms, capacity, lengths)
    running: list[tuple[object, int]] = []
    waiting, counts, wastes = collections.deque(lengths), [], []
    live = 0.0
    while waiting:
        holding = pool.take(waiting[0])
        if holding is not None:
            running.append((holding, waiting.popleft()))
            live += sum(f.row_bytes(running[-1][1]) for f in forms)
            continue
        if not running:
            raise ValueError(f"{waiting[0]} tokens do not fit {capacity} bytes under {arm!r}")
        if len(waiting) < len(lengths) * 7 / 8:
            counts.append(len(running))
            wastes.append(1 - live / capacity)
        chosen = int(rng.integers(len(running)))
        running[chosen], running[-1] = running[-1], running[chosen]
        holding, length = running.pop()
        live -= sum(f.row_bytes(length) for f in forms)
        pool.give(holding)
    if not counts:
        raise ValueError("everything fits: fewer bytes or more sequences say more")
    return Usage(statistics.fmean(counts), statistics.fmean(wastes))
