"""The catalog: which groups are stored, pinned and evicted. It never looks inside a payload.

The same code serves the engine (array payloads) and trace replay (sizes only).
"""

import math
import threading
from collections.abc import Iterator

from hetero_kv.metrics import Counters
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group, Index, Node
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import Payload
from hetero_kv.prefix.plan import HOST, Geometry, Plan, Planner, Presence
from hetero_kv.prefix.policy import Policy


class Catalog:
    """Index, tier and eviction under one lock."""

    def __init__(self, geometry: Geometry, tier: HostTier, policy: Policy, counters: Counters):
        self.geometry = geometry
        self.tier = tier
        self.policy = policy
        self.index = Index()
        self.used = dict.fromkeys(KINDS, 0)  # bytes
        self.leases = 0  # open ones
        self._eviction = {kind: policy.eviction() for kind in KINDS}
        share = math.ceil(policy.checkpoint_share * tier.capacity)
        self._share = {HISTORY: tier.capacity - share, CHECKPOINT: share}  # bytes
        self._counters = counters
        self._lock = threading.RLock()

    # -- lookup ------------------------------------------------------------------------------

    def explain(self, keys: Keys, prompt_length: int, planner: Planner) -> Plan:
        """The plan as it would be made now; pins and touches nothing."""
        with self._lock:
            return planner(self.geometry, prompt_length, self._presence(self.index.match(keys)))

    def open(self, keys: Keys, prompt_length: int, planner: Planner) -> Lease:
        """Plans and pins what the plan promises."""
        with self._lock:
            plan, history, checkpoint = self._plan(keys, prompt_length, planner)
            points = self.policy.checkpoints.points(
                prompt_length, self.geometry, plan.candidate_length
            )
            lease = Lease(self._close, keys, prompt_length, plan, history, checkpoint, points)
            self._pin(lease)
            self.leases += 1
            return lease

    def reopen(self, lease: Lease, planner: Planner) -> None:
        """Plans anew for a lease whose promise could not be kept."""
        with self._lock:
            self._unpin(lease)
            plan, history, checkpoint = self._plan(lease.keys, lease.prompt_length, planner)
            lease.renew(plan, history, checkpoint)
            self._pin(lease)

    # -- publish -----------------------------------------------------------------------------

    def hold(self, keys: Keys, blocks: int) -> list[Node]:
        """Pins the history of the known leading blocks while more are added; see `let_go`."""
        with self._lock:
            path = []
            for node in self.index.match(keys)[:blocks]:
                if node.history is None:
                    break
                node.history.pins += 1
                path.append(node)
            return path

    def add_history(self, keys: Keys, path: list[Node], payload: Payload) -> str:
        """Stores the block after `path` and appends its node, pinned. Returns "" or a reason."""
        with self._lock:
            depth = len(path)
            parent = path[-1] if path else self.index.root(keys)
            if parent is None:
                return "collision"
            if path and parent.history is None:
                return "gone"  # cleared while the payload was made
            node = self.index.extend(parent, keys.keys[depth], keys.contents[depth])
            if node is None:
                self.index.prune(parent)
                return "collision"
            if node.history is None and not self._store(HISTORY, node, payload):
                self.index.prune(node)
                return "no_room"
            node.history.pins += 1
            path.append(node)
            return ""

    def has_checkpoint(self, path: list[Node]) -> bool:
        """Whether a checkpoint is stored at the end of `path`; counts as a use of it."""
        with self._lock:
            found = path[-1].checkpoint
            if found is not None:
                self._eviction[CHECKPOINT].touch(found)
            return found is not None

    def add_checkpoint(self, path: list[Node], payload: Payload) -> str:
        """Stores a checkpoint at the end of `path`. Returns "" or a reason."""
        with self._lock:
            node = path[-1]
            if node.history is None:
                return "gone"
            if node.checkpoint is not None:
                return ""  # another thread was faster
            return "" if self._store(CHECKPOINT, node, payload) else "no_room"

    def let_go(self, path: list[Node]) -> None:
        """Ends `hold`."""
        with self._lock:
            # Children first, so that a parent is never older than a child: the oldest group is
            # then a leaf.
            for node in reversed(path):
                if node.history is not None:
                    node.history.pins -= 1
                    self._eviction[HISTORY].touch(node.history)
            if path:
                self._drop_bare(path[-1])

    # -- removal -----------------------------------------------------------------------------

    def discard(self, group: Group) -> None:
        """Drops a group that must not be used any more, pinned or not, and what hangs on it."""
        with self._lock:
            if group.node.group(group.kind) is not group:
                return
            if group.kind == CHECKPOINT:
                self._remove(group)
                self._drop_bare(group.node)
                return
            for node in self.index.subtree(group.node):
                self._remove_node(node)

    def clear(self) -> None:
        """Drops everything, pinned or not."""
        with self._lock:
            for node in [x for x in self.index if x.depth == 1]:
                for under in self.index.subtree(node):
                    self._remove_node(under)

    # -- checks ------------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """All stored groups."""
        with self._lock:
            found = (node.group(kind) for node in self.index for kind in KINDS)
            return [x for x in found if x is not None]

    def problems(self) -> list[str]:
        """What breaks the ledger or the index's rules; empty if healthy (DESIGN rules 7, 8)."""
        with self._lock:
            found = self.index.problems()
            owned = self.tier.owned()
            if self.tier.free + owned != self.tier.capacity:
                found.append(f"{self.tier.free=} + {owned=} != {self.tier.capacity=}")
            used = dict.fromkeys(KINDS, 0)
            for group in self.groups():
                used[group.kind] += group.nbytes
                if not self.tier.is_current(group.ticket):
                    found.append(f"{group.kind} at depth {group.node.depth}: stale ticket")
                if group.pins < 0:
                    found.append(f"{group.kind} at depth {group.node.depth}: {group.pins=}")
            if used != self.used or sum(used.values()) != owned:
                found.append(f"counted {used}, booked {self.used}, tier owns {owned}")
            return found

    # -- inside ------------------------------------------------------------------------------

    def _presence(self, nodes: list[Node]) -> Presence:
        history = tuple(x.history is not None for x in nodes)
        size = self.geometry.block
        return Presence(history, frozenset(x.depth * size for x in nodes if x.checkpoint))

    def _plan(
        self, keys: Keys, prompt_length: int, planner: Planner
    ) -> tuple[Plan, list[Group], Group | None]:
        nodes = self.index.match(keys)
        plan = planner(self.geometry, prompt_length, self._presence(nodes))
        blocks = plan.resumable_length // self.geometry.block
        history = [x.history for x in nodes[:blocks]]
        stored = any(plan.routes[x] == HOST for x in self.geometry.checkpoint)
        return plan, history, nodes[blocks - 1].checkpoint if stored else None

    def _close(self, lease: Lease) -> None:
        with self._lock:
            self._unpin(lease)
            self.leases -= 1

    def _pin(self, lease: Lease) -> None:
        for group in reversed(lease.groups()):
            group.pins += 1
            self._eviction[group.kind].touch(group)

    def _unpin(self, lease: Lease) -> None:
        for group in lease.groups():
            group.pins -= 1

    def _store(self, kind: str, node: Node, payload: Payload) -> bool:
        if not self._make_room(kind, payload.nbytes):
            self._counters.add("refused_total", kind=kind, reason="no_room")
            return False
        ticket = self.tier.put(payload)
        if ticket is None:
            return False
        group = Group(kind, node, ticket, payload.nbytes)
        node.set_group(kind, group)
        self.used[kind] += group.nbytes
        self._eviction[kind].add(group)
        self._counters.add("stored_groups_total", kind=kind)
        self._counters.add("stored_bytes_total", group.nbytes, kind=kind)
        return True

    def _make_room(self, kind: str, nbytes: int) -> bool:
        """Evicts until `nbytes` are free; a kind gives way only for what it has over its share."""
        other = CHECKPOINT if kind == HISTORY else HISTORY
        if nbytes > self.tier.capacity:
            return False
        while self.tier.free < nbytes:
            within = self.used[kind] + nbytes <= self._share[kind]
            victim = None
            if not within:
                victim = self._victim(kind)
            if victim is None and self.used[other] > self._share[other]:
                victim = self._victim(other)
            if victim is None and within:
                victim = self._victim(kind)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, kind: str) -> Group | None:
        return next((x for x in self._eviction[kind].order() if self._evictable(x)), None)

    def _evictable(self, group: Group) -> bool:
        if group.pins or not group.nbytes:
            return False
        # Whoever pins a checkpoint pins the history under it as well.
        return group.kind == CHECKPOINT or group.node.is_leaf

    def _evict(self, group: Group) -> None:
        self._counters.add("evicted_groups_total", kind=group.kind)
        self._counters.add("evicted_bytes_total", group.nbytes, kind=group.kind)
        self.discard(group)

    def _remove(self, group: Group) -> None:
        group.node.set_group(group.kind, None)
        self.used[group.kind] -= group.nbytes
        self._eviction[group.kind].remove(group)
        self.tier.drop(group.ticket)

    def _remove_node(self, node: Node) -> None:
        for group in (node.checkpoint, node.history):
            if group is not None:
                self._remove(group)
        self.index.prune(node)

    def _drop_bare(self, node: Node) -> None:
        """Where no component has a history, blocks exist only for the checkpoints on them."""
        for current in _upward(node) if not self.geometry.history else ():
            kept = current.checkpoint or not current.is_leaf or not current.history
            if kept or current.history.pins:
                return
            self._remove_node(current)


def _upward(node: Node) -> Iterator[Node]:
    current: Node | None = node
    while current is not None and current.depth:
        parent = current.parent
        yield current
        current = parent
