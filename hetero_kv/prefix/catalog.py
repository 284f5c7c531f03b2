"""The catalog: which groups are stored, pinned and evicted. It never looks inside a payload.

The same code serves the engine (array payloads) and trace replay (sizes only).
"""

import itertools
import math
import threading
from collections.abc import Iterator

from hetero_kv.metrics import Counters
from hetero_kv.prefix.backing import Backing
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group, Index, Node
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import Payload
from hetero_kv.prefix.plan import DISK, HOST, Geometry, Plan, Planner, Presence
from hetero_kv.prefix.policy import Policy


class Catalog:
    """Index, tier and eviction under one lock."""

    def __init__(self, geometry: Geometry, tier: HostTier, policy: Policy, counters: Counters):
        self.geometry = geometry
        self.tier = tier
        self.policy = policy
        self.index = Index()
        self.used = dict.fromkeys(KINDS, 0)  # bytes in host memory
        self.leases = 0  # open ones
        self._eviction = {kind: policy.eviction() for kind in KINDS}
        share = math.ceil(policy.checkpoint_share * tier.capacity)
        self._share = {HISTORY: tier.capacity - share, CHECKPOINT: share}  # bytes
        self._counters = counters
        self._lock = threading.RLock()
        self.disk: Backing | None = None  # `TieredCatalog` may have one

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
                history = node.history
                if history is None:
                    break
                history.pins += 1
                path.append(node)
            if self.disk is not None and self.disk.missing:
                self.disk.retry([x.history for x in path])
            return path

    def add_history(self, keys: Keys, path: list[Node], *payloads: Payload) -> str:
        """Stores the blocks after `path` and appends their nodes, pinned.

        Returns "" or the reason why the rest of them could not be stored.
        """
        with self._lock:
            sizes = [x.nbytes for x in payloads]
            if sum(sizes) > self.tier.free:
                # In one go. What cannot be had is missed, block by block, below.
                self._make_room(HISTORY, sum(sizes), max(sizes))
            parent = path[-1] if path else self.index.root(keys)
            if parent is None:
                return "collision"
            if path and parent.history is None:
                return "gone"  # cleared while the payload was made
            stored: list[int] = []  # bytes
            reason = self._extend(keys, path, parent, payloads, stored)
            if stored:
                self._count_stored(HISTORY, len(stored), sum(stored))
            return reason

    def _extend(
        self,
        keys: Keys,
        path: list[Node],
        parent: Node,
        payloads: tuple[Payload, ...],
        stored: list[int],
    ) -> str:
        # The hot loop of publishing: `_store` is written out in it.
        extend, put, tier, disk = self.index.extend, self.tier.put, self.tier, self.disk
        depth = len(path)
        following = zip(keys.keys[depth:], keys.contents[depth:], payloads, strict=False)
        for key, content, payload in following:
            node = extend(parent, key, content)
            if node is None:
                self.index.prune(parent)
                return "collision"
            if node.history is None:
                nbytes = payload.nbytes
                ticket = None
                if nbytes <= tier.free or self._make_room(HISTORY, nbytes):
                    ticket = put(payload)
                if ticket is not None:
                    node.history = Group(HISTORY, node, ticket[0], ticket[1], nbytes, 1)
                    self.used[HISTORY] += nbytes
                    if disk is not None:
                        disk.put(node.history, payload)
                elif not self._only_on_disk(HISTORY, node, payload, 1):
                    self.index.prune(node)
                    return "no_room"
                stored.append(nbytes)
            else:
                node.history.pins += 1
            path.append(node)
            parent = node
        return ""

    def has_checkpoint(self, path: list[Node]) -> bool:
        """Whether a checkpoint is stored at the end of `path`; if so it is recent now."""
        with self._lock:
            found = path[-1].checkpoint
            if found is not None:
                if found.queued:
                    self._eviction[CHECKPOINT].refresh(found)
                if self.disk is not None:
                    self.disk.refresh([found])
            return found is not None

    def add_checkpoint(self, path: list[Node], payload: Payload) -> str:
        """Stores a checkpoint at the end of `path`. Returns "" or a reason."""
        with self._lock:
            node = path[-1]
            if node.history is None:
                return "gone"
            if node.checkpoint is not None:
                return ""  # another thread was faster
            nbytes, ticket = payload.nbytes, None
            if nbytes <= self.tier.free or self._make_room(CHECKPOINT, nbytes):
                ticket = self.tier.put(payload)
            if ticket is not None:
                node.checkpoint = Group(CHECKPOINT, node, *ticket, nbytes)
                self.used[CHECKPOINT] += nbytes
                self._queue(node.checkpoint)
                if self.disk is not None:
                    self.disk.put(node.checkpoint, payload)
            elif not self._only_on_disk(CHECKPOINT, node, payload, 0):
                return "no_room"
            self._count_stored(CHECKPOINT, 1, payload.nbytes)
            return ""

    def let_go(self, path: list[Node]) -> None:
        """Ends `hold`. Publishing again is no use, so known groups are refreshed, not touched."""
        with self._lock:
            # Children first, so that a parent is never older than a child: the oldest group is
            # then a leaf.
            groups = [x.history for x in reversed(path) if x.history is not None]
            for group in groups:
                group.pins -= 1
                if not group.queued and group.on_host:
                    self._queue(group)
            order = self._eviction[HISTORY]
            if self.disk is None:
                order.refresh_all(groups)
            else:
                order.refresh_all([x for x in groups if x.queued])
                self.disk.refresh(groups)
            if order.parked or self.disk is not None:
                self._offer(groups)
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
                if group.on_host:
                    used[group.kind] += group.nbytes
                elif group.disk is None:
                    found.append(f"{group.kind} at depth {group.node.depth}: it is nowhere")
                if group.on_host and not self.tier.is_current(group.ticket):
                    found.append(f"{group.kind} at depth {group.node.depth}: stale ticket")
                if group.pins < 0:
                    found.append(f"{group.kind} at depth {group.node.depth}: {group.pins=}")
            if used != self.used or sum(used.values()) != owned:
                found.append(f"counted {used}, booked {self.used}, tier owns {owned}")
            if self.disk is not None:
                found += self.disk.problems(self.groups())
            return found

    # -- inside ------------------------------------------------------------------------------

    def _presence(self, nodes: list[Node]) -> Presence:
        size = self.geometry.block
        history = tuple([x.history is not None for x in nodes])
        checkpoints = frozenset([x.depth * size for x in nodes if x.checkpoint])
        if self.disk is None:
            return Presence(history, checkpoints)
        blocks = (i for i, x in enumerate(nodes) if x.history and not x.history.on_host)
        states = (x.depth * size for x in nodes if x.checkpoint and not x.checkpoint.on_host)
        return Presence(history, checkpoints, frozenset(blocks), frozenset(states))

    def _plan(
        self, keys: Keys, prompt_length: int, planner: Planner
    ) -> tuple[Plan, list[Group], Group | None]:
        nodes = self.index.match(keys)
        plan = planner(self.geometry, prompt_length, self._presence(nodes))
        blocks = plan.resumable_length // self.geometry.block
        history = [x.history for x in nodes[:blocks]]
        stored = any(plan.routes[x] in (HOST, DISK) for x in self.geometry.checkpoint)
        return plan, history, nodes[blocks - 1].checkpoint if stored else None

    def _close(self, lease: Lease) -> None:
        with self._lock:
            self._unpin(lease)
            self.leases -= 1

    def _pin(self, lease: Lease) -> None:
        for group in lease.history:
            group.pins += 1
        self._eviction[HISTORY].touch_all([x for x in reversed(lease.history) if x.queued])
        if lease.checkpoint is not None:
            lease.checkpoint.pins += 1
            if lease.checkpoint.queued:
                self._eviction[CHECKPOINT].touch(lease.checkpoint)
        if self.disk is not None:
            self.disk.touch(reversed(lease.groups()))

    def _unpin(self, lease: Lease) -> None:
        groups = lease.groups()
        for group in groups:
            group.pins -= 1
        if self.disk is not None or any(x.parked for x in self._eviction.values()):
            self._offer(groups)

    def _offer(self, groups: list[Group]) -> None:
        for group in groups:
            if not group.pins and group.queued:
                self._eviction[group.kind].offer(group)
        if self.disk is not None:
            self.disk.offer(groups)

    def _queue(self, group: Group) -> None:
        """Tells the order of eviction. New history waits for `let_go`: until then it is pinned,
        and its leaf must come first."""
        node, cost = group.node, 1.0
        group.queued = True
        if self.policy.cost is not None:
            start = node.depth - 1 if group.kind == HISTORY else 0
            size = self.geometry.block
            cost = self.policy.cost(start * size, node.depth * size)
        self._eviction[group.kind].add(group, node.key, group.nbytes, node.depth, cost)

    def _count_stored(self, kind: str, groups: int, nbytes: int) -> None:
        self._counters.add("stored_groups_total", groups, kind=kind)
        self._counters.add("stored_bytes_total", nbytes, kind=kind)

    def _make_room(self, kind: str, nbytes: int, each: int = 0) -> bool:
        """Evicts until `nbytes` are free; a kind gives way only for what it has over its share.

        each: bytes of one group, where room is made for several (0: for one).
        """
        evicted: list[tuple[Group, str]] = []
        try:
            return nbytes <= self.tier.capacity and self._evict_for(
                kind, nbytes, each or nbytes, evicted
            )
        finally:
            for gone, how in itertools.product(KINDS, ("evicted", "demoted")):
                sizes = [x.nbytes for x, y in evicted if x.kind == gone and y == how]
                if sizes:
                    self._counters.add(f"{how}_groups_total", len(sizes), kind=gone)
                    self._counters.add(f"{how}_bytes_total", sum(sizes), kind=gone)

    def _evict_for(
        self, kind: str, nbytes: int, each: int, evicted: list[tuple[Group, str]]
    ) -> bool:
        other = CHECKPOINT if kind == HISTORY else HISTORY
        while self.tier.free < nbytes:
            # The next group beside those that the room made so far is for.
            after = self.used[kind] + (self.tier.free // each + 1) * each
            within = after <= self._share[kind]
            victim = None
            if not within:
                victim = self._victim(kind)
            if victim is None and self.used[other] > self._share[other]:
                victim = self._victim(other)
            if victim is None and within:
                victim = self._victim(kind)
            if victim is None:
                return False
            evicted.append((victim, self._evict(victim)))
        return True

    def _victim(self, kind: str) -> Group | None:
        return self._eviction[kind].victim(self._evictable)

    def _evictable(self, group: Group) -> bool:
        if group.pins or not group.nbytes:
            return False
        # Whoever pins a checkpoint pins the history under it as well.
        if group.kind == CHECKPOINT or group.node.child is None:
            return True
        return self.disk is not None and self.disk.holds(group)

    def _evict(self, group: Group) -> str:
        """Makes its bytes in host memory free; says whether it is still on disk."""
        node = group.node
        if self.disk is not None and self.disk.holds(group):
            self._leave_host(group)
            return "demoted"
        if group.kind == CHECKPOINT:
            self._remove(group, evicted=True)
            self._drop_bare(node)
        else:
            self._remove_node(node, evicted=True)
        return "evicted"

    def _remove(self, group: Group, evicted: bool = False) -> None:
        kind, node = group.kind, group.node
        if kind == HISTORY:
            node.history = None
        else:
            node.checkpoint = None
        if group.on_host:
            self.used[kind] -= group.nbytes
            if group.queued:
                self._eviction[kind].remove(group, evicted)
            self.tier.drop(group.ticket)
        if self.disk is not None:
            self.disk.detach(group)

    def _leave_host(self, group: Group) -> None:
        self.used[group.kind] -= group.nbytes
        if group.queued:
            self._eviction[group.kind].remove(group, True)
            group.queued = False
        self.tier.drop(group.ticket)
        group.slot = -1

    def _only_on_disk(self, kind: str, node: Node, payload: Payload, pins: int) -> bool:
        """Stores a group that host memory has no room for; False: the disk has none either."""
        group = Group(kind, node, -1, 0, payload.nbytes, pins)
        if self.disk is None or not self.disk.put(group, payload):
            if self.disk is not None:
                self.disk.missing.pop(group, None)
            self._counters.add("refused_total", kind=kind, reason="no_room")
            return False
        if kind == HISTORY:
            node.history = group
        else:
            node.checkpoint = group
        return True

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


def _upward(node: Node) -> Iterator[Node]:
    current: Node | None = node
    while current is not None and current.depth:
        parent = current.parent
        yield current
        current = parent
