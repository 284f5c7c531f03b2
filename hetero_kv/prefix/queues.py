"""Orders of eviction made of queues: S3-FIFO, SIEVE and W-TinyLFU. See `eviction.Eviction`."""

import collections
from collections.abc import Hashable

from hetero_kv.prefix.eviction import Eviction, Item

Queue = collections.OrderedDict  # of items, the next victim first


class S3Fifo(Eviction[Item]):
    """S3-FIFO: a small queue that most items do not survive, a main queue, and a ghost of keys.

    small: share of the bytes held beyond which the small queue gives victims.
    promote: uses in the small queue that lead to the main one.
    The ghost remembers as many keys evicted from the small queue as there are items; what comes
    back under one of them goes to the main queue at once. So does what must stay when its turn
    comes.
    """

    def __init__(self, small: float = 0.1, promote: int = 2):
        super().__init__()
        self._share, self._promote = small, promote
        self._small: Queue = Queue()
        self._main: Queue = Queue()
        self._ghost: Queue = Queue()
        self._uses: dict[Item, int] = {}
        self._facts: dict[Item, tuple[Hashable, int]] = {}  # key, nbytes
        self._bytes = self._small_bytes = 0

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """A new item at the end of the small queue, or of the main one if its key is known."""
        key = item if key is None else key
        self._facts[item] = key, nbytes
        self._uses[item] = 0
        self._bytes += nbytes
        if key in self._ghost:
            del self._ghost[key]
            self._main[item] = None
        else:
            self._small[item] = None
            self._small_bytes += nbytes

    def touch(self, item):
        """One more use, of three at most."""
        self._uses[item] = min(self._uses[item] + 1, 3)

    def remove(self, item, evicted=False):
        """Forgets the item, but not its key if it leaves the small queue as a victim."""
        key, nbytes = self._facts.pop(item)
        del self._uses[item]
        self._bytes -= nbytes
        if item in self._small:
            del self._small[item]
            self._small_bytes -= nbytes
            if evicted:
                self._ghost[key] = None
        else:
            self._main.pop(item, None)
            self.parked.pop(item, None)
        while len(self._ghost) > max(len(self._facts), 1):
            self._ghost.popitem(last=False)

    def victim(self, may_go):
        """The first that is not used, of the queue whose turn it is."""
        small, main, uses = self._small, self._main, self._uses
        while True:
            if small and (self._small_bytes > self._share * self._bytes or not main):
                item = next(iter(small))
                used = uses[item] >= self._promote
                if not used and may_go(item):
                    return item
                del small[item]
                self._small_bytes -= self._facts[item][1]
                if used:
                    main[item], uses[item] = None, 0
                else:
                    self.parked[item] = None
            elif main:
                item = next(iter(main))
                if uses[item]:
                    uses[item] -= 1
                    main.move_to_end(item)
                elif may_go(item):
                    return item
                else:
                    del main[item]
                    self.parked[item] = None
            else:
                return None

    def offer(self, item):
        """Next in the main queue: its turn had come."""
        if self.parked.pop(item, self) is not self:
            self._main[item] = None
            self._main.move_to_end(item, last=False)


class Sieve(Eviction[Item]):
    """SIEVE: a hand goes from the oldest to the newest, spares what was used since it last came by.

    Nodes of the ring are [older, newer, item, used].
    """

    def __init__(self):
        super().__init__()
        self._nodes: dict[Item, list] = {}
        self._end: list = [None, None, None, False]  # between the newest and the oldest
        self._end[0] = self._end[1] = self._hand = self._end

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """The newest, not used yet."""
        self._nodes[item] = node = [None, None, item, False]
        self._link(node, self._end)

    def touch(self, item):
        """Used since the hand came by."""
        self._nodes[item][3] = True

    def remove(self, item, evicted=False):
        """Forgets the item."""
        node = self._nodes.pop(item)
        if self.parked.pop(item, self) is self:
            self._unlink(node)

    def victim(self, may_go):
        """The first not used from the hand on."""
        while True:
            node = self._hand
            if node is self._end:
                node = self._hand = node[1]
                if node is self._end:
                    return None
            if node[3]:
                node[3] = False
                self._hand = node[1]
            elif may_go(node[2]):
                return node[2]
            else:
                self._unlink(node)
                self.parked[node[2]] = None

    def offer(self, item):
        """Under the hand: its turn had come."""
        if self.parked.pop(item, self) is not self:
            node = self._nodes[item]
            self._link(node, self._hand)
            self._hand = node

    def _link(self, node: list, newer: list) -> None:
        node[0], node[1] = newer[0], newer
        node[0][1] = newer[0] = node

    def _unlink(self, node: list) -> None:
        if self._hand is node:
            self._hand = node[1]
        node[0][1], node[1][0] = node[1], node[0]


class WTinyLfu(Eviction[Item]):
    """W-TinyLFU: a small LRU window, then only what is used more often than what it displaces.

    window: share of the bytes held. protected: share of the rest for items used there again.
    Uses are counted exactly per key, also of keys that are gone, and halved after every ten uses
    per item held. An item that leaves the window goes straight to the main part as long as nothing
    had to be evicted for it; otherwise the next victim is it or the oldest one there.
    """

    def __init__(self, window: float = 0.01, protected: float = 0.8):
        super().__init__()
        self._window_share, self._protected_share = window, protected
        self._window: Queue = Queue()
        self._arrivals: Queue = Queue()  # left the window, to be judged
        self._probation: Queue = Queue()
        self._protected: Queue = Queue()
        self._facts: dict[Item, tuple[Hashable, int]] = {}  # key, nbytes
        self._bytes = self._window_bytes = self._protected_bytes = 0
        self._counts: dict[Hashable, int] = {}
        self._counted = 0
        self._owed = 0  # victims that no new item has replaced yet

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """The newest in the window."""
        key = item if key is None else key
        self._facts[item] = key, nbytes
        self._count(key)
        self._bytes += nbytes
        self._window[item] = None
        self._window_bytes += nbytes
        while len(self._window) > 1 and self._window_bytes > self._window_share * self._bytes:
            leaving, _ = self._window.popitem(last=False)
            self._window_bytes -= self._facts[leaving][1]
            (self._arrivals if self._owed else self._probation)[leaving] = None
        self._owed = max(self._owed - 1, 0)

    def touch(self, item):
        """Counts the use and moves the item to the end of its queue, or up."""
        key, nbytes = self._facts[item]
        self._count(key)
        for queue in (self._window, self._protected):
            if item in queue:
                queue.move_to_end(item)
                return
        for waiting in (self._arrivals, self._probation, self.parked):
            if item in waiting:
                del waiting[item]
        self._protected[item] = None
        self._protected_bytes += nbytes
        limit = self._protected_share * (self._bytes - self._window_bytes)
        while len(self._protected) > 1 and self._protected_bytes > limit:
            down, _ = self._protected.popitem(last=False)
            self._protected_bytes -= self._facts[down][1]
            self._probation[down] = None

    def remove(self, item, evicted=False):
        """Forgets the item, but not how often its key was used."""
        _, nbytes = self._facts.pop(item)
        self._bytes -= nbytes
        self._owed += evicted
        if item in self._window:
            del self._window[item]
            self._window_bytes -= nbytes
        elif item in self._protected:
            del self._protected[item]
            self._protected_bytes -= nbytes
        else:
            for waiting in (self._arrivals, self._probation, self.parked):
                waiting.pop(item, None)

    def victim(self, may_go):
        """The oldest arrival, or the item of the main part that it has to beat."""
        resident = self._first(self._probation, may_go)
        if resident is None:
            resident = self._first(self._protected, may_go)
        while self._arrivals:
            item = next(iter(self._arrivals))
            may = may_go(item)
            if may and (resident is None or self._uses(item) <= self._uses(resident)):
                return item
            del self._arrivals[item]
            self._probation[item] = None
            if may:
                return resident
        return resident if resident is not None else self._first(self._window, may_go)

    def offer(self, item):
        """First in probation: its turn had come."""
        if self.parked.pop(item, self) is not self:
            self._probation[item] = None
            self._probation.move_to_end(item, last=False)

    def _first(self, queue: Queue, may_go) -> Item | None:
        while queue:
            item = next(iter(queue))
            if may_go(item):
                return item
            del queue[item]
            nbytes = self._facts[item][1]
            if queue is self._window:
                self._window_bytes -= nbytes
            elif queue is self._protected:
                self._protected_bytes -= nbytes
            self.parked[item] = None
        return None

    def _uses(self, item: Item) -> int:
        return self._counts.get(self._facts[item][0], 0)

    def _count(self, key: Hashable) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._counted += 1
        if self._counted >= 10 * max(len(self._facts), 1):
            self._counts = {k: v >> 1 for k, v in self._counts.items() if v > 1}
            self._counted = sum(self._counts.values())
