"""Single flight: of many requests that need the same prefix, one computes it.

The first lease to begin at a block of a prefix opens a flight and is its leader. A later lease that
could resume what the leader is going to publish follows the flight: it may wait, poll, take what is
published so far, or go ahead and compute all the same. A flight ends with its lease, however that
goes: released, left by an error, or garbage.
"""

import bisect
import collections
import math
import threading
import time
from collections.abc import Callable, Sequence

from hetero_kv.metrics import Counters
from hetero_kv.prefix.index import Node
from hetero_kv.prefix.lease import Flight, Lease
from hetero_kv.prefix.plan import Geometry

PATIENCE = 3  # flights that brought nothing before a request follows no more
SETTLE_SECONDS = 0.2  # how often whoever waits looks for leases that are garbage


class Flights:
    """The open flights of a catalog. Methods are called under the catalog's lock.

    run: tokens that a replay of the policy runs; inf: it replays nothing.
    """

    def __init__(self, geometry: Geometry, run: float, lock: threading.RLock, counters: Counters):
        self.followed: set[Flight] = set()
        self._block = geometry.block
        self._granularity = geometry.granularity
        self._boundary = geometry.largest_boundary
        self._points_matter = bool(geometry.checkpoint)
        # Lengths above this one need history only; None: there are no such lengths.
        self._history_alone = 0
        if geometry.checkpoint:
            self._history_alone = None if math.isinf(run) else int(run)
        self._lock = lock
        self._counters = counters
        self._flights: dict[bytes, list[Flight]] = {}  # by the key of the first block
        self.abandoned: collections.deque[Lease] = collections.deque()
        self._closed = False

    def join(self, lease: Lease, follow: bool = True) -> None:
        """Follows a flight that is of use to the lease, or opens one, if it will publish anything.

        follow: False: whatever others do, the lease's request is about to compute.
        """
        keys = lease.keys.keys
        at = lease.plan.resumable_length // self._block
        if at >= len(keys) or self._closed:
            return
        if follow and self._flights and self._follow(lease, at):
            return
        goals = self._goals(lease)
        if goals:
            lease.flight = flight = Flight(lease.keys, at, goals)
            found = self._flights.get(keys[at])
            if found is None:
                self._flights[keys[at]] = [flight]
            else:
                found.append(flight)

    def leave(self, lease: Lease) -> None:
        """The lease leads and follows no more."""
        flight = lease.flight
        if flight is None:
            lease.following = None
            return
        lease.flight = None
        flight.open = False
        self._retire(flight)
        if flight in self.followed:
            self.followed.discard(flight)
            _notify(flight)

    def published(self, path: list[Node]) -> None:
        """Tells followers of what was published up to the last node of `path`."""
        for flight in self.followed:
            keys, start = flight.keys.keys, flight.start
            if len(path) > start and path[start].key == keys[start]:
                names = [x.key for x in path]
                flight.reached = max(flight.reached, _common(names, keys, start) * self._block)
                flight.progress += 1
                _notify(flight)

    def wait(self, lease: Lease, timeout: float, renew: Callable[[], None]) -> bool:
        """Waits until there is nothing to wait for any more; False: not within the timeout.

        renew: plans anew for the lease, and joins. With a timeout above 0 a request that was kept
        waiting for so long goes ahead, and those that come later follow it.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while (flight := lease.following) is not None:
                if not flight.open or flight.progress != lease.seen:
                    self._look_again(lease, flight, renew)
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    if timeout > 0:
                        self._counters.add("flight_timeouts_total")
                        self._retire(flight)
                        self._go_ahead(lease)
                    return False
                if flight.changed is None:
                    flight.changed = threading.Condition(self._lock)
                flight.changed.wait(min(left, SETTLE_SECONDS))
                self.settle()
            return True

    def abandon(self, lease: Lease) -> None:
        """Takes a lease that is garbage. May be called anywhere, so it only takes a note."""
        self.abandoned.append(lease)

    def settle(self) -> None:
        """Releases leases that became garbage."""
        while self.abandoned:
            self._counters.add("abandoned_leases_total")
            self.abandoned.popleft().release()

    def close(self) -> None:
        """Ends all flights; nobody waits any more."""
        self._closed = True
        flights = [x for found in self._flights.values() for x in found]
        for flight in {*flights, *self.followed}:
            flight.open = False
            _notify(flight)
        self._flights.clear()
        self.followed.clear()

    # -- inside --------------------------------------------------------------------------------

    def _goals(self, lease: Lease) -> Sequence[int]:
        points = lease.checkpoint_points if self._points_matter else ()
        if self._history_alone is None:
            return points
        step, known = self._granularity, max(lease.resumable_length, self._history_alone)
        most = min(lease.prompt_length, len(lease.keys.keys) * self._block)
        every = range(known // step * step + step, most + 1, step)
        return sorted({*points, *every}) if points else every

    def _follow(self, lease: Lease, at: int) -> bool:
        keys, length = lease.keys.keys, lease.resumable_length
        for key in keys[: at + 1]:
            for flight in self._flights.get(key, ()):
                most = _common(keys, flight.keys.keys, flight.start) * self._block
                most = min(most, self._boundary(lease.prompt_length))
                number = bisect.bisect_right(flight.goals, most)
                goal = flight.goals[number - 1] if number else 0
                if goal > length:
                    lease.following, lease.goal, lease.seen = flight, goal, flight.progress
                    self.followed.add(flight)
                    self._counters.add("flight_followers_total")
                    return True
        return False

    def _look_again(self, lease: Lease, flight: Flight, renew: Callable[[], None]) -> None:
        before, goal, ended = lease.resumable_length, lease.goal, not flight.open
        renew()
        if ended and lease.resumable_length <= before:
            # Its leader died, or what it published could not be kept or does not pay. Others may
            # have better luck, but not for ever.
            lease.fruitless += PATIENCE if flight.reached >= goal else 1
        if lease.fruitless >= PATIENCE and lease.following is not None:
            self._go_ahead(lease)

    def _go_ahead(self, lease: Lease) -> None:
        lease.following = None
        self.join(lease, follow=False)

    def _retire(self, flight: Flight) -> None:
        """Nobody follows the flight from now on."""
        key = flight.keys.keys[flight.start]
        found = self._flights.get(key, ())
        if flight in found:
            if len(found) == 1:
                del self._flights[key]
            else:
                found.remove(flight)


def _common(a: Sequence[bytes], b: Sequence[bytes], known: int) -> int:
    """Leading blocks that two chains of keys have in common, at least `known`."""
    differs = bisect.bisect_left(
        range(known, min(len(a), len(b))), True, key=lambda i: a[i] != b[i]
    )
    return known + differs


def _notify(flight: Flight) -> None:
    if flight.changed is not None:
        flight.changed.notify_all()
