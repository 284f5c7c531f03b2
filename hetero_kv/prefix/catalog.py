"""The catalog: which groups are stored, pinned and evicted. It never looks inside a payload.

The same code serves the engine (array payloads) and trace replay (sizes only).
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hetero_kv.prefix.flight import Flights
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group, Node
from hetero_kv.prefix.keys import Keys, Root, read_root
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import Payload
from hetero_kv.prefix.plan import DISK, HOST, Plan, Planner, Presence
from hetero_kv.prefix.quotas import Account
from hetero_kv.prefix.report import Removed
from hetero_kv.prefix.room import NO_ROOM, Room


class Examined(NamedTuple):
    """A plan, and what is stored of the prompt."""

    plan: Plan
    presence: Presence


class Catalog(Room):
    """Index, tier and eviction under one lock."""

    @functools.cached_property
    def flights(self) -> Flights:
        """What open leases are computing now."""
        run = self.policy.replay_tokens(self.geometry)
        return Flights(self.geometry, run, self._lock, self._counters)

    # -- lookup ------------------------------------------------------------------------------

    def explain(self, keys: Keys, prompt_length: int, planner: Planner) -> Plan:
        """The plan as it would be made now; pins and touches nothing."""
        return self.examine(keys, prompt_length, planner).plan

    def examine(self, keys: Keys, prompt_length: int, planner: Planner) -> Examined:
        """The same, with what it was made from."""
        with self._lock:
            nodes = self.index.match(keys)
            presence = self._presence(nodes)
            return Examined(planner(self.geometry, prompt_length, presence), presence)

    def account(self, tenant: str) -> Account | None:
        """What a tenant holds, and may hold; None where there are no quotas."""
        with self._lock:
            return None if self.accounts is None else self.accounts.of(tenant)

    def open(self, keys: Keys, prompt_length: int, planner: Planner) -> Lease:
        """Plans and pins what the plan promises."""
        with self._lock:
            if self.flights.abandoned:
                self.flights.settle()
            plan, history, checkpoint = self._plan(keys, prompt_length, planner)
            points = self.policy.checkpoints.points(
                prompt_length, self.geometry, plan.candidate_length
            )
            abandon = self.flights.abandon
            lease = Lease(
                self._close, abandon, keys, prompt_length, plan, history, checkpoint, points
            )
            self._pin(lease)
            self.leases += 1
            if self.epochs is not None:
                self._leases_of[lease.epoch] += 1
            # With the plan under one lock: what is published later finds the follower, and what
            # was published before, the plan.
            self.flights.join(lease)
            return lease

    def reopen(self, lease: Lease, planner: Planner, follow: bool = False) -> None:
        """Plans anew for a lease whose promise could not be kept, or that waited (`follow`)."""
        with self._lock:
            self.flights.leave(lease)
            self._unpin(lease)
            plan, history, checkpoint = self._plan(lease.keys, lease.prompt_length, planner)
            lease.renew(plan, history, checkpoint)
            self._pin(lease)
            self.flights.join(lease, follow)

    # -- publish -----------------------------------------------------------------------------

    def hold(self, keys: Keys, blocks: int) -> list[Node]:
        """Pins the history of the known leading blocks while more are added; see `let_go`."""
        with self._lock:
            path = self.index.match(keys)[:blocks]
            if path and path[-1].history is None:
                # There are no holes: what lacks its history stands at the end.
                path = [x for x in path if x.history is not None]
            for node in path:
                node.history.pins += 1
            if self.disk is not None and self.disk.missing:
                self.disk.retry([x.history for x in path])
            return path

    def add_history(self, keys: Keys, path: list[Node], *payloads: Payload) -> str:
        """Stores the blocks after `path` and appends their nodes, pinned.

        Returns "" or the reason why the rest of them could not be stored.
        """
        with self._lock:
            sizes = [x.nbytes for x in payloads]
            if sum(sizes) > self.tier.free and self.accounts is None:
                # In one go. What cannot be had is missed, block by block, below.
                self._make_room(HISTORY, sum(sizes), max(sizes))
            parent = path[-1] if path else self.index.root(keys)
            if parent is None:
                return "collision"
            if path and parent.history is None:
                return "gone"  # cleared while the payload was made
            if not path and not self._is_kept(parent):
                self.index.prune(parent)
                return "epoch"  # retired since the keys were made
            stored: list[int] = []  # bytes
            reason = self._extend(keys, path, parent, payloads, sizes, stored)
            if stored:
                self._count_stored(HISTORY, len(stored), sum(stored))
            return reason

    def _extend(
        self,
        keys: Keys,
        path: list[Node],
        parent: Node,
        payloads: tuple[Payload, ...],
        sizes: list[int],
        stored: list[int],
    ) -> str:
        # The hot loop of publishing.
        put, tier, disk = self.tier.place, self.tier, self.disk
        depth, limited, now = len(path), self.accounts is not None, self._lives.clock()
        stop = min(depth + len(payloads), len(keys.keys))
        nodes = self.index.extend_run(parent, keys.keys[depth:stop], keys.contents[depth:stop])
        try:
            # Where one block is new, all after it are.
            fresh = nodes and nodes[0].history is None and not limited and disk is None
            if fresh and len(nodes) < len(sizes):
                payloads, sizes = payloads[: len(nodes)], sizes[: len(nodes)]
            first = tier.place_run(payloads, total := sum(sizes)) if fresh else None
            if first is not None:
                for slot, node, nbytes in zip(itertools.count(first), nodes, sizes, strict=False):
                    node.history = Group(HISTORY, node, slot, 0, nbytes, 1, False, None, now, now)
                self.used[HISTORY] += total
                stored += sizes
                path += nodes
                return "" if len(path) == stop else "collision"
            for node, payload, nbytes in zip(nodes, payloads, sizes, strict=False):
                if node.history is not None:
                    node.history.pins += 1
                    path.append(node)
                    continue
                ticket, short = None, NO_ROOM
                if limited:
                    short = self._quota_short(HISTORY, node.account, nbytes)
                    if not short and (nbytes <= tier.free or self._make_room(HISTORY, nbytes)):
                        ticket = put(payload)
                elif nbytes <= tier.free or self._make_room(HISTORY, nbytes):
                    ticket = put(payload)
                if ticket is not None:
                    slot, generation = ticket
                    node.history = group = Group(
                        HISTORY, node, slot, generation, nbytes, 1, False, None, now, now
                    )
                    self.used[HISTORY] += nbytes
                    if limited:
                        self._charge(group, 1)
                    if disk is not None:
                        disk.put(group, payload)
                else:
                    short = self._only_on_disk(HISTORY, node, payload, 1, short or NO_ROOM)
                    if short:
                        return short
                stored.append(nbytes)
                path.append(node)
        finally:
            # No bare node may stay behind, whatever stopped the loop.
            self.index.prune(nodes[-1] if nodes else parent)
        return "" if len(nodes) == stop - depth else "collision"

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
            nbytes, placed, short = payload.nbytes, None, ""
            if self.accounts is not None:
                short = self._quota_short(CHECKPOINT, node.account, nbytes)
            if not short and (nbytes <= self.tier.free or self._make_room(CHECKPOINT, nbytes)):
                placed = self.tier.place(payload)
            if placed is not None:
                slot, generation = placed
                now = self._lives.clock()
                node.checkpoint = group = Group(
                    CHECKPOINT, node, slot, generation, nbytes, 0, True, None, now, now
                )
                self.used[CHECKPOINT] += nbytes
                self._eviction[CHECKPOINT].add(group, *self._description(group))
                if self.accounts is not None:
                    self._charge(group, 1)
                if self.disk is not None:
                    self.disk.put(group, payload)
            else:
                short = self._only_on_disk(CHECKPOINT, node, payload, 0, short or NO_ROOM)
                if short:
                    return short
            self._count_stored(CHECKPOINT, 1, nbytes)
            return ""

    def let_go(self, path: list[Node]) -> None:
        """Ends `hold`. Publishing again is no use, so known groups are refreshed, not touched."""
        with self._lock:
            # Children first, so that a parent is never older than a child: the oldest group is
            # then a leaf.
            groups = [x.history for x in reversed(path) if x.history is not None]
            order = self._eviction[HISTORY]
            fresh, known = [], []  # what is added now is recent enough
            for group in groups:
                group.pins -= 1
                if group.queued or group.slot < 0:
                    known.append(group)
                else:
                    group.queued = True
                    fresh.append(group)
            order.add_all(fresh, self._description)
            if self.disk is None:
                order.refresh_all(known)
            else:
                order.refresh_all([x for x in known if x.queued])
                self.disk.refresh(groups)
            if order.parked or self.disk is not None:
                self._offer(groups)
            if self.flights.followed:
                self.flights.published(path)
            if path:
                self._drop_bare(path[-1])

    # -- removal -----------------------------------------------------------------------------

    def discard(self, group: Group, reason: str = "damaged") -> Removed:
        """Drops a group that must not be used any more, pinned or not, and what hangs on it."""
        with self._lock:
            if group.node.group(group.kind) is not group:
                return Removed()
            if group.kind == HISTORY:
                return self._invalidate(self.index.subtree(group.node), reason)
            self._remove(group)
            self._drop_bare(group.node)
            return self._count_invalid({CHECKPOINT: [group.nbytes]}, reason)

    def clear(self) -> Removed:
        """Drops everything, pinned or not."""
        return self.forget(lambda root: True, "cleared")

    def forget(self, pick: Callable[[Root], bool], reason: str) -> Removed:
        """Drops every group, pinned or not, of the tenants and epochs that `pick` picks."""
        with self._lock:
            found = [x for x in self.index.roots() if pick(read_root(x.content))]
            under = [x for root in found for x in self.index.subtree(root) if x.depth]
            return self._invalidate(under, reason)

    def forget_path(self, keys: Keys, shared: bool, reason: str) -> Removed:
        """Drops what is stored of a prompt from where no other stored one shares it.

        shared: also what others share, and with it what they have stored beyond it.
        """
        with self._lock:
            path, gone = self.index.match(keys), []
            if shared:
                return self._invalidate(self.index.subtree(path[0]) if path else [], reason)
            below = None
            for node in reversed(path):
                if any(x is not below for x in node.children()):
                    break
                gone.append(node)
                below = node
            return self._invalidate(gone, reason)

    def retain(self, epochs: Iterable[bytes]) -> Removed:
        """From now on only groups of these epochs are stored; drops those of others."""
        with self._lock:
            self.epochs = frozenset(epochs)
            return self.forget(lambda root: root.epoch not in self.epochs, "epoch")

    def epochs_by_age(self) -> list[bytes]:
        """Epochs that anything is stored of, the one last put on disk last."""
        with self._lock:
            newest: dict[bytes, int] = {}
            for root in self.index.roots():
                epoch = read_root(root.content).epoch
                for node in self.index.subtree(root):
                    for group in filter(None, (node.history, node.checkpoint)):
                        put = group.disk.generation if group.disk is not None else 0
                        newest[epoch] = max(newest.get(epoch, 0), put)
            return sorted(newest, key=newest.__getitem__)

    def _invalidate(self, nodes: list[Node], reason: str) -> Removed:
        """nodes: children before parents."""
        sizes: dict[str, list[int]] = {}
        for node in nodes:
            for kind in KINDS:
                group = node.group(kind)
                if group is not None:
                    sizes.setdefault(kind, []).append(group.nbytes)
        for node in nodes:
            self._remove_node(node)
        return self._count_invalid(sizes, reason)

    def _count_invalid(self, sizes: dict[str, list[int]], reason: str) -> Removed:
        for kind, some in sizes.items():
            labels = dict(kind=kind, reason=reason)
            self._counters.add("invalidated_groups_total", len(some), **labels)
            self._counters.add("invalidated_bytes_total", sum(some), **labels)
        return Removed(sum(map(len, sizes.values())), sum(map(sum, sizes.values())))

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
            if self.accounts is not None:
                found += self.accounts.problems(self.groups())
            if self.disk is not None:
                found += self.disk.problems(self.groups())
            return found

    # -- inside ------------------------------------------------------------------------------

    def _presence(self, nodes: list[Node]) -> Presence:
        size = self.geometry.block
        # There are no holes: where the last has a history, all before it have.
        if nodes and nodes[-1].history is not None:
            history = (True,) * len(nodes)
        else:
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

    def _is_kept(self, root: Node) -> bool:
        return self.epochs is None or read_root(root.content).epoch in self.epochs

    def serves_others(self, epoch: bytes) -> bool:
        """Whether a lease of any epoch but this one is open."""
        with self._lock:
            return any(n for x, n in self._leases_of.items() if x not in (epoch, b""))

    def _close(self, lease: Lease) -> None:
        with self._lock:
            if self.epochs is not None:
                self._leases_of[lease.epoch] -= 1
                if not self._leases_of[lease.epoch]:
                    del self._leases_of[lease.epoch]
            self.flights.leave(lease)
            self._unpin(lease)
            self.leases -= 1

    def _pin(self, lease: Lease) -> None:
        self._lives.pin(HISTORY, lease.history)
        self._eviction[HISTORY].touch_all([x for x in reversed(lease.history) if x.queued])
        if lease.checkpoint is not None:
            self._lives.pin(CHECKPOINT, [lease.checkpoint])
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
