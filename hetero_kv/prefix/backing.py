"""The disk side of the catalog: which groups are on disk, and which of them go first.

Every method is called under the catalog's lock; the tier takes its own locks under that one and
never calls back. What is on disk is closed under prefixes as well: a group is put there only
after the history under it, and goes only after what hangs on it.
"""

from collections.abc import Callable, Iterable

from hetero_kv.metrics import Counters
from hetero_kv.prefix.disk.books import Entry
from hetero_kv.prefix.disk.results import Stored
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.encoding import decode_bytes, encode
from hetero_kv.prefix.eviction import Eviction
from hetero_kv.prefix.host import Ticket
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group, Index, Node
from hetero_kv.prefix.keys import Digest
from hetero_kv.prefix.payload import ArrayPayload
from hetero_kv.prefix.plan import DISK
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.quotas import Account, next_victim, shares

PayloadOf = Callable[[Group], ArrayPayload]
Forget = Callable[[Group, bool], None]


class Backing:
    """Groups of one catalog on disk.

    block: tokens of a block.
    forget: takes a group (True: a victim), and what hangs on it there, off the disk, and out of
    the index what is nowhere else then. payload_of: the payload of a group in host memory.
    make_order: makes an order of eviction. limited: whether tenants have quotas.
    """

    def __init__(
        self,
        tier: DiskTier,
        block: int,
        policy: Policy,
        counters: Counters,
        forget: Forget,
        payload_of: PayloadOf,
        make_order: Callable[[], Eviction],
        limited: bool = False,
    ):
        self.tier = tier
        self.used = dict.fromkeys(KINDS, 0)  # bytes of payloads
        self.missing: dict[Group, None] = {}  # were refused: to be tried again
        self._counters = counters
        self._forget = forget
        self._payload_of = payload_of
        self._policy = policy
        self._block = block
        self._groups: dict[int, Group] = {}  # by generation
        self._eviction = {kind: make_order() for kind in KINDS}
        self._share = shares(policy.checkpoint_share, tier.capacity)
        self._limited = limited

    def holds(self, group: Group) -> bool:
        """Whether the group can be read from disk."""
        return group.disk is not None and self.tier.is_current(group.disk)

    def order(self, kind: str) -> Eviction:
        """The order of eviction of a kind."""
        return self._eviction[kind]

    # -- in and out ----------------------------------------------------------------------------

    def put(self, group: Group, payload: ArrayPayload) -> bool:
        """Puts a group on disk, and before it the history under it, if that is in host memory.

        What is refused is remembered in `missing`, for `retry`.
        """
        above, ready = _anchor(group), True
        if above is not None and above in self.missing:
            ready = False
        elif above is not None and not self.holds(above):
            chain = []
            while above is not None and not self.holds(above):
                chain.append(above)
                above = _anchor(above)
            # A stale ticket is settled when the tier reports it.
            ready = all(x.on_host and x.disk is None for x in chain) and all(
                self._put(x, self._payload_of(x)) for x in reversed(chain)
            )
        if ready and self._put(group, payload):
            return True
        self.missing[group] = None
        return False

    def retry(self, groups: Iterable[Group] | None = None) -> int:
        """Puts what is missing (of `groups`, parents first), as far as there is room for it now.

        Returns how many are still missing.
        """
        waiting = list(self.missing) if groups is None else [x for x in groups if x in self.missing]
        if groups is None:
            waiting.sort(key=lambda x: (x.node.depth, x.kind == CHECKPOINT))
        for group in waiting:
            if group in self.missing and group.on_host:
                del self.missing[group]
                self.put(group, self._payload_of(group))
        return len(self.missing)

    def _put(self, group: Group, payload: ArrayPayload) -> bool:
        node, meta = group.node, b""
        if group.kind == HISTORY:
            parent = node.parent
            root = parent.content if not parent.depth else b""
            meta = encode((parent.key, node.content, root))
        above = _anchor(group)
        if above is not None:
            above.pins += 1  # making room must not take it
        try:
            if self._limited and not self._own_room(node.account, group.kind, group.nbytes):
                self._counters.add("quota_refused_total", kind=group.kind, tier=DISK)
                return False
            ticket = self.tier.put(group.kind, node.key, node.depth, payload, meta)
            if ticket is None and self._make_room(group, payload, meta):
                ticket = self.tier.put(group.kind, node.key, node.depth, payload, meta)
        finally:
            if above is not None:
                above.pins -= 1
                if not above.pins:
                    self.offer([above])
        if ticket is None:
            return False
        self.attach(group, ticket)
        return True

    def attach(self, group: Group, ticket: Ticket) -> None:
        """The group is on disk."""
        node, cost = group.node, 1.0
        group.disk = ticket
        self._groups[ticket.generation] = group
        self.used[group.kind] += group.nbytes
        if self._limited:
            node.account.disk[group.kind] += group.nbytes
        self.missing.pop(group, None)
        if self._policy.cost is not None:
            start = node.depth - 1 if group.kind == HISTORY else 0
            cost = self._policy.cost(start * self._block, node.depth * self._block)
        order = self._eviction[group.kind]
        order.add(group, node.key, max(group.nbytes, 1), node.depth, cost)

    def detach(self, group: Group, evicted: bool = False, drop: bool = True) -> None:
        """The group is not on disk any more. Without `drop` its object stays there."""
        self.missing.pop(group, None)
        ticket = group.disk
        if ticket is None:
            return
        group.disk = None
        del self._groups[ticket.generation]
        self.used[group.kind] -= group.nbytes
        if self._limited:
            group.node.account.disk[group.kind] -= group.nbytes
        self._eviction[group.kind].remove(group, evicted)
        if drop:
            self.tier.drop(ticket)
        above = _anchor(group)
        if above is not None:
            self.offer([above])

    def release(self) -> None:
        """Forgets all groups; their objects stay on disk."""
        for group in list(self._groups.values()):
            self.detach(group, drop=False)
        self.missing.clear()

    def of(self, tickets: Iterable[Ticket]) -> list[Group]:
        """The groups of tickets."""
        found = (self._groups.get(x.generation) for x in tickets)
        return [x for x in found if x is not None]

    # -- order of eviction ---------------------------------------------------------------------

    def touch(self, groups: Iterable[Group]) -> None:
        """They were used, in this order."""
        self._each(groups, lambda order, some: order.touch_all(some))

    def refresh(self, groups: Iterable[Group]) -> None:
        """A request that used them goes on."""
        self._each(groups, lambda order, some: order.refresh_all(some))

    def offer(self, groups: Iterable[Group]) -> None:
        """They may be victims again."""
        for group in groups:
            if group.disk is not None and not group.pins:
                self._eviction[group.kind].offer(group)

    def _each(self, groups: Iterable[Group], tell: Callable) -> None:
        groups = [x for x in groups if x.disk is not None]
        for kind in KINDS:
            tell(self._eviction[kind], [x for x in groups if x.kind == kind])

    def _make_room(self, group: Group, payload: ArrayPayload, meta: bytes) -> bool:
        """Takes groups off the disk until the group fits; False if it did or cannot."""
        entry = Entry.waiting(group.kind, group.node.key, group.node.depth, 1, payload, meta)
        need = entry.record_bytes + entry.index_bytes
        if self.tier.failure or self.tier.room >= need:
            return False  # it was refused for another reason: the queue is full
        if need > self.tier.room + self.tier.ledger().live + self.tier.ledger().queued:
            return False
        kind = group.kind
        while self.tier.room < need:
            after = self.used[kind] + need
            victim = next_victim(kind, after, self.used, self._share, self._victim)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _own_room(self, account: Account, kind: str, nbytes: int) -> bool:
        """Takes a tenant's own groups off the disk until `nbytes` more are within its quota."""
        limit = account.quota.disk_bytes
        if limit is None:
            return True
        share = shares(self._policy.checkpoint_share, limit)

        def victim_of(kind: str) -> Group | None:
            return self._eviction[kind].victim_of(account, self._evictable)

        while sum(account.disk.values()) + nbytes > limit:
            after = account.disk[kind] + nbytes
            fits = nbytes <= limit
            victim = next_victim(kind, after, account.disk, share, victim_of) if fits else None
            if victim is None:
                return False
            self._counters.add("quota_evicted_groups_total", tier=DISK)
            self._evict(victim)
        return True

    def enforce(self, account: Account) -> None:
        """Keeps to a quota that is smaller than what was found at the start."""
        self._own_room(account, HISTORY, 0)

    def _evict(self, victim: Group) -> None:
        above = victim.node.checkpoint if victim.kind == HISTORY else None
        for group in (victim, above):  # a checkpoint goes with the history under it
            if group is not None and group.disk is not None:
                self._counters.add("disk_evicted_groups_total", kind=group.kind)
                self._counters.add("disk_evicted_bytes_total", group.nbytes, kind=group.kind)
        self._forget(victim, True)

    def _victim(self, kind: str) -> Group | None:
        return self._eviction[kind].victim(self._evictable)

    @staticmethod
    def _evictable(group: Group) -> bool:
        if group.pins:
            return False
        if group.kind == CHECKPOINT:
            return True
        node = group.node
        if not group.on_host:
            free = node.child is None
        else:
            free = not any(x.history and x.history.disk for x in node.children())
        # Blocks without bytes exist only for the checkpoints on them.
        return free and (group.nbytes > 0 or node.checkpoint is None)

    # -- start and checks ----------------------------------------------------------------------

    def rebuild(
        self, index: Index, digest: Digest, nbytes: Callable[[str, int], int], now: float = 0.0
    ) -> None:
        """Fills an empty index with what is stored. What does not fit in is dropped.

        nbytes: (kind, depth) → bytes of such a group's payload. now: by the catalog's clock.
        """
        found: list[tuple[Group, Ticket]] = []
        nodes: dict[bytes, Node] = {}
        stored = self.tier.stored()
        for one in sorted(stored, key=lambda x: (x.depth, x.kind == CHECKPOINT)):
            node = _node_of(one, index, nodes, digest)
            if isinstance(node, str):
                self._counters.add("disk_orphans_total", kind=one.kind, reason=node)
                self.tier.drop(one.ticket)
                continue
            group = Group(one.kind, node, -1, 0, nbytes(one.kind, one.depth), born=now, used=now)
            if self._limited:
                node.account.groups[one.kind] += 1
            if one.kind == HISTORY:
                node.history, nodes[one.key] = group, node
            else:
                node.checkpoint = group
            found.append((group, one.ticket))
        for group, ticket in _leaf_first(found):
            self.attach(group, ticket)

    def problems(self, groups: Iterable[Group]) -> list[str]:
        """What breaks the books of the disk; `groups`: all of the catalog. Empty if healthy."""
        found, used, count = [], dict.fromkeys(KINDS, 0), 0
        for group in groups:
            name = f"{group.kind} at depth {group.node.depth}"
            if group.disk is None:
                continue
            count += 1
            used[group.kind] += group.nbytes
            if self._groups.get(group.disk.generation) is not group:
                found.append(f"{name}: its ticket is another group's")
            if not self.tier.is_current(group.disk):
                found.append(f"{name}: lost on disk")
            above = _anchor(group)
            if above is not None and above.disk is None:
                found.append(f"{name}: on disk without the history under it")
        if count != len(self._groups) or used != self.used:
            found.append(f"disk: counted {count} {used}, booked {len(self._groups)} {self.used}")
        known = {x.ticket.generation for x in self.tier.stored()}
        strangers = len(known - self._groups.keys())
        if strangers:
            found.append(f"disk: {strangers} objects belong to no group")
        return found


def _anchor(group: Group) -> Group | None:
    """The history that must be on disk before the group is."""
    if group.kind == CHECKPOINT:
        return group.node.history
    parent = group.node.parent
    return parent.history if parent is not None and parent.depth else None


def _node_of(one: Stored, index: Index, nodes: dict[bytes, Node], digest: Digest) -> Node | str:
    """Where a stored group belongs, or why nowhere. `nodes`: those that have a history."""
    if one.kind == CHECKPOINT:
        node = nodes.get(one.key)
        return node if node is not None and node.depth == one.depth else "no_history"
    meta = decode_bytes(one.meta)
    if one.kind != HISTORY or meta is None or len(meta) != 3:
        return "malformed"
    above, content, root_content = meta
    if digest(above + content) != one.key:
        return "wrong_key"
    if one.depth == 1:
        if digest(root_content) != above:
            return "wrong_key"
        parent = index.extend(None, above, root_content)
    else:
        parent = nodes.get(above)
    if parent is None or parent.depth + 1 != one.depth:
        return "no_parent"
    node = index.extend(parent, one.key, content)
    if node is None:
        index.prune(parent)
        return "collision"
    return node


def _leaf_first(found: list[tuple[Group, Ticket]]) -> list[tuple[Group, Ticket]]:
    """By the last time that anything was put on them; children before parents."""
    last: dict[int, int] = {}  # by id of node
    for group, ticket in reversed(found):  # deepest first
        here = max(last.get(id(group.node), 0), ticket.generation)
        last[id(group.node)] = here
        above = id(group.node.parent)
        last[above] = max(last.get(above, 0), here)
    return sorted(found, key=lambda x: (last[id(x[0].node)], -x[0].node.depth))
