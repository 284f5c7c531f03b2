"""The classical rule, as the baseline of ablations: a hash hit is reused as it is.

It is right for full-attention models and wrong for hybrids, which is what the ablation shows.
Never use it to serve anything.
"""

import dataclasses

import numpy as np

from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.plan import DISK, Plan, Planner, plan_hash_only
from hetero_kv.prefix.policy import Never, Policy
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.state import Cache

KINDS = ("stale", "zeroed")
HISTORY_ONLY = Policy(checkpoints=Never(), checkpoint_share=0.0)


class HashOnlyStore(PrefixStore):
    """Restores only `components` for the whole candidate length and claims that all is well.

    Lengths and counters are set as if everything had been restored. Other leaves stay as the
    slot holds them (kind "stale": those of the request before) or are cleared ("zeroed"). Position
    evidence stays as it is, since the classical rule knows of none; validators see the lie.

    Args:
        spec, identity, host_bytes: as for PrefixStore.
        components: names as in `Leaf.component`; None: all History components but index keys,
            that is, "the KV".
        kind: "stale" or "zeroed".
        policy: as for PrefixStore; by default no checkpoints are stored, so that all bytes serve
            the hash hits.
    """

    def __init__(
        self,
        spec: CacheSpec,
        identity: Identity,
        *,
        host_bytes: int,
        components: tuple[str, ...] | None = None,
        kind: str = "stale",
        policy: Policy | str = HISTORY_ONLY,
        **options,
    ):
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        self.kind = kind
        # What it computes after a hit is wrong, so no other store may find it, on disk or anywhere.
        identity = dataclasses.replace(identity, config=f"{identity.config} hash_only {kind}")
        super().__init__(spec, identity, host_bytes=host_bytes, policy=policy, **options)
        history = self.geometry.history
        if components is None:
            components = tuple(x for x in history if "index" not in x)
        unknown = set(components) - set(history)
        if unknown:
            raise ValueError(f"no History components {sorted(unknown)}; there are {history}")
        self.components = frozenset(components)

    def restore(self, lease: Lease, cache: Cache, row: int = 0) -> Cache:
        """Claims the candidate length for row `row`; the cache given is donated."""
        self._check_open()
        self._check_row(cache, row)
        if lease.released:
            raise ValueError("the lease is released: restore inside its with block")
        started = self._observer.clock()
        history, _ = self._fetcher.fetch(lease, cache.capacity)
        length = lease.resumable_length
        if not length:
            return self.transfer.write(cache, np.int32(row), np.int32(0), np.int32(0), {}, {})[0]
        payloads, lost = [x.payload for x in history], frozenset()
        if self.kind == "zeroed":
            everything = {*self.geometry.history, *self.geometry.checkpoint}
            lost = frozenset(everything - self.components)
        cache = self.transfer.overwrite(
            cache,
            np.int32(row),
            np.int32(length),
            self.transfer.stage_history(payloads, cache.capacity, self.components),
            zeroed=lost,
        )
        from_disk = sum(x.tier == DISK for x in history) * self.spec.block
        self._observer.restored(lease.plan, from_disk, started)
        return cache

    def _planner(self, keys: Keys, limit: int | None = None) -> Planner:
        if keys.refusal:
            return super()._planner(keys, limit)

        def planner(geometry, prompt_length, presence) -> Plan:
            blocks = len(presence.history) if limit is None else limit // geometry.block
            return plan_hash_only(geometry, prompt_length, presence.first(blocks))

        return planner

    def _shortest(self, disk: bool) -> int:
        del disk
        return self.spec.block

    def _checked_policy(self, host_bytes: int, least: int) -> Policy:
        del host_bytes, least
        return self.policy
