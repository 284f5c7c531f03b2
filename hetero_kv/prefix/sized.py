"""A store of sizes: the catalog, policies and counters of `PrefixStore` without any bytes.

For trace replay and for timing the control plane. What a prefill would have computed is taken as
given: whoever publishes says how far it went.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

from hetero_kv.contract import CacheSpec
from hetero_kv.metrics import Snapshot, series
from hetero_kv.prefix import observe
from hetero_kv.prefix.catalog import Catalog
from hetero_kv.prefix.costs import Costs
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import KINDS
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.observe import Clock, Observer
from hetero_kv.prefix.payload import SizedPayload
from hetero_kv.prefix.plan import Geometry, plan
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.quotas import Quotas


class SizedStore:
    """Prefixes by size.

    Args:
        geometry: block, granularity and components.
        block_bytes: of the history group of one block. checkpoint_bytes: of one checkpoint.
        capacity: bytes for both kinds together.
        policy, costs, quotas, clock: as for PrefixStore.
    """

    def __init__(
        self,
        geometry: Geometry,
        block_bytes: int,
        checkpoint_bytes: int,
        *,
        capacity: int,
        policy: Policy | str = "full",
        costs: Costs | None = None,
        quotas: Quotas | None = None,
        clock: Clock = time.monotonic,
    ):
        self.geometry = dataclasses.replace(
            geometry, block_bytes=block_bytes, checkpoint_bytes=checkpoint_bytes
        )
        self.policy = Policy.named(policy) if isinstance(policy, str) else policy
        self.counters = observe.counters()
        self.observer = Observer(self.counters, self.geometry, clock)
        parts = (HostTier(capacity), self.policy, self.counters, quotas, clock)
        self.catalog = Catalog(self.geometry, *parts)
        self._block = SizedPayload(block_bytes)  # one object stands for all: nothing changes it
        self._checkpoint = SizedPayload(checkpoint_bytes)
        placed = self.policy.checkpoints
        self._planner = functools.partial(
            plan, replay=placed.replay, bound=placed.bound, costs=costs
        )

    @classmethod
    def of(cls, spec: CacheSpec, **options) -> "SizedStore":
        """The sizes of a model's cache; a middle block stands for all."""
        return cls(Geometry.of(spec), spec.block_bytes(), spec.checkpoint_bytes(), **options)

    def lookup(self, keys: Keys, length: int | None = None, *, wait: float = 0.0) -> Lease:
        """Pins what a prompt of `length` tokens (None: that of the keys) can resume.

        wait: as for PrefixStore.
        """
        observer = self.observer
        started = observer.clock()
        length = keys.length if length is None else length
        lease = self.catalog.open(keys, length, self._planner)
        if wait > 0 and lease.following is not None:
            self.wait(lease, wait)
        observer.looked_up(lease.plan, length, started)
        observer.hit(lease.plan)
        return lease

    def wait(self, lease: Lease, timeout: float) -> bool:
        """As for PrefixStore; nothing is counted."""
        renew = functools.partial(self.catalog.reopen, lease, self._planner, follow=True)
        return self.catalog.flights.wait(lease, timeout, renew)

    def publish(self, keys: Keys, blocks: int, points: Sequence[int] = ()) -> str:
        """Stores the first `blocks` blocks and the checkpoints at `points` (ascending, tokens).

        Returns "" or the reason why the rest was left out.
        """
        started = self.observer.clock()
        catalog, size = self.catalog, self.geometry.block
        path, reason = catalog.hold(keys, blocks), ""
        try:
            if len(path) < blocks:
                missing = [self._block] * (blocks - len(path))
                reason = catalog.add_history(keys, path, *missing)
            for stop in (x // size for x in points) if self.geometry.checkpoint else ():
                end = path[:stop]
                if len(end) == stop and not reason and not catalog.has_checkpoint(end):
                    reason = catalog.add_checkpoint(end, self._checkpoint)
        finally:
            catalog.let_go(path)
        self.observer.published(started, reason)
        return reason

    def metrics(self) -> Snapshot:
        """Counters, histograms and gauges by name."""
        used = {series("host_used_bytes", kind=kind): self.catalog.used[kind] for kind in KINDS}
        return self.counters.snapshot() | self.counters.named(used)
