"""PrefixStore: cross-request reuse where a key match is only a candidate (DESIGN §6)."""

import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Mapping

import numpy as np

from hetero_kv import validate
from hetero_kv.arguments import check_callable, check_integer, check_type, is_integer
from hetero_kv.contract import CacheSpec
from hetero_kv.pages.brought import nothing
from hetero_kv.prefix import observe
from hetero_kv.prefix.costs import Costs
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.explain import Explanation, component_rows
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.identity import Identity, describe_leaves
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, Group, Node
from hetero_kv.prefix.keys import Digest, Keys, read_root, sha256
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.observe import Clock, Observer
from hetero_kv.prefix.payload import ArrayPayload, label
from hetero_kv.prefix.plan import DISK, HOST, Geometry, Plan, Planner, Reason, plan
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.quotas import Quotas
from hetero_kv.prefix.report import Published
from hetero_kv.prefix.restore import Delivered, Fetcher
from hetero_kv.prefix.selftest import shortest_resumable
from hetero_kv.prefix.tiered import TieredCatalog
from hetero_kv.prefix.transfer import transfer_for
from hetero_kv.prefix.upkeep import Upkeep
from hetero_kv.state import Cache

Extra = Mapping[str, object] | None


class PrefixStore(Upkeep):
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
        quotas: what each tenant may hold, on every tier; no limits by default.
        epochs_kept: of how many earlier epochs of the weights entries are retained, see
            `advance_epoch`; also of those found on disk. 0: of none.
        costs: seconds of computing, replaying and reading, by which routes are chosen. None: what
            can be resumed is resumed, by the way that runs the fewest tokens.
        digest: the hash of block keys; tests cut it short.
        clock: seconds, for latencies and ages.

    Attributes:
        granularity: G, tokens; every resumable length is a multiple of it.
        minimum_resumable: the shortest prefix that is ever resumed under this policy and these
            costs, in tokens.
        warnings: what works but is hardly meant.

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
        costs: Costs | None = None,
        quotas: Quotas | None = None,
        epochs_kept: int = 1,
        digest: Digest = sha256,
        clock: Clock = time.monotonic,
    ):
        check_type("spec", spec, CacheSpec, "a model's cache_spec")
        check_type("identity", identity, Identity, "make it with Identity.of(spec, …)")
        if costs is not None:
            check_type("costs", costs, Costs, "give Costs(…) or None")
        if quotas is not None:
            check_type("quotas", quotas, Quotas, "give Quotas(…) or None")
        check_callable("digest", digest)
        check_callable("clock", clock)
        if not isinstance(disk_dir, str | os.PathLike | None):
            raise ValueError(f"disk_dir is a directory's path or None, got {disk_dir!r}")
        if (disk_dir is None) != (disk_bytes == 0):
            raise ValueError(f"a disk tier needs both, got {disk_dir=} and {disk_bytes=}")
        if disk_bytes and costs is not None and costs.disk is None:
            raise ValueError(f"a store with a disk needs what reading it costs, got {costs}")
        if identity.block != spec.block:
            raise ValueError(f"{identity.block=} is not {spec.block=}: use Identity.of(spec, …)")
        _check_identity(spec, identity)
        if disk_dir is not None and not str(disk_dir):
            raise ValueError("disk_dir is empty: name a directory, or leave it out")
        if not isinstance(policy, Policy | str):
            raise ValueError(f"policy is a Policy or a name such as 'fork/lru', got {policy!r}")
        for name, size in (("host_bytes", host_bytes), ("disk_bytes", disk_bytes)):
            if not is_integer(size):
                raise ValueError(f"{name} is an integer number of bytes, got {size!r}")
        check_integer("epochs_kept", epochs_kept, 0)
        self.spec = spec
        self.identity = identity
        self.policy = Policy.named(policy) if isinstance(policy, str) else policy
        self.costs = costs
        self.geometry = Geometry.of(spec)
        self.granularity = spec.granularity
        self.transfer = transfer_for(spec)
        self.epochs_kept = epochs_kept
        self.counters = observe.counters()
        self._observer = Observer(self.counters, self.geometry, clock)
        self.disk: DiskTier | None = None
        self.disk_failure = ""
        self.warnings: tuple[str, ...] = ()
        self.minimum_resumable = self._shortest(disk_bytes > 0)
        # With a disk, what host memory has no room for may come from there.
        least = spec.minimum_resumable if disk_bytes else self.minimum_resumable
        kept = self._checked_policy(host_bytes, least)
        if disk_dir is not None:
            self._open_disk(disk_dir, disk_bytes)
        tiers = (HostTier(host_bytes), kept, self.counters, self.disk)
        self.catalog = TieredCatalog(self.geometry, *tiers, quotas, clock)
        self._fetcher = Fetcher(
            self.catalog,
            self.disk,
            self.transfer,
            self.counters,
            self._planner,
            lambda: self.epoch,
        )
        self._digest = digest
        self._closed = False
        self._load()

    # -- reading -------------------------------------------------------------------------------

    def largest_boundary(self, length: int) -> int:
        """The largest length that a prompt of `length` tokens can resume at, if all is stored."""
        return self.spec.largest_boundary(length)

    def lookup(
        self, tokens: np.ndarray, tenant: str = "", extra: Extra = None, *, wait: float = 0.0
    ) -> Lease:
        """How far the prompt i32[n] can be resumed; pins what it promises until released.

        `extra` is described at `keys.block_keys`. An uncacheable prompt gets an empty lease that
        says why.

        wait: seconds to wait for another open lease that is computing this prompt's prefix, as
            `self.wait` does. 0: the lease's `pending` says whether there is one.
        """
        self._check_open()
        if not wait >= 0:
            raise ValueError(f"wait is a number of seconds >= 0, got {wait!r}")
        started = self._observer.clock()
        keys = self._keys(tokens, tenant, extra)
        lease = self.catalog.open(keys, keys.length, self._planner(keys))
        if wait > 0 and lease.following is not None:
            self._wait(lease, wait)
        self._observer.looked_up(lease.plan, lease.prompt_length, started)
        return lease

    def wait(self, lease: Lease, timeout: float) -> bool:
        """Waits for what other open leases publish of this lease's prompt; plans anew with it.

        True: there is nothing to wait for (any more). The lease may then be the leader, that is,
        the one that the others wait for: one of them, if the leader before gave up. False: the
        timeout (seconds) is over. With a timeout of 0 this polls; otherwise the lease's request is
        taken to go ahead, with what is published so far.
        """
        self._check_open()
        if lease.released:
            raise ValueError("the lease is released: wait inside its with block")
        before = lease.candidate_length, lease.resumable_length
        done = self._wait(lease, timeout)
        after = lease.candidate_length, lease.resumable_length
        self.counters.add("candidate_tokens_total", max(0, after[0] - before[0]))
        self.counters.add("resumable_tokens_total", max(0, after[1] - before[1]))
        return done

    def _wait(self, lease: Lease, timeout: float) -> bool:
        renew = functools.partial(
            self.catalog.reopen, lease, self._planner(lease.keys), follow=True
        )
        return self.catalog.flights.wait(lease, timeout, renew)

    def restore(self, lease: Lease, cache: Cache, row: int = 0, held: int = 0) -> Cache:
        """The cache with row `row` standing at the length really restored; copies everything.

        The cache given is donated: use the returned one. What was fetched defines the length: if
        an object turns out stale or damaged it is dropped and one shorter plan is made, at the
        worst a cold start at length 0, as for a lease of another epoch of the weights than the
        present one. The lease's properties tell the plan that was carried out.
        If `lease.replay` is not None, windows and tails are empty and their evidence is reset:
        run `model.replay(params, tokens, cache, *lease.replay)` before anything else. If
        `lease.approximate`, what follows is not what a cold run computes, and is never published.

        held: leading blocks whose History the row has in sealed pages already, by the same keys;
        they are not fetched. Windows and tails always are. `lease.brought` is what the first call
        that reads the row compares it with, see pages/brought.py.
        """
        self._check_open()
        self._check_row(cache, row)
        self.transfer.check(cache)
        check_integer("held", held, 0)
        if held and cache.pages is None:
            raise ValueError(f"{held=} blocks are in pages: a contiguous cache has none")
        if lease.released:
            raise ValueError("the lease is released: restore inside its with block")
        started = self._observer.clock()
        history, checkpoint = self._fetcher.fetch(lease, cache.capacity, held)
        length = lease.resumable_length
        held = min(held, self.spec.blocks_in(length))
        cache, sums = self.transfer.write(
            cache,
            np.int32(row),
            np.int32(length),
            # Until the replay has run there is nothing to be published, evidence or not.
            np.int32(0 if lease.replay else length),
            self.transfer.stage_history([x.payload for x in history], cache.capacity, held=held),
            self.transfer.stage_checkpoint(checkpoint and checkpoint.payload),
            np.int32(held),
        )
        lease.brought = nothing(self.spec)._replace(
            sums=sums,
            first=np.int32(held),
            tokens=np.int32(length),
            state=np.bool_(checkpoint is not None),
        )
        if lease.approximate:
            self.counters.add("approximate_restores_total")
        self._count_bytes("restored_bytes_total", history, checkpoint)
        from_disk = sum(x.tier == DISK for x in history) * self.spec.block
        state = checkpoint.tier if checkpoint else HOST
        self._observer.restored(lease.plan, from_disk, started, state)
        return cache

    def explain(self, tokens: np.ndarray, tenant: str = "", extra: Extra = None) -> Explanation:
        """Why a lookup now would be shortened, per component, as data and (`str`) as a table."""
        self._check_open()
        keys = self._keys(tokens, tenant, extra)
        found = self.catalog.examine(keys, keys.length, self._planner(keys))
        run = self.policy.replay_tokens(self.geometry)
        return Explanation(
            keys.length,
            found.plan,
            self.granularity,
            self.minimum_resumable,
            self.spec.largest_boundary(keys.length),
            component_rows(self.spec, self.geometry, found.plan, found.presence, run),
            self._facts(tenant),
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
        epoch: bytes | None = None,
    ) -> Published:
        """Stores what row `row` holds of the prompt i32[n]; the cache stands at P <= n.

        History groups of the complete blocks within the grid length, and the checkpoint if P is
        the grid length and one of the points. State off the chunk grid or made by decode is not
        exact and is left out. Nothing is stored if the evidence disagrees with the lengths. The
        cache is only read, by copy: it may be donated as soon as this returns.

        points: checkpoint points (`lease.checkpoint_points`); None: those that the policy
            chooses for the prompt, knowing of no earlier match.
        epoch: that of the weights which have computed the row (`lease.epoch`, or `self.epoch` as
            it was when the row began); of another epoch than the present one nothing is stored.
            None: the present one is meant, unless a lease of another epoch is open: the row could
            be its. A request that outlives its lease and a change of weights must give it.
        """
        self._check_open()
        self._check_row(cache, row)
        self.transfer.check(cache)
        if points is not None:
            _check_points(points)
        started = self._observer.clock()
        keys = self._keys(tokens, tenant, extra)
        if keys.refusal:
            return self._refused("not_cacheable")
        # The keys carry the epoch, so a change from here on does no harm.
        now = read_root(keys.root_content).epoch
        if epoch not in (None, now) or (epoch is None and self.catalog.serves_others(now)):
            return self._refused("epoch")
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
        blocks = self.spec.blocks_in(grid_length)
        found = self._store(keys, cache, row, length, blocks, at_point)
        self._observer.published(started, *found.reasons)
        return found

    def _store(
        self, keys: Keys, cache: Cache, row: int, length: int, blocks: int, at_point: bool
    ) -> Published:
        path = self.catalog.hold(keys, blocks)
        try:
            known, reason = len(path), ""
            if known < blocks:
                buffers = self.transfer.read_history(cache, row, known, blocks)
                run = [self._seal(HISTORY, keys, i, x) for i, x in enumerate(buffers, known)]
                reason = self.catalog.add_history(keys, path, *run)
                self._count_published(run[: len(path) - known])
            stored = False
            if at_point and not reason and self.geometry.checkpoint:
                stored = self.catalog.has_checkpoint(path)
                if not stored:
                    buffer = self.transfer.read_checkpoint(cache, row)
                    sealed = self._seal(CHECKPOINT, keys, blocks - 1, buffer)
                    reason = self.catalog.add_checkpoint(path, sealed)
                    stored = not reason
                    self._count_published([sealed] if stored else [])
            if self.costs is not None and self.disk is not None:
                self._keep_warm(keys, path[:known], cache, row, stored and known == len(path))
        finally:
            self.catalog.let_go(path)
        reasons = (reason,) if reason else ()
        return Published(length, len(path), len(path) - known, stored, reasons)

    def _keep_warm(
        self, keys: Keys, path: list[Node], cache: Cache, row: int, at_point: bool
    ) -> None:
        """Puts into host memory what was computed again because the disk is slow.

        Otherwise it would be computed by every request to come.
        """
        groups = [x.history for x in path]
        cold = [i for i, x in enumerate(groups) if x is not None and not x.on_host]
        warm: list[tuple[Group, ArrayPayload]] = []
        if cold:
            buffers = self.transfer.read_history(cache, row, cold[0], cold[-1] + 1)
            for i in cold:
                sealed = self._seal(HISTORY, keys, i, buffers[i - cold[0]])
                warm.append((groups[i], sealed))
        state = path[-1].checkpoint if path and at_point else None
        if state is not None and not state.on_host:
            buffer = self.transfer.read_checkpoint(cache, row)
            warm.append((state, self._seal(CHECKPOINT, keys, len(path) - 1, buffer)))
        if warm:
            self.catalog.promote(warm)

    # -- inside --------------------------------------------------------------------------------

    def _shortest(self, disk: bool) -> int:
        """The self-test: from how many tokens on is anything ever resumed?"""
        shortest = shortest_resumable(self.geometry, self.policy, self.costs)
        if disk and self.costs is not None:
            from_disk = shortest_resumable(self.geometry, self.policy, self.costs, on_disk=True)
            if not from_disk:
                self.warnings = ("with these costs nothing is ever read from disk",)
            shortest = min(shortest, from_disk) or max(shortest, from_disk)
        if shortest:
            return shortest
        if self.costs is not None and shortest_resumable(self.geometry, self.policy):
            raise ValueError(
                f"by {self.costs} computing is never slower than resuming, so the best possible "
                "hit is 0"
            )
        raise ValueError(
            f"{self.policy.checkpoints} stores no checkpoints and nothing can be replayed, so the "
            "best possible hit is 0"
        )

    def _checked_policy(self, host_bytes: int, least: int) -> Policy:
        """The policy, after a self-test: can a prefix of `least` tokens be stored at all?"""
        blocks = self.spec.blocks_in(least)
        history = sum(self.transfer.history_layout(x).nbytes for x in range(blocks))
        replays = self.policy.replay_tokens(self.geometry) < math.inf
        state = 0 if replays else self.transfer.checkpoint_layout.nbytes
        if host_bytes < history + state or host_bytes < 1:
            raise ValueError(
                f"{host_bytes=} cannot hold the shortest resumable prefix "
                f"({least} tokens: {history} bytes of history + {state} of "
                "one checkpoint), so the best possible hit is 0"
            )
        # A kind whose share cannot hold one minimum prefix would never keep anything.
        share = min(max(self.policy.checkpoint_share, state / host_bytes), 1 - history / host_bytes)
        return dataclasses.replace(self.policy, checkpoint_share=share)

    def _planner(self, keys: Keys, limit: int | None = None) -> Planner:
        if keys.refusal:
            reason = Reason("", "not_cacheable", 0, 0, keys.refusal)
            return lambda geometry, length, presence: Plan(
                routes=dict.fromkeys((*geometry.history, *geometry.checkpoint), "none"),
                reasons=(reason._replace(before=geometry.largest_boundary(length)),),
            )
        placed = self.policy.checkpoints
        return functools.partial(
            plan, replay=placed.replay, bound=placed.bound, limit=limit, costs=self.costs
        )

    def _seal(self, kind: str, keys: Keys, block: int, buffer: np.ndarray) -> ArrayPayload:
        layout = self.transfer.layout_of(kind, block + 1)
        return ArrayPayload.seal(layout, label(kind, keys.keys[block], block + 1), buffer)

    def _refused(self, code: str, *details: str, length: int = 0) -> Published:
        self.counters.add("publish_refused_total", reason=code)
        return Published(length=length, reasons=(code, *details))

    def _count_published(self, payloads: list[ArrayPayload]) -> None:
        for payload in payloads:
            for component, start, stop in payload.layout.components:
                self.counters.add("published_bytes_total", stop - start, component=component)

    def _count_bytes(
        self, name: str, history: list[Delivered], checkpoint: Delivered | None
    ) -> None:
        for payload, tier in history + ([checkpoint] if checkpoint else []):
            for component, start, stop in payload.layout.components:
                self.counters.add(name, stop - start, component=component, tier=tier)

    @staticmethod
    def _check_row(cache: Cache, row: int) -> None:
        # JAX would clamp a bad index to a neighbour's row, and cut a fraction off.
        if not is_integer(row):
            raise ValueError(f"row is an integer, got {row!r}")
        if not 0 <= row < cache.batch:
            raise ValueError(f"{row=} is not within {cache.batch=}")


def _check_points(points: tuple[int, ...]) -> None:
    """Raises ValueError for what are no lengths."""
    many = isinstance(points, tuple | list | set | frozenset)
    if not many or not all(map(is_integer, points)):
        raise ValueError(
            f"points are lengths in tokens, such as (128, 256), got {points!r}: give a tuple of "
            "integers, as lease.checkpoint_points, or None"
        )


def _check_identity(spec: CacheSpec, identity: Identity) -> None:
    """Raises ValueError for an identity that was made of another model's cache."""
    if identity.leaves and identity.leaves != describe_leaves(spec):
        raise ValueError(
            "the identity was made for other cached leaves (shapes, dtypes or layers) than the "
            "spec's: use Identity.of(spec, …) with this spec"
        )
    if identity.regime == "exact" and identity.leaves and identity.chunk != spec.chunk:
        raise ValueError(f"{identity.chunk=} is not {spec.chunk=}: use Identity.of(spec, …)")
