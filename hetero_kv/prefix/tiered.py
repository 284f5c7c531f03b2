"""The catalog of a store that may have a disk below host memory."""

import time
from collections.abc import Callable, Iterable

from hetero_kv.metrics import Counters
from hetero_kv.prefix.backing import Backing
from hetero_kv.prefix.catalog import Catalog
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.host import HostTier, Ticket
from hetero_kv.prefix.index import CHECKPOINT, KINDS, Group
from hetero_kv.prefix.keys import Digest
from hetero_kv.prefix.observe import Clock
from hetero_kv.prefix.payload import Payload
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.quotas import Quotas
from hetero_kv.prefix.report import Removed


class TieredCatalog(Catalog):
    """Groups are in host memory, and on disk as well where there is one and they fit there.

    What host memory has no room for is only on disk, until it is used. Lock order: the catalog's,
    then those of the tier, which never calls back.
    """

    def __init__(
        self,
        geometry: Geometry,
        tier: HostTier,
        policy: Policy,
        counters: Counters,
        disk: DiskTier | None = None,
        quotas: Quotas | None = None,
        clock: Clock = time.monotonic,
    ):
        super().__init__(geometry, tier, policy, counters, quotas, clock)
        if disk is not None:
            call_back = (self.leave_disk, self._payload)
            orders = (self._order, quotas is not None)
            self.disk = Backing(disk, geometry.block, policy, counters, *call_back, *orders)

    def clear(self) -> Removed:
        """Drops everything, pinned or not, on disk durably if the disk lets it."""
        with self._lock:
            removed = super().clear()
            if self.disk is None:
                return removed
            return removed.on_disk(self.disk.tier.clear())

    def close(self) -> None:
        """Gives host memory back and forgets everything. What is on disk stays there."""
        with self._lock:
            self.flights.close()
            disk, self.disk = self.disk, None
            if disk is not None:
                disk.release()
            for root in self.index.roots():
                for node in self.index.subtree(root):
                    self._remove_node(node)

    def places(self, group: Group) -> tuple[Ticket | None, Ticket | None]:
        """Where a group is in host memory and on disk."""
        if self.disk is None:
            return group.ticket, None
        with self._lock:
            return group.ticket, group.disk

    def promote(self, groups: list[tuple[Group, Payload]]) -> None:
        """Puts copies of what was read from disk into host memory, as far as there is room."""
        with self._lock:
            promoted = []
            for group, payload in groups:
                if group.node.group(group.kind) is not group or group.on_host:
                    continue
                nbytes = payload.nbytes
                account = group.node.account
                if account is not None and not self._within_quota(group.kind, account, nbytes):
                    continue
                if nbytes > self.tier.free and not self._make_room(group.kind, nbytes):
                    continue
                # What was read is still to be restored; nothing may alias it (DESIGN rule 15).
                group.slot, group.generation = self.tier.put(payload.copy())
                self.used[group.kind] += nbytes
                if account is not None:
                    account.host[group.kind] += nbytes
                group.queued = True
                self._eviction[group.kind].add(group, *self._description(group))
                self._counters.add("promoted_groups_total", kind=group.kind)
                self._counters.add("promoted_bytes_total", nbytes, kind=group.kind)
                promoted.append(group)
            for kind in KINDS:
                order = self._eviction[kind]
                order.refresh_all([x for x in reversed(promoted) if x.kind == kind])

    def leave_host(self, group: Group, ticket: Ticket) -> bool:
        """Takes a damaged object out of host memory; False if the group is not on disk."""
        with self._lock:
            if group.node.group(group.kind) is not group or not self.disk.holds(group):
                return False
            if group.ticket == ticket:
                self._leave_host(group)
            return True

    def leave_disk(self, group: Group, evicted: bool = False) -> None:
        """Takes a group off the disk, with what hangs on it there; drops what is nowhere then."""
        with self._lock:
            node = group.node
            if node.group(group.kind) is not group:
                return
            if evicted and not group.on_host:
                self._lives.ended(group.kind, [group])
            self.disk.detach(group, evicted)
            if group.kind == CHECKPOINT:
                self._off_disk(group)
                self._drop_bare(node)
                return
            nodes = self.index.subtree(node)
            for under in reversed(nodes):  # parents first
                if under.history is None:
                    continue  # it went with one above it
                if not under.history.on_host:
                    for gone in self.index.subtree(under):
                        self._remove_node(gone)
                    continue
                if under.checkpoint is not None:
                    self._off_disk(under.checkpoint)
                self._off_disk(under.history)
            for under in nodes:
                if under.history is not None:
                    self._drop_bare(under)

    def lose(self, tickets: Iterable[Ticket]) -> None:
        """The disk reports that these objects are not there any more."""
        with self._lock:
            for group in self.disk.of(tickets) if self.disk is not None else ():
                if group.disk is not None and not self.disk.holds(group):
                    self.leave_disk(group)

    def spill(self) -> int:
        """Puts on disk what had to be left out; returns how many groups still are."""
        with self._lock:
            return self.disk.retry() if self.disk is not None else 0

    def load(self, digest: Digest, nbytes: Callable[[str, int], int]) -> None:
        """Finds everything again that is on disk; see `Backing.rebuild`."""
        with self._lock:
            self.disk.rebuild(self.index, digest, nbytes, self._lives.clock())
            for node in list(self.index) if not self.geometry.history else ():
                if node.depth and node.history is not None:
                    self._drop_bare(node)
            self.enforce()

    # -- inside ------------------------------------------------------------------------------

    def _off_disk(self, group: Group) -> None:
        if group.on_host:
            self.disk.detach(group)
        else:
            self._remove(group)

    def _payload(self, group: Group) -> Payload:
        return self.tier.payload(group.ticket)
