"""Quotas of tenants: what each may hold on every tier, and whose groups make way for it.

A tenant that is at its quota makes room out of its own groups, by the same order of eviction, and
is refused if it cannot. It never takes another's place for what its quota does not allow.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetero_kv.prefix.eviction import Eviction, MayGo

_KINDS = ("history", "checkpoint")
Victim = Callable[[str], Any]  # kind → the group of that kind that goes first, or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one tenant, over all its adapters and weight epochs. None: no limit.

    host_bytes, disk_bytes: of payloads on that tier; both kinds of group count.
    history_groups, checkpoint_groups: groups of a kind, each counted once, wherever it is.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    history_groups: int | None = None
    checkpoint_groups: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and (not isinstance(limit, int) or limit < 0):
                raise ValueError(f"{field.name} is an integer >= 0 or None, got {limit!r}")

    def groups(self, kind: str) -> int | None:
        """The limit of groups of a kind."""
        return self.history_groups if kind == "history" else self.checkpoint_groups

    @property
    def is_limited(self) -> bool:
        """Whether anything is limited."""
        return any(x is not None for x in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Quotas:
    """`each` holds for every tenant (the nameless one included) that `tenants` does not name."""

    each: Quota = Quota()
    tenants: Mapping[str, Quota] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, quota in {"each": self.each, **self.tenants}.items():
            if not isinstance(quota, Quota):
                raise ValueError(f"the limits of {name!r} are a Quota, got {quota!r}")

    def of(self, tenant: str) -> Quota:
        """The limits of a tenant."""
        return self.tenants.get(tenant, self.each)


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Account:
    """What a tenant holds, per kind: bytes in host memory, bytes on disk, groups anywhere."""

    tenant: str
    quota: Quota
    host: dict[str, int]
    disk: dict[str, int]
    groups: dict[str, int]

    def facts(self) -> dict[str, tuple[int, int | None]]:
        """(held, limit) by name."""
        found = {
            "host bytes": (sum(self.host.values()), self.quota.host_bytes),
            "disk bytes": (sum(self.disk.values()), self.quota.disk_bytes),
        }
        return found | {f"{x} groups": (self.groups[x], self.quota.groups(x)) for x in _KINDS}


class Accounts:
    """Accounts by tenant. One is kept as long as anyone refers to it, as every group does."""

    def __init__(self, quotas: Quotas):
        self._quotas = quotas
        self._open: weakref.WeakValueDictionary[str, Account] = weakref.WeakValueDictionary()

    def of(self, tenant: str) -> Account:
        """The account of a tenant, opened if need be."""
        found = self._open.get(tenant)
        if found is None:
            sums = (dict.fromkeys(_KINDS, 0) for _ in range(3))
            found = self._open[tenant] = Account(tenant, self._quotas.of(tenant), *sums)
        return found

    def all(self) -> list[Account]:
        """Those that are open."""
        return list(self._open.values())

    def problems(self, groups: Iterable) -> list[str]:
        """What breaks the accounts; `groups`: all of the catalog. Empty if healthy."""
        found, counted = [], Accounts(self._quotas)
        held = []  # accounts live only as long as someone refers to them
        for group in groups:
            own = counted.of(group.node.account.tenant)
            held.append(own)
            own.groups[group.kind] += 1
            own.host[group.kind] += group.nbytes if group.on_host else 0
            own.disk[group.kind] += group.nbytes if group.disk is not None else 0
        for account in self.all():
            own = counted.of(account.tenant)
            if (own.host, own.disk, own.groups) != (account.host, account.disk, account.groups):
                found.append(f"tenant {account.tenant!r}: counted {own}, booked {account}")
            quota = account.quota
            for name, (have, limit) in account.facts().items():
                if limit is not None and have > limit:
                    found.append(f"tenant {account.tenant!r}: {have} {name}, {limit=} of {quota}")
        return found


class ByTenant(Eviction):
    """An order over all groups, and one over those of each tenant that is limited."""

    def __init__(self, make: Callable[[], Eviction]):
        self._make = make
        self._whole = make()
        self._each: dict[Account, Eviction] = {}
        self._count: dict[Account, int] = {}  # of items in them

    @property
    def parked(self) -> dict:
        """Never empty: whether any order has parked something is not worth finding out."""
        return {None: None}

    def _of(self, item) -> Eviction | None:
        return self._each.get(item.node.account)

    def add(self, item, key=None, nbytes=1, depth=0, cost=1.0):
        """To both orders."""
        self._whole.add(item, key, nbytes, depth, cost)
        account = item.node.account
        if account.quota.is_limited:
            own = self._each.get(account)
            if own is None:
                own = self._each[account] = self._make()
                self._count[account] = 0
            self._count[account] += 1
            own.add(item, key, nbytes, depth, cost)

    def touch(self, item):
        """In both orders."""
        self._whole.touch(item)
        own = self._of(item)
        if own is not None:
            own.touch(item)

    def refresh(self, item):
        """In both orders."""
        self._whole.refresh(item)
        own = self._of(item)
        if own is not None:
            own.refresh(item)

    def remove(self, item, evicted=False):
        """From both orders."""
        self._whole.remove(item, evicted)
        own = self._of(item)
        if own is not None:
            own.remove(item, evicted)
            account = item.node.account
            self._count[account] -= 1
            if not self._count[account]:
                del self._each[account], self._count[account]

    def offer(self, item):
        """To both orders."""
        self._whole.offer(item)
        own = self._of(item)
        if own is not None:
            own.offer(item)

    def victim(self, may_go: MayGo):
        """Whoever's it is."""
        return self._whole.victim(may_go)

    def victim_of(self, account: Account, may_go: MayGo):
        """The first of a tenant's own that may go."""
        own = self._each.get(account)
        if own is None:
            return None
        found = own.victim(may_go)
        if found is None and own.parked:
            # They were refused by another rule of what may go, perhaps.
            for item in list(own.parked):
                own.offer(item)
            found = own.victim(may_go)
        return found


def shares(policy_share: float, limit: int) -> dict[str, int]:
    """How `limit` bytes are split between the kinds."""
    checkpoint = math.ceil(policy_share * limit)
    return {"history": limit - checkpoint, "checkpoint": checkpoint}


def next_victim(
    kind: str, after: int, used: Mapping[str, int], share: Mapping[str, int], victim: Victim
):
    """What goes for a group of `kind`, of which there would be `after` bytes; None: nothing can.

    A kind gives way only for what it has over its share.
    """
    other = "checkpoint" if kind == "history" else "history"
    within = after <= share[kind]
    found = None if within else victim(kind)
    if found is None and used[other] > share[other]:
        found = victim(other)
    if found is None and within:
        found = victim(kind)
    return found
