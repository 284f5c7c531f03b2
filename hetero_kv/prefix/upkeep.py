"""What a store does besides serving: metrics, durability, deletion, epochs of the weights."""

import dataclasses
import pathlib

import numpy as np

from hetero_kv.contract import CacheSpec
from hetero_kv.metrics import Counters, Snapshot, series
from hetero_kv.prefix.disk.results import Flushed
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.host import Fetched
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.index import KINDS, Group
from hetero_kv.prefix.keys import Digest, Keys, block_keys, of_epoch
from hetero_kv.prefix.observe import Observer
from hetero_kv.prefix.report import Removed
from hetero_kv.prefix.restore import Fetcher
from hetero_kv.prefix.tiered import TieredCatalog


class Upkeep:
    """The part of PrefixStore that no request needs. PrefixStore fills in the attributes."""

    spec: CacheSpec
    identity: Identity
    counters: Counters
    disk: DiskTier | None
    disk_failure: str
    catalog: TieredCatalog
    epochs_kept: int
    _observer: Observer
    _fetcher: Fetcher
    _digest: Digest
    _epochs: list[bytes]  # retained ones, the present one last
    _closed: bool

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # -- metrics and checks --------------------------------------------------------------------

    def metrics(self) -> Snapshot:
        """Counters, histograms and gauges by name; ratios are for the reader to derive.

        `families.to_text` makes the Prometheus text format of it, and says what each name means;
        `metrics.to_json` makes a line of JSON.
        """
        catalog, tier = self.catalog, self.catalog.tier
        gauges: Snapshot = {
            "host_capacity_bytes": tier.capacity,
            "host_free_bytes": tier.free,
            "host_peak_bytes": tier.peak,
            "leases_open": catalog.leases,
            "epochs_retained": len(self._epochs),
        }
        for kind in KINDS:
            gauges[series("host_used_bytes", kind=kind)] = catalog.used[kind]
        if self.disk is not None:
            gauges |= self.disk.metrics()
        return self.counters.snapshot() | self.counters.named(gauges)

    def computed(self, tokens: int) -> None:
        """The model step has computed so many prompt tokens, besides those that it replayed.

        For whoever drives prefill, so that the counters account for every prompt token.
        """
        if tokens < 0:
            raise ValueError(f"computed tokens are counted up, got {tokens}")
        self._observer.computed.add(tokens)

    def verify(self) -> list[str]:
        """Reads every object and every book; drops damaged objects. Empty list: healthy."""
        self._check_open()
        found = self.catalog.problems()
        if self.disk is not None:
            found += self.disk.problems()
        for group in self.catalog.groups():
            # On disk first: what is damaged in memory alone is then taken from there.
            found += self._verify_disk(group)
            host, disk = self.catalog.places(group)
            if host is None or group.node.group(group.kind) is not group:
                continue  # went with a damaged one before it
            fetched = self.catalog.tier.read(host, group.label)
            if fetched.payload is None and self.catalog.places(group)[0] == host:
                found.append(self._damage(group, fetched))
                if disk is None or not self._fetcher.can_leave_host(group, host, fetched):
                    self._fetcher.drop(group, fetched.failure, fetched.component)
        return found

    # -- durability ----------------------------------------------------------------------------

    def flush(self) -> Flushed:
        """Returns when everything published is as durable as its tiers allow (host: at once).

        This is the acknowledgement: what is on disk then is found again by another store, and
        what was deleted is not, unless `ok` is False. In that case `failure` says why, and what
        was lost is not offered any more.
        """
        self._check_open()
        return self._flush()

    def close(self) -> None:
        """Flushes and gives all memory back; what is on disk stays. Later calls raise."""
        if not self._closed:
            self._closed = True
            self._flush()
            self.catalog.close()
            if self.disk is not None:
                self.disk.close()

    # -- deletion ------------------------------------------------------------------------------

    def clear(self) -> Removed:
        """Drops everything, leased or not, on disk too; open leases will restore less.

        Durable on disk when this returns, unless the result says otherwise. Files of other
        identities and formats in the directory are left alone.
        """
        self._check_open()
        return self._or_failure(self.catalog.clear())

    def delete(
        self,
        *,
        tenant: str,
        tokens: np.ndarray | None = None,
        extra: object = None,
        shared: bool = False,
        erase: bool = False,
    ) -> Removed:
        """Drops what is stored of a tenant, or of one of its requests, leased or not.

        On all tiers and in all retained epochs. Nothing of it is offered any more when this
        returns; open leases will restore less. On disk that is durable after the next `flush`:
        then no later store finds it either, not even by a scan of the segments.

        Until a segment is compacted, its file still holds the dead bytes, and the index (which
        holds tokens) may. `erase` rewrites both at once, and flushes: when the result is durable,
        no file of this identity in the directory holds the bytes. What the file system and the
        device do with blocks that were given back is up to them, as is memory that was freed.

        Args:
            tenant: whose.
            tokens, extra: a prompt i32[n], as for `lookup`; None: everything of the tenant, of all
                adapters. Of a prompt that goes what no other stored one shares: the blocks after
                the last that another one continues from, with all checkpoints on them. Give the
                longest form that was published, output included.
            shared: also the blocks that others share, and with them what others hold beyond.
            erase: see above.
        """
        self._check_open()
        if tokens is None:
            removed = self.catalog.forget(lambda root: root.tenant == tenant, "deleted")
        else:
            removed = Removed()
            keys = self._keys(tokens, tenant, extra)
            for epoch in () if keys.refusal else list(self._epochs):
                theirs = of_epoch(keys, epoch, self._digest)
                removed += self.catalog.forget_path(theirs, shared, "deleted")
        if self.disk is None:
            return self._or_failure(removed)
        if not erase:
            return dataclasses.replace(removed, durable=False)
        scrubbed = self.disk.scrub()
        self.catalog.lose(scrubbed.lost)
        return removed.on_disk(scrubbed)

    # -- epochs --------------------------------------------------------------------------------

    @property
    def epoch(self) -> bytes:
        """The present weights' epoch: the digest of their identity. Leases carry theirs."""
        return self.identity.digest

    def advance_epoch(self, identity: Identity) -> Removed:
        """From now on keys vouch for other weights, as after an update in place.

        Entries of earlier epochs are never hit under the new identity. The last `epochs_kept` of
        those are retained, and hit again if their identity comes back; older ones are dropped, on
        disk durably with the next `flush`. Leases stay with the identity that they were opened
        under: restoring one of another epoch gives length 0 and the reason "epoch".

        Call this when no step with the old weights runs any more, and before the first with the
        new ones. State that the old weights have made must not be published under the new ones:
        see `publish`, `epoch`.

        Raises:
            ValueError: the identity differs in more than weights, adapter and epoch.
        """
        self._check_open()
        if identity.family != self.identity.family:
            fields = (x.name for x in dataclasses.fields(identity))
            differ = [x for x in fields if getattr(identity, x) != getattr(self.identity, x)]
            raise ValueError(f"identities of two epochs differ in {differ}: open another store")
        epochs = [x for x in self._epochs if x != identity.digest] + [identity.digest]
        self._epochs = epochs[-1 - self.epochs_kept :]
        removed = self.catalog.retain(self._epochs)
        self.identity = identity
        self.counters.add("epochs_total")
        return self._or_failure(dataclasses.replace(removed, durable=self.disk is None))

    # -- inside --------------------------------------------------------------------------------

    def _open_disk(self, directory: pathlib.Path | str, nbytes: int) -> None:
        clock = self._observer.clock
        family, layout = self.identity.family, self.transfer.layout_of
        disk = DiskTier(directory, nbytes, family, layout, counters=self.counters, clock=clock)
        if disk.failure:
            self.disk_failure = disk.failure_detail
            self.counters.add("disk_unusable_total", reason=disk.failure)
            return
        self.disk = disk

    def _load(self) -> None:
        """Finds again what is on disk; of other epochs the last ones that were written."""
        self._epochs = [self.epoch]
        if self.disk is not None:
            self.catalog.load(self._digest, lambda *group: self.transfer.layout_of(*group).nbytes)
            others = [x for x in self.catalog.epochs_by_age() if x != self.epoch]
            kept = others[-self.epochs_kept :] if self.epochs_kept else []
            self._epochs = [*kept, self.epoch]
        self.catalog.retain(self._epochs)

    def _flush(self) -> Flushed:
        if self.disk is None:
            return Flushed(True)
        started = self._observer.clock()
        before, left = -1, self.catalog.spill()
        while left and left != before:
            self.disk.write_back()
            before, left = left, self.catalog.spill()
        flushed = self.disk.flush()
        self.catalog.lose(flushed.lost)
        self._observer.latency["flush"].observe(self._observer.clock() - started)
        return flushed

    def _facts(self, tenant: str) -> tuple[tuple[str, str], ...]:
        """What `explain` tells beside the plan."""
        account = self.catalog.account(tenant) if isinstance(tenant, str) else None
        others = len(self._epochs) - 1
        more = f", {others} earlier retained" if others else ""
        found = [("tenant", repr(tenant))] if tenant else []
        found.append(("epoch", f"{self.identity.weight_epoch} ({self.epoch.hex()[:12]}){more}"))
        if account is not None:
            held = (
                f"{have} of {limit} {name}"
                for name, (have, limit) in account.facts().items()
                if limit is not None
            )
            found.append(("quota", ", ".join(held) or "no limits"))
        if self.disk_failure:
            found.append(("no disk", self.disk_failure))
        return tuple(found)

    def _or_failure(self, removed: Removed) -> Removed:
        """What is in a directory that could not be used is still there."""
        if not self.disk_failure:
            return removed
        return dataclasses.replace(removed, durable=False, failure=self.disk_failure)

    def _verify_disk(self, group: Group) -> list[str]:
        _, ticket = self.catalog.places(group)
        if ticket is None:
            return []
        fetched = self.disk.read(ticket, group.label)
        if fetched.payload is not None or self.catalog.places(group)[1] != ticket:
            return []
        self._fetcher.count_damage("disk_dropped_total", group, fetched.failure, fetched.component)
        self.catalog.leave_disk(group)
        return [f"disk: {self._damage(group, fetched)}"]

    def _damage(self, group: Group, fetched: Fetched) -> str:
        at = group.node.depth * self.spec.block
        return f"{group.kind} at {at}: {fetched.failure} {fetched.component}"

    def _keys(self, tokens: np.ndarray, tenant: str, extra: object) -> Keys:
        return block_keys(self.identity, tokens, tenant, extra, self._digest)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")
