"""PrefixStore: cross-request reuse where a key match is only a candidate (DESIGN §6)."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

import numpy as np

from hetero_kv import validate
from hetero_kv.contract import CacheSpec
from hetero_kv.metrics import Counters, series
from hetero_kv.prefix.disk.results import Flushed
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.host import Fetched, HostTier
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS, Group
from hetero_kv.prefix.keys import Digest, Keys, block_keys, sha256
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, label
from hetero_kv.prefix.plan import Geometry, Plan, Planner, Reason, plan
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.report import Explanation, Published
from hetero_kv.prefix.restore import Delivered, Fetcher
from hetero_kv.prefix.tiered import TieredCatalog
from hetero_kv.prefix.transfer import transfer_for
from hetero_kv.state import Cache

Extra = Mapping[str, object] | None


class PrefixStore:
    """Prefixes of one model in host memory, published, looked up and restored by contract.

    Args:
        spec: the model's cache spec.
        identity: what keys vouch for besides tokens.
        host_bytes: bytes that history and checkpoint groups may hold together. Index entries
            (about 4 * B + 500 bytes a block) come on top.
        disk_dir, disk_bytes: a directory of which this store is the only writer, and the bytes
            that its files may have; none by default. What waits to be written stays in memory
            (at most 64 MiB) on top of `host_bytes`. If the directory cannot be used, the store
            goes on without it: `disk_failure` says why.
        policy: where checkpoints go, and eviction; a name as in `Policy.named` will do.
        digest: the hash of block keys; tests cut it short.

    Raises:
        LockedError: the directory has a writer already.
        ValueError: also for a configuration that could never resume anything.
    """

    def __init__(
        self,
        spec: CacheSpec,
        identity: Identity,
        *,
        host_bytes: int,
        disk_dir: pathlib.Path | str | None = None,
        disk_bytes: int = 0,
        policy: Policy | str = "full",
        digest: Digest = sha256,
    ):
        if (disk_dir is None) != (disk_bytes == 0):
            raise ValueError(f"a disk tier needs both, got {disk_dir=} and {disk_bytes=}")
        if identity.block != spec.block:
            raise ValueError(f"{identity.block=} is not {spec.block=}: use Identity.of(spec, …)")
        self.spec = spec
        self.identity = identity
        self.policy = Policy.named(policy) if isinstance(policy, str) else policy
        self.geometry = Geometry.of(spec)
        self.transfer = transfer_for(spec)
        self.counters = Counters()
        self.disk: DiskTier | None = None
        self.disk_failure = ""
        kept = self._checked_policy(host_bytes)
        if disk_dir is not None:
            self._open_disk(disk_dir, disk_bytes)
        tier = HostTier(host_bytes)
        self.catalog = TieredCatalog(self.geometry, tier, kept, self.counters, self.disk)
        if self.disk is not None:
            self.catalog.load(digest, lambda *group: self._layout_of(*group).nbytes)
        self._fetcher = Fetcher(
            self.catalog, self.disk, self.transfer, self.counters, self._planner
        )
        self._digest = digest
        self._closed = False

    # -- reading -------------------------------------------------------------------------------

    def lookup(self, tokens: np.ndarray, tenant: str = "", extra: Extra = None) -> Lease:
        """How far the prompt i32[n] can be resumed; pins what it promises until released.

        `extra` is described at `keys.block_keys`. An uncacheable prompt gets an empty lease that
        says why.
        """
        self._check_open()
        keys = self._keys(tokens, tenant, extra)
        lease = self.catalog.open(keys, keys.length, self._planner(keys))
        self.counters.add("lookups_total")
        self.counters.add("prompt_tokens_total", lease.prompt_length)
        self.counters.add("candidate_tokens_total", lease.candidate_length)
        self.counters.add("resumable_tokens_total", lease.resumable_length)
        for reason in lease.reasons:
            self.counters.add("shortened_total", component=reason.component, code=reason.code)
        return lease

    def restore(self, lease: Lease, cache: Cache, row: int = 0) -> Cache:
        """The cache with row `row` standing at the length really restored; copies everything.

        The cache given is donated: use the returned one. What was fetched defines the length: if
        an object turns out stale or damaged it is dropped and one shorter plan is made, at the
        worst a cold start at length 0. The lease's properties tell the plan that was carried out.
        If `lease.replay` is not None, windows and tails are empty and their evidence is reset:
        run `model.replay(params, tokens, cache, *lease.replay)` before anything else.
        """
        self._check_open()
        self._check_row(cache, row)
        if lease.released:
            raise ValueError("the lease is released: restore inside its with block")
        history, checkpoint = self._fetcher.fetch(lease, cache.capacity)
        length = lease.resumable_length
        cache = self.transfer.write(
            cache,
            np.int32(row),
            np.int32(length),
            self.transfer.stage_history([x.payload for x in history], cache.capacity),
            self.transfer.stage_checkpoint(checkpoint and checkpoint.payload),
        )
        start, stop = lease.replay or (0, 0)
        self.counters.add("restores_total")
        self.counters.add("restored_tokens_total", length - (stop - start))
        self.counters.add("replay_tokens_total", stop - start)
        self._count_bytes("restored_bytes_total", history, checkpoint)
        return cache

    def explain(self, tokens: np.ndarray, tenant: str = "", extra: Extra = None) -> Explanation:
        """Why a lookup now would be shortened, per component, as data and (`str`) as text."""
        self._check_open()
        keys = self._keys(tokens, tenant, extra)
        found = self.catalog.explain(keys, keys.length, self._planner(keys))
        return Explanation(
            keys.length,
            found,
            self.spec.granularity,
            self.spec.minimum_resumable,
            self.spec.largest_boundary(keys.length),
        )

    # -- writing -------------------------------------------------------------------------------

    def publish(
        self,
        tokens: np.ndarray,
        cache: Cache,
        row: int = 0,
        tenant: str = "",
        extra: Extra = None,
        points: tuple[int, ...] | None = None,
    ) -> Published:
        """Stores what row `row` holds of the prompt i32[n]; the cache stands at P <= n.

        History groups of the complete blocks within the grid length, and the checkpoint if P is
        the grid length and one of the points. State off the chunk grid or made by decode is not
        exact and is left out. Nothing is stored if the evidence disagrees with the lengths. The
        cache is only read, by copy: it may be donated as soon as this returns.

        points: checkpoint points (`lease.checkpoint_points`); None: those that the policy
            chooses for the prompt, knowing of no earlier match.
        """
        self._check_open()
        self._check_row(cache, row)
        keys = self._keys(tokens, tenant, extra)
        if keys.refusal:
            return self._refused("not_cacheable")
        length, grid_length, verdict = self.transfer.inspect(cache, np.int32(row))
        if not verdict.ok[0]:
            wrong = validate.describe(self.spec, verdict, 0)
            return self._refused("evidence", *wrong, length=length)
        if length > keys.length:
            return self._refused("length_beyond_tokens", length=length)
        if points is None:
            points = self.policy.checkpoints.points(keys.length, self.geometry)
        at_point = length == grid_length and length in points
        at_point &= length > 0 and length % self.spec.granularity == 0
        return self._store(keys, cache, row, length, self.spec.blocks_in(grid_length), at_point)

    def _store(
        self, keys: Keys, cache: Cache, row: int, length: int, blocks: int, at_point: bool
    ) -> Published:
        path = self.catalog.hold(keys, blocks)
        try:
            known, reason = len(path), ""
            if known < blocks:
                buffers = self.transfer.read_history(cache, row, known, blocks)
                for block, buffer in enumerate(buffers, known):
                    sealed = self._seal(HISTORY, keys, block, buffer)
                    reason = self.catalog.add_history(keys, path, sealed)
                    if reason:
                        break
            stored = False
            if at_point and not reason and self.geometry.checkpoint:
                stored = self.catalog.has_checkpoint(path)
                if not stored:
                    buffer = self.transfer.read_checkpoint(cache, row)
                    sealed = self._seal(CHECKPOINT, keys, blocks - 1, buffer)
                    reason = self.catalog.add_checkpoint(path, sealed)
                    stored = not reason
        finally:
            self.catalog.let_go(path)
        if reason:
            self.counters.add("publish_cut_total", reason=reason)
        reasons = (reason,) if reason else ()
        self.counters.add("publishes_total")
        return Published(length, len(path), len(path) - known, stored, reasons)

    # -- upkeep --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Counters and gauges by name; ratios are for the reader to derive."""
        tier, used = self.catalog.tier, self.catalog.used
        gauges = {
            "host_capacity_bytes": tier.capacity,
            "host_free_bytes": tier.free,
            "leases_open": self.catalog.leases,
        }
        if self.disk is not None:
            gauges |= self.disk.metrics()
        for kind in KINDS:
            gauges[series("host_used_bytes", kind=kind)] = used[kind]
        return {**self.counters.snapshot(), **gauges}

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

    def flush(self) -> Flushed:
        """Returns when everything published is as durable as its tiers allow (host: at once).

        This is the acknowledgement: what is on disk then is found again by another store, unless
        `ok` is False. In that case `failure` says why, and what was lost is not offered any more.
        """
        self._check_open()
        return self._flush()

    def clear(self) -> None:
        """Drops everything, leased or not, on disk too; open leases will restore less."""
        self._check_open()
        self.catalog.clear()

    def close(self) -> None:
        """Flushes and gives all memory back; what is on disk stays. Later calls raise."""
        if not self._closed:
            self._closed = True
            self._flush()
            self.catalog.close()
            if self.disk is not None:
                self.disk.close()

    def _flush(self) -> Flushed:
        if self.disk is None:
            return Flushed(True)
        before, left = -1, self.catalog.spill()
        while left and left != before:
            self.disk.write_back()
            before, left = left, self.catalog.spill()
        flushed = self.disk.flush()
        self.catalog.lose(flushed.lost)
        return flushed

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

    # -- inside --------------------------------------------------------------------------------

    def _open_disk(self, directory: pathlib.Path | str, nbytes: int) -> None:
        disk = DiskTier(
            directory, nbytes, self.identity.digest, self._layout_of, counters=self.counters
        )
        if disk.failure:
            self.disk_failure = disk.failure
            self.counters.add("disk_unusable_total", reason=disk.failure)
            return
        self.disk = disk

    def _layout_of(self, kind: str, depth: int) -> GroupLayout:
        if kind == CHECKPOINT:
            return self.transfer.checkpoint_layout
        return self.transfer.history_layout(depth - 1)

    def _checked_policy(self, host_bytes: int) -> Policy:
        """The policy, after a self-test: can a minimum prefix be stored at all?"""
        checkpoints = self.policy.checkpoints
        blocks = self.spec.minimum_resumable // self.spec.block
        history = sum(self.transfer.history_layout(x).nbytes for x in range(blocks))
        state = self._checkpoint_bytes()
        if host_bytes < history + state or host_bytes < 1:
            raise ValueError(
                f"{host_bytes=} cannot hold the shortest resumable prefix "
                f"({self.spec.minimum_resumable} tokens: {history} bytes of history + {state} of "
                "one checkpoint), so the best possible hit is 0"
            )
        never = not checkpoints.points(64 * self.spec.granularity, self.spec)
        if state and never and not self._can_replay():
            raise ValueError(
                f"{checkpoints} stores no checkpoints and nothing can be replayed, so the best "
                "possible hit is 0"
            )
        # A kind whose share cannot hold one minimum prefix would never keep anything.
        share = min(max(self.policy.checkpoint_share, state / host_bytes), 1 - history / host_bytes)
        return dataclasses.replace(self.policy, checkpoint_share=share)

    def _checkpoint_bytes(self) -> int:
        return 0 if self._can_replay() else self.transfer.checkpoint_layout.nbytes

    def _can_replay(self) -> bool:
        return self.policy.checkpoints.replay and self.geometry.replay_length < float("inf")

    def _planner(self, keys: Keys, limit: int | None = None) -> Planner:
        if keys.refusal:
            reason = Reason("", "not_cacheable", 0, 0, keys.refusal)
            return lambda geometry, length, presence: Plan(
                routes=dict.fromkeys((*geometry.history, *geometry.checkpoint), "none"),
                reasons=(dataclasses.replace(reason, before=geometry.largest_boundary(length)),),
            )
        return functools.partial(plan, replay=self.policy.checkpoints.replay, limit=limit)

    def _seal(self, kind: str, keys: Keys, block: int, buffer: np.ndarray) -> ArrayPayload:
        layout = self._layout_of(kind, block + 1)
        return ArrayPayload.seal(layout, label(kind, keys.keys[block], block + 1), buffer)

    def _keys(self, tokens: np.ndarray, tenant: str, extra: Extra) -> Keys:
        return block_keys(self.identity, tokens, tenant, extra, self._digest)

    def _refused(self, code: str, *details: str, length: int = 0) -> Published:
        self.counters.add("publish_refused_total", reason=code)
        return Published(length=length, reasons=(code, *details))

    def _count_bytes(
        self, name: str, history: list[Delivered], checkpoint: Delivered | None
    ) -> None:
        for payload, tier in history + ([checkpoint] if checkpoint else []):
            for component, start, stop in payload.layout.components:
                self.counters.add(name, stop - start, component=component, tier=tier)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")

    @staticmethod
    def _check_row(cache: Cache, row: int) -> None:
        # JAX would clamp a bad index to a neighbour's row.
        if not 0 <= row < cache.batch:
            raise ValueError(f"{row=} is not within {cache.batch=}")
