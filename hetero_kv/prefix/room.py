"""Room in host memory: the groups that are there, which of them go first, and the ledger.

The catalog is built on this. Everything here runs under the catalog's lock.
"""

import collections
import threading
import time
from collections.abc import Iterator

from hetero_kv.metrics import Counters
from hetero_kv.prefix.backing import Backing
from hetero_kv.prefix.eviction import Eviction
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group, Index, Node
from hetero_kv.prefix.observe import Clock, Lives
from hetero_kv.prefix.payload import Payload
from hetero_kv.prefix.plan import HOST, Geometry
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.quotas import Account, Accounts, ByTenant, Quotas, next_victim, shares

QUOTA, NO_ROOM = "quota", "no_room"  # why a group is refused
QUOTA_GROUPS = "quota_groups"  # no tier may take it
Evicted = list[Group]  # those that still are on disk were demoted


class Room:
    """Index, tier and orders of eviction.

    quotas: of tenants; none by default, which costs nothing.
    clock: seconds, for how long groups live.
    """

    def __init__(
        self,
        geometry: Geometry,
        tier: HostTier,
        policy: Policy,
        counters: Counters,
        quotas: Quotas | None = None,
        clock: Clock = time.monotonic,
    ):
        self.geometry = geometry
        self.tier = tier
        self.policy = policy
        self.accounts = None if quotas is None else Accounts(quotas)
        self.index = Index(self.accounts)
        self.used = dict.fromkeys(KINDS, 0)  # bytes in host memory
        self.leases = 0  # open ones
        self.epochs: frozenset[bytes] | None = None  # whose groups may be stored; None: anyone's
        self._leases_of: collections.Counter[bytes] = collections.Counter()  # by epoch
        self._eviction = {kind: self._order() for kind in KINDS}
        self._share = shares(policy.checkpoint_share, tier.capacity)  # bytes
        self._counters = counters
        self._lives = Lives(counters, clock)
        self._moved = {
            (kind, how): (
                counters.bind(f"{how}_groups_total", kind=kind),
                counters.bind(f"{how}_bytes_total", kind=kind),
            )
            for kind in KINDS
            for how in ("stored", "evicted", "demoted")
        }
        self._lock = threading.RLock()
        self.disk: Backing | None = None  # `TieredCatalog` may have one

    def _order(self) -> Eviction:
        make = self.policy.eviction
        return make() if self.accounts is None else ByTenant(make)

    def _offer(self, groups: list[Group]) -> None:
        for group in groups:
            if not group.pins and group.queued:
                self._eviction[group.kind].offer(group)
        if self.disk is not None:
            self.disk.offer(groups)

    def _description(self, group: Group) -> tuple[bytes, int, int, float]:
        """What the order of eviction is told of a group. New history is told of by `let_go`: until
        then it is pinned, and its leaf must come first."""
        node, cost = group.node, 1.0
        if self.policy.cost is not None:
            start = node.depth - 1 if group.kind == HISTORY else 0
            size = self.geometry.block
            cost = self.policy.cost(start * size, node.depth * size)
        return node.key, group.nbytes, node.depth, cost

    def _count_stored(self, kind: str, groups: int, nbytes: int) -> None:
        count, size = self._moved[kind, "stored"]
        with self._counters.lock:
            count.value += groups
            size.value += nbytes

    def _make_room(self, kind: str, nbytes: int, each: int = 0) -> bool:
        """Evicts until `nbytes` are free; a kind gives way only for what it has over its share.

        each: bytes of one group, where room is made for several (0: for one).
        """
        evicted: Evicted = []
        try:
            return nbytes <= self.tier.capacity and self._evict_for(
                kind, nbytes, each or nbytes, evicted
            )
        finally:
            if evicted:
                self._count_evicted(evicted)

    def _evict_for(self, kind: str, nbytes: int, each: int, evicted: Evicted) -> bool:
        while self.tier.free < nbytes:
            # The next group beside those that the room made so far is for.
            after = self.used[kind] + (self.tier.free // each + 1) * each
            victim = next_victim(kind, after, self.used, self._share, self._victim)
            if victim is None:
                return False
            self._evict(victim, evicted)
        return True

    def _count_evicted(self, evicted: Evicted) -> None:
        for kind in KINDS:
            some = [x for x in evicted if x.kind == kind]
            gone = some if self.disk is None else [x for x in some if x.disk is None]
            left = [] if self.disk is None else [x for x in some if x.disk is not None]
            for how, groups in (("evicted", gone), ("demoted", left)):
                if groups:
                    count, size = self._moved[kind, how]
                    count.add(len(groups))
                    size.add(sum([x.nbytes for x in groups]))
            if gone:
                self._lives.ended(kind, gone)

    def _victim(self, kind: str) -> Group | None:
        return self._eviction[kind].victim(self._evictable)

    def _evictable(self, group: Group) -> bool:
        if group.pins or not group.nbytes:
            return False
        # Whoever pins a checkpoint pins the history under it as well.
        if group.kind == CHECKPOINT or group.node.child is None:
            return True
        return self.disk is not None and self.disk.holds(group)

    def _evict(self, group: Group, evicted: Evicted) -> None:
        """Makes its bytes in host memory free; it may still be on disk."""
        if self.disk is not None and self.disk.holds(group):
            self._leave_host(group)
            evicted.append(group)
        else:
            self._evict_wholly(group, evicted)

    # -- quotas ------------------------------------------------------------------------------

    def _charge(self, group: Group, sign: int) -> None:
        """A group is stored (1) or gone (-1), in host memory if it is there."""
        account = group.node.account
        if account is not None:
            account.groups[group.kind] += sign
            if group.on_host:
                account.host[group.kind] += sign * group.nbytes

    def _quota_short(self, kind: str, account: Account, nbytes: int) -> str:
        """Makes room within a tenant's quota for a new group. "" or what it is short of."""
        if not self._below_cap(kind, account, 1):
            return QUOTA_GROUPS
        return "" if self._within_quota(kind, account, nbytes) else QUOTA

    def _below_cap(self, kind: str, account: Account, more: int = 0) -> bool:
        """Evicts a tenant's own until it may have `more` groups of a kind; False: it cannot."""
        evicted: Evicted = []
        limit = account.quota.groups(kind)
        while limit is not None and account.groups[kind] + more > limit:
            victim = self._own_leaf(kind, account) if more <= limit else None
            if victim is None:
                break
            self._evict_wholly(victim, evicted)
        self._count_own(evicted)
        return limit is None or account.groups[kind] + more <= limit

    def _within_quota(self, kind: str, account: Account, nbytes: int) -> bool:
        """Evicts a tenant's own until `nbytes` more may be in host memory; False: they cannot."""
        evicted: Evicted = []
        limit = account.quota.host_bytes
        if limit is None:
            return True
        share = shares(self.policy.checkpoint_share, limit)

        def victim_of(kind: str) -> Group | None:
            return self._eviction[kind].victim_of(account, self._evictable)

        while sum(account.host.values()) + nbytes > limit >= nbytes:
            after = account.host[kind] + nbytes
            victim = next_victim(kind, after, account.host, share, victim_of)
            if victim is None:
                break
            self._evict(victim, evicted)
        self._count_own(evicted)
        return sum(account.host.values()) + nbytes <= limit

    def _count_own(self, evicted: Evicted) -> None:
        if evicted:
            self._counters.add("quota_evicted_groups_total", len(evicted), tier=HOST)
            self._count_evicted(evicted)

    def _own_leaf(self, kind: str, account: Account) -> Group | None:
        """A tenant's group that nothing hangs on, wherever it is."""
        orders = [self._eviction[kind]]
        if self.disk is not None:
            orders.insert(0, self.disk.order(kind))  # knows those in host memory too, or most
        found = (x.victim_of(account, _is_free_leaf) for x in orders)
        return next((x for x in found if x is not None), None)

    def _evict_wholly(self, group: Group, evicted: Evicted) -> None:
        """From every tier, with the checkpoint on it."""
        node = group.node
        evicted.append(group)
        if group.kind == CHECKPOINT:
            self._remove(group, evicted=True)
            self._drop_bare(node)
            return
        if node.checkpoint is not None:
            evicted.append(node.checkpoint)
        self._remove_node(node, evicted=True)

    def enforce(self) -> None:
        """Keeps to quotas that are smaller than what was found at the start."""
        with self._lock:
            for account in self.accounts.all() if self.accounts is not None else ():
                for kind in KINDS:
                    self._below_cap(kind, account)
                if self.disk is not None:
                    self.disk.enforce(account)

    # -- removal -----------------------------------------------------------------------------

    def _remove(self, group: Group, evicted: bool = False) -> None:
        kind, node = group.kind, group.node
        if kind == HISTORY:
            node.history = None
        else:
            node.checkpoint = None
        if self.accounts is not None:
            self._charge(group, -1)
        if group.on_host:
            self.used[kind] -= group.nbytes
            if group.queued:
                self._eviction[kind].remove(group, evicted)
            self._drop_payload(group)
        if self.disk is not None:
            self.disk.detach(group)

    def _leave_host(self, group: Group) -> None:
        self.used[group.kind] -= group.nbytes
        if self.accounts is not None:
            group.node.account.host[group.kind] -= group.nbytes
        if group.queued:
            self._eviction[group.kind].remove(group, True)
            group.queued = False
        self._drop_payload(group)
        group.slot = -1

    def _drop_payload(self, group: Group) -> None:
        """Gives its bytes back. A stale ticket's slot is another's, or nobody's: it is counted."""
        if self.tier.is_current(group.ticket):
            self.tier.drop(group.ticket)
        else:
            self._counters.add("stale_tickets_total", kind=group.kind)

    def _only_on_disk(self, kind: str, node: Node, payload: Payload, pins: int, short: str) -> str:
        """Stores a group that host memory has no room for, for the reason `short`.

        Returns "" or why the disk has none either.
        """
        now = self._lives.clock()
        group = Group(kind, node, -1, 0, payload.nbytes, pins, born=now, used=now)
        stored = self.disk is not None and short != QUOTA_GROUPS and self.disk.put(group, payload)
        if not stored:
            if self.disk is not None:
                self.disk.missing.pop(group, None)
            reason = NO_ROOM if short == NO_ROOM else QUOTA
            self._counters.add("refused_total", kind=kind, reason=reason)
            return reason
        if kind == HISTORY:
            node.history = group
        else:
            node.checkpoint = group
        self._charge(group, 1)
        return ""

    def _remove_node(self, node: Node, evicted: bool = False) -> None:
        if node.checkpoint is not None:
            self._remove(node.checkpoint)
        if node.history is not None:
            self._remove(node.history, evicted)
        self.index.prune(node)
        parent = node.parent
        if parent is not None and parent.child is None and parent.history is not None:
            self._offer([parent.history])  # a leaf now

    def _drop_bare(self, node: Node) -> None:
        """Where no component has a history, blocks exist only for the checkpoints on them."""
        for current in _upward(node) if not self.geometry.history else ():
            kept = current.checkpoint or not current.is_leaf or not current.history
            if kept or current.history.pins:
                return
            self._remove_node(current)


def _is_free_leaf(group: Group) -> bool:
    return not group.pins and (group.kind == CHECKPOINT or group.node.child is None)


def _upward(node: Node) -> Iterator[Node]:
    current: Node | None = node
    while current is not None and current.depth:
        parent = current.parent
        yield current
        current = parent
