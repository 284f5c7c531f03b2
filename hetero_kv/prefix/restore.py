"""Fetching what a lease promises from the tiers, and the shorter plan where a tier fails."""

from collections.abc import Callable
from typing import NamedTuple

from hetero_kv.metrics import Counters
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.host import STALE, Fetched, Ticket
from hetero_kv.prefix.index import CHECKPOINT, Group
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import ArrayPayload
from hetero_kv.prefix.plan import DISK, HOST, Planner, Reason
from hetero_kv.prefix.tiered import TieredCatalog
from hetero_kv.prefix.transfer import Transfer

PlannerOf = Callable[[Keys, int | None], Planner]  # (keys, limit in tokens)


class Delivered(NamedTuple):
    """What a tier delivered, a payload of its own."""

    payload: ArrayPayload
    tier: str


class Fetcher:
    """Copies groups out of the tiers, by host memory first. What turns out damaged is dropped.

    planner: makes the planner of another plan, at most `limit` tokens long.
    epoch: the present one; a lease of another one gets nothing.
    """

    def __init__(
        self,
        catalog: TieredCatalog,
        disk: DiskTier | None,
        transfer: Transfer,
        counters: Counters,
        planner: PlannerOf,
        epoch: Callable[[], bytes],
    ):
        self._catalog = catalog
        self._disk = disk
        self._transfer = transfer
        self._counters = counters
        self._planner = planner
        self._epoch = epoch

    def fetch(
        self, lease: Lease, capacity: int, held: int = 0
    ) -> tuple[list[Delivered], Delivered | None]:
        """Copies of what the lease promises: its history groups, and its checkpoint.

        The lease's plan is shortened to what could be delivered, and to `capacity` tokens. The
        first `held` history groups are left out.
        """
        if self._is_old(lease):
            return [], None
        found = self._fetch(lease, capacity, held)
        # Once more after the copies: the weights may have changed meanwhile.
        return ([], None) if self._is_old(lease) else found

    def _is_old(self, lease: Lease) -> bool:
        if not lease.resumable_length or lease.epoch == self._epoch():
            return False
        self._replan(lease, 0, ("", "epoch"))
        return True

    def _fetch(
        self, lease: Lease, capacity: int, held: int
    ) -> tuple[list[Delivered], Delivered | None]:
        if lease.resumable_length > capacity:
            self._replan(lease, capacity)
        for last_try in (False, True):
            blocks = max(0, len(lease.history) - held)
            got, failed = self._read(lease, lease.groups()[len(lease.history) - blocks :])
            if failed is None:
                return got[:blocks], (got[blocks] if lease.checkpoint else None)
            # One shorter plan, then a cold start: a store that keeps failing must not keep a
            # request busy.
            self._replan(lease, 0 if last_try else capacity, failed)
        return [], None

    def read_group(self, group: Group) -> tuple[Fetched, str]:
        """From host memory, or else from disk; called without the catalog's lock."""
        host, disk = self._catalog.places(group)
        if host is not None:
            fetched = self._catalog.tier.read(host, group.label)
            if not fetched.failure or not self.can_leave_host(group, host, fetched):
                return fetched, HOST
            _, disk = self._catalog.places(group)
        if disk is None:
            return Fetched(None, STALE), DISK
        return self._disk.read(disk, group.label), DISK

    def can_leave_host(self, group: Group, ticket: Ticket, fetched: Fetched) -> bool:
        """Whether what is damaged in host memory may be read from disk."""
        if self._disk is None or not self._catalog.leave_host(group, ticket):
            return False
        self.count_damage("healed_total", group, fetched.failure, fetched.component)
        return True

    def wrong(self, group: Group, payload: ArrayPayload, length: int) -> tuple[str, str]:
        """(code, component) of what whole bytes under the right label are wrong in, or ("", "")."""
        layout = self._transfer.layout_of(group.kind, group.node.depth)
        component = self._transfer.wrong_layout(payload, layout)
        if component:
            return "layout", component
        if group.kind == CHECKPOINT:
            component = self._transfer.wrong_positions(payload, length)
        return ("evidence", component) if component else ("", "")

    def drop(self, group: Group, failure: str, component: str) -> None:
        """Drops a damaged group, and what hangs on it."""
        self.count_damage("dropped_total", group, failure, component)
        self._catalog.discard(group)

    def count_damage(self, name: str, group: Group, failure: str, component: str) -> None:
        """Counts a damaged group under `name`."""
        self._counters.add(name, kind=group.kind, component=component, reason=failure)

    # -- inside --------------------------------------------------------------------------------

    def _read(
        self, lease: Lease, groups: list[Group]
    ) -> tuple[list[Delivered], tuple[str, str] | None]:
        """Copies of these groups, or (component, code) of the first that was not delivered."""
        got: list[Delivered] = []
        try:
            failed = self._read_into(got, groups, lease.resumable_length)
        finally:
            read = zip(groups, got, strict=False)
            promoted = [(group, x.payload) for group, x in read if x.tier == DISK]
            if promoted:
                self._catalog.promote(promoted)
        return ([], failed) if failed else (got, None)

    def _read_into(
        self, got: list[Delivered], groups: list[Group], length: int
    ) -> tuple[str, str] | None:
        for group in groups:
            fetched, tier = self.read_group(group)
            failure, component = fetched.failure, fetched.component
            if not failure:
                failure, component = self.wrong(group, fetched.payload, length)
            if failure:
                self.drop(group, failure, component)
                return component or group.kind, failure
            got.append(Delivered(fetched.payload, tier))
        return None

    def _replan(self, lease: Lease, limit: int, failed: tuple[str, str] | None = None) -> None:
        before, candidate, reasons = lease.resumable_length, lease.candidate_length, lease.reasons
        self._catalog.reopen(lease, self._planner(lease.keys, limit))
        after = lease.resumable_length
        if failed is not None:
            reasons = (*reasons, Reason(*failed, before, after, "found while restoring"))
        new = tuple(x for x in lease.reasons if x not in reasons)
        # Others may have published meanwhile: then the plan is a longer one.
        candidate = max(candidate, lease.candidate_length)
        shortened = lease.plan._replace(candidate_length=candidate, reasons=reasons + new)
        lease.renew(shortened, lease.history, lease.checkpoint)
        self._counters.add("replans_total")
        self._counters.add("lost_tokens_total", max(0, before - after))
