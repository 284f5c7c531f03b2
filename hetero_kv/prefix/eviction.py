"""Orders of eviction behind one interface: what goes first when room is needed.

An order never looks inside an item. The catalog keeps one instance per kind of group, tells it what
is added, used and gone, and asks for a victim; `may_go` refuses items that are pinned or not
leaves. An order that meets such an item in its turn parks it until it is offered again, so that a
victim costs O(1) or O(log n), amortised, however many items must stay.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
MayGo = Callable[[Item], bool]


class Eviction(Generic[Item]):
    """The interface. `parked` holds the items that were refused and wait to be offered."""

    def __init__(self):
        self.parked: dict[Item, object] = {}

    def add(
        self,
        item: Item,
        key: Hashable = None,
        nbytes: int = 1,
        depth: int = 0,
        cost: float = 1.0,
    ) -> None:
        """A new item.

        key: outlives the item: what comes back under the same key was here before.
        nbytes: what its eviction frees. depth: blocks from the root.
        cost: what it would take to make it anew, in any unit.
        """
        raise NotImplementedError

    def add_all(self, items: Sequence[Item], describe: Callable[[Item], tuple]) -> None:
        """`add` in this order. describe: an item's key, nbytes, depth and cost."""
        for item in items:
            self.add(item, *describe(item))

    def touch(self, item: Item) -> None:
        """The item was used."""

    def refresh(self, item: Item) -> None:
        """A request that used the item goes on: recent, but not used once more."""

    def remove(self, item: Item, evicted: bool = False) -> None:
        """The item is gone, as the victim it was chosen for or for another reason."""
        raise NotImplementedError

    def victim(self, may_go: MayGo) -> Item | None:
        """The first item that may go; it stays until removed."""
        raise NotImplementedError

    def offer(self, item: Item) -> None:
        """The item may go again; only parked ones are affected."""

    def touch_all(self, items: Iterable[Item]) -> None:
        """`touch` in this order."""
        for item in items:
            self.touch(item)

    def refresh_all(self, items: Iterable[Item]) -> None:
        """`refresh` in this order."""
        for item in items:
            self.refresh(item)


class Lru(Eviction[Item]):
    """Least recently used first. Nothing is parked: the oldest item nearly always may go."""

    def __init__(self):
        super().__init__()
        self._items: collections.OrderedDict[Item, None] = collections.OrderedDict()

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """A new item, the most recent one."""
        self._items[item] = None

    def add_all(self, items, describe):
        """The same for many; the last one becomes the most recent."""
        self._items.update(dict.fromkeys(items))

    def touch(self, item):
        """Makes the item the most recent one."""
        self._items.move_to_end(item)

    def refresh(self, item):
        """The same."""
        self._items.move_to_end(item)

    def touch_all(self, items):
        """The same for many; the last one becomes the most recent."""
        move = self._items.move_to_end
        for item in items:
            move(item)

    refresh_all = touch_all

    def remove(self, item, evicted=False):
        """Forgets the item."""
        del self._items[item]

    def victim(self, may_go):
        """The oldest that may go."""
        return next(filter(may_go, self._items), None)

    def order(self) -> Iterator[Item]:
        """Oldest first."""
        return iter(self._items)


class _Ranked(Eviction[Item]):
    """A heap of (rank, time of the last use, item); entries that were replaced are skipped."""

    def __init__(self):
        super().__init__()
        self._heap: list[tuple] = []
        self._entry: dict[Item, tuple] = {}
        self._clock = itertools.count()

    def _put(self, item: Item, rank: float) -> None:
        self.parked.pop(item, None)
        self._entry[item] = entry = (rank, next(self._clock), item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + 64:
            waiting = (x for x in self._entry.values() if x[2] not in self.parked)
            self._heap = list(waiting)
            heapq.heapify(self._heap)

    def remove(self, item, evicted=False):
        """Forgets the item."""
        del self._entry[item]
        self.parked.pop(item, None)

    def victim(self, may_go):
        """The lowest rank, then the least recently used."""
        heap, current = self._heap, self._entry
        while heap:
            entry = heap[0]
            item = entry[2]
            if current.get(item) is entry:
                if may_go(item):
                    return item
                self.parked[item] = entry
            heapq.heappop(heap)
        return None

    def offer(self, item):
        """Back to its rank."""
        entry = self.parked.pop(item, None)
        if entry is not None:
            heapq.heappush(self._heap, entry)


class Fifo(_Ranked[Item]):
    """Oldest first, used or not."""

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """The newest."""
        self._put(item, 0)


class Lfu(_Ranked[Item]):
    """Fewest uses first, counted while the item is held; the least recent of equals."""

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """A new item with one use."""
        self._put(item, 1)

    def touch(self, item):
        """One more use."""
        self._put(item, self._entry[item][0] + 1)


class Gdsf(_Ranked[Item]):
    """GreedyDual-Size-Frequency: lowest `age + uses * cost / nbytes` first.

    The age is the value of the last victim, so what is not used falls behind what comes.
    """

    def __init__(self):
        super().__init__()
        self._age = 0.0
        self._worth: dict[Item, tuple[int, float]] = {}  # uses, cost / nbytes

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """A new item with one use."""
        self._worth[item] = 1, cost / max(nbytes, 1)
        self._put(item, self._age + self._worth[item][1])

    def touch(self, item):
        """One more use, valued at the present age."""
        uses, each = self._worth[item]
        self._worth[item] = uses + 1, each
        self._put(item, self._age + (uses + 1) * each)

    def remove(self, item, evicted=False):
        """Forgets the item; a victim's value becomes the age."""
        if evicted:
            self._age = max(self._age, self._entry[item][0])
        del self._worth[item]
        super().remove(item)


class FlopAware(Eviction[Item]):
    """Marconi's score: lowest `recency + alpha * efficiency` first, both scaled to 0 .. 1.

    Recency is the time of the last use between that of the oldest item that may go (0) and now
    (1), counted in uses. Efficiency is cost / nbytes over the largest one held, in half octaves:
    items of one class are ordered by recency alone, so only the oldest of each is compared.
    """

    def __init__(self, alpha: float = 1.0):
        super().__init__()
        if alpha < 0:
            raise ValueError(f"alpha must not be negative, got {alpha}")
        self.alpha = alpha
        self._classes: dict[int, _Oldest[Item]] = {}
        self._class: dict[Item, _Oldest[Item]] = {}
        self._clock = itertools.count(1)
        self._now = 0

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """A new item, just used."""
        octave = round(2 * math.log2(max(cost, 1e-300) / max(nbytes, 1)))
        home = self._classes.get(octave)
        if home is None:
            home = self._classes[octave] = _Oldest(octave, self._clock, self.parked)
        self._class[item] = home
        self.touch(item)

    def touch(self, item):
        """Used now."""
        self._now = self._class[item].put(item)

    def remove(self, item, evicted=False):
        """Forgets the item, and its class with the last one."""
        home = self._class.pop(item)
        home.remove(item)
        if not len(home):
            del self._classes[home.octave]

    def victim(self, may_go):
        """The lowest score."""
        oldest = []
        for home in self._classes.values():
            item = home.victim(may_go)
            if item is not None:
                oldest.append((home.last_use(item), home.octave, item))
        if not oldest:
            return None
        first = min(x[0] for x in oldest)
        span = max(self._now - first, 1)
        best = max(self._classes)

        def score(entry: tuple) -> float:
            return (entry[0] - first) / span + self.alpha * 2.0 ** ((entry[1] - best) / 2)

        return min(oldest, key=lambda x: (score(x), x[0]))[2]

    def offer(self, item):
        """Back to its place."""
        if item in self.parked:
            self._class[item].offer(item)


class _Oldest(_Ranked[Item]):
    """One class of `FlopAware`: by last use alone, on a clock that all classes share."""

    def __init__(self, octave: int, clock: Iterator[int], parked: dict):
        super().__init__()
        self.octave, self._clock, self.parked = octave, clock, parked

    def __len__(self) -> int:
        return len(self._entry)

    def put(self, item: Item) -> int:
        """Used now; returns the time."""
        self._put(item, 0)
        return self._entry[item][1]

    def last_use(self, item: Item) -> int:
        """The time of the last use."""
        return self._entry[item][1]
