"""A machine that drives a store at random, beside a model that knows only what was published.

The model gives an upper bound of every hit. As long as nothing was lost (room enough, nothing
damaged, no tier that fails) it is reached, also after a restart; and whatever happens, each leaf
holds what a cold run of that tenant's tokens would have put there, and both ledgers are exact.
"""

import collections
import pathlib
import shutil
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hetero_kv import state
from hetero_kv.prefix.disk.tier import SMALLEST
from hetero_kv.prefix.policy import EVICTIONS
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores, world
from tests.hetero_kv.prefix.world import CAPACITY, PLENTY, PROMPTS, SPEC, WHO, B, G

BLOCK, STATE = 96, 528  # bytes of a group of each kind
HOSTS = (PLENTY, PLENTY, 2 * BLOCK + STATE, 12 * BLOCK + 3 * STATE, 25 * BLOCK + 8 * STATE)
DISKS = (PLENTY, PLENTY, PLENTY, SMALLEST, SMALLEST + (1 << 13), SMALLEST + (1 << 15))
POLICIES = ("full", "end", "fork", "periodic:2")
ROWS = 2

whose = st.sampled_from((WHO[0], WHO[0], WHO[0], *WHO[1:]))
rows = st.integers(0, ROWS - 1)
numbers = st.integers(0, 1 << 20)


class Model:
    """Whose prefixes may be found, and at which lengths a checkpoint may be."""

    def __init__(self):
        self.history: set[tuple] = set()
        self.checkpoints: set[tuple] = set()

    def put(self, who, tokens, blocks, point) -> int:
        """Returns how many of the blocks are new."""
        keys = {(who, tuple(tokens[: B * (i + 1)])) for i in range(blocks)}
        new = len(keys - self.history)
        self.history |= keys
        if point:
            self.checkpoints.add((who, tuple(tokens[:point])))
        return new

    def candidate(self, who, tokens) -> int:
        length = 0
        while length + B < len(tokens) and (who, tuple(tokens[: length + B])) in self.history:
            length += B
        return length

    def bound(self, who, tokens) -> int:
        top = self.candidate(who, tokens)
        ends = (x for x in range(top // G * G, 0, -G))
        return next((x for x in ends if (who, tuple(tokens[:x])) in self.checkpoints), 0)


class Held:
    """A lease that is kept for later."""

    def __init__(self, lease, who, tokens, safe):
        self.lease, self.who, self.tokens = lease, who, tokens
        self.promised = lease.resumable_length
        self.safe = safe  # nothing was cleared or broken since, or may be broken


class Histories(RuleBasedStateMachine):
    """One store, with what it may be put to."""

    disk = False
    seen: collections.Counter  # events, over all histories

    def __init__(self):
        super().__init__()
        self.store = None
        self.directory = None

    @initialize(
        host=st.sampled_from(HOSTS),
        disk=st.sampled_from(DISKS),
        policy=st.sampled_from(POLICIES),
        order=st.sampled_from(sorted(EVICTIONS)),
        first=st.lists(st.integers(0, len(PROMPTS) - 1), max_size=4),
    )
    def start(self, host, disk, policy, order, first):
        self.options = {"policy": f"{policy}/{order}"}
        self.full = policy == "full"
        self.files = world.Files()
        if self.disk:
            self.parent = tempfile.TemporaryDirectory(dir=self.root)
            self.directory = pathlib.Path(self.parent.name) / "0"
        self.model = Model()
        self.leases: list[Held] = []
        self.recent: list[np.ndarray] = []
        self.acknowledged: dict[tuple, int] = {}
        self.hidden = False  # damage that nobody has met yet
        self._open(host, disk)
        self.exact = self.roomy
        self.cache = state.init(SPEC, ROWS, CAPACITY)
        self.stands = [(WHO[0], PROMPTS[0])] * ROWS
        for which in first:
            self.publish(WHO[0], 2 * which, CAPACITY, True, 0, 0)

    def _open(self, host, disk):
        self.roomy = host == PLENTY and (not self.disk or disk == PLENTY)
        self.limit, self.room_on_disk = disk, disk == PLENTY
        self.store = world.opened(self.directory, self.files, host, disk, **self.options)
        assert not self.store.disk_failure
        self.before = collections.Counter()
        self.files.failed.clear()

    # -- requests ------------------------------------------------------------------------------

    def _prompt(self, which) -> np.ndarray:
        """Every second time one that was used before."""
        which, again = divmod(which, 2)
        if again and self.recent:
            return self.recent[which % len(self.recent)]
        self.recent.append(PROMPTS[which % len(PROMPTS)])
        return self.recent[-1]

    @rule(
        who=whose,
        which=numbers,
        stop=st.integers(0, CAPACITY),
        pointed=st.booleans(),
        skipped=st.integers(0, 3),
        decoded=st.integers(0, 3),
    )
    def publish(self, who, which, stop, pointed, skipped, decoded):
        """What a cold prefill has at its chunks' ends, and at the end tokens from decode too."""
        tokens = self._prompt(which)
        stop = min(stop, len(tokens))
        decoded = min(decoded, len(tokens) - stop)
        points = tuple(range(G, CAPACITY + 1, G)) if pointed else ()
        for length in (*range(G * (1 + skipped), stop, G), stop):
            more = decoded if length == stop else 0
            cache = world.cold(who, tokens, length, more)
            told = self.store.publish(tokens, cache, points=points, **who.arguments)
            self._published(told, who, tokens, length + more, length // G * G, points)
        for held in self.leases:
            self._restore(held, stop % ROWS)
            self.seen["restored later"] += held.promised > 0

    def _published(self, told, who, tokens, length, grid, points):
        point = length if length == grid and length in points else 0
        new = self.model.put(who, tokens, grid // B, point)
        assert told.length == length
        assert told.new_blocks <= told.blocks <= grid // B
        assert told.checkpoint <= bool(point)
        if self.exact:
            assert (told.blocks, told.new_blocks, told.reasons) == (grid // B, new, ())
            assert told.checkpoint == bool(point)
        self.seen["cut"] += bool(told.reasons)
        self.seen["published"] += told.new_blocks

    @rule(requests=st.lists(st.tuples(whose, numbers, rows, st.integers(0, CAPACITY)), max_size=3))
    def serve(self, requests):
        """Requests as an engine would run them; each may end anywhere."""
        for who, which, row, stop in requests:
            self._serve(who, self._prompt(which), row, stop)

    def _serve(self, who, tokens, row, stop):
        with self._lookup(who, tokens) as lease:
            held = Held(lease, who, tokens, not self.hidden)
            self._restore(held, row)
            told = world.contents(who, tokens)
            points = tuple(lease.checkpoint_points)
            if self.full:
                first = lease.resumable_length + G
                assert points == tuple(range(first, len(tokens) + 1, G))
            for end in (*points, len(tokens)):
                if end > stop or end <= world.stands(self.cache, row):
                    continue
                self.cache = synthetic.advance(SPEC, self.cache, row, told, end)
                answer = self.store.publish(tokens, self.cache, row, points=points, **who.arguments)
                self._published(answer, who, tokens, end, end // G * G, points)
            assert world.wrong(self.cache, row, who, tokens) == []

    @rule(who=whose, which=numbers)
    def hold(self, who, which):
        if len(self.leases) < 3:
            tokens = self._prompt(which)
            self.leases.append(Held(self._lookup(who, tokens), who, tokens, not self.hidden))

    @precondition(lambda self: self.leases)
    @rule(which=numbers, row=rows, how=st.sampled_from(["restore", "restore", "leave", "fail"]))
    def use(self, which, row, how):
        """A lease is used, perhaps again, or ends, by an error or not, perhaps unused."""
        held = self.leases[which % len(self.leases)]
        if how == "restore":
            self._restore(held, row)
            self.seen["restored later"] += held.promised > 0
            return
        self.leases.remove(held)
        if how == "fail":
            with pytest.raises(KeyError), held.lease:
                raise KeyError
        held.lease.release()
        with pytest.raises(ValueError, match="released"):
            self.store.restore(held.lease, self.cache)
        self.seen["cancelled"] += 1

    def _lookup(self, who, tokens):
        told = world.resumable(self.store, who, tokens)
        lease = self.store.lookup(tokens, **who.arguments)
        assert lease.resumable_length == told
        assert lease.candidate_length <= self.model.candidate(who, tokens)
        assert lease.resumable_length <= self.model.bound(who, tokens)
        if self.exact:
            assert lease.candidate_length == self.model.candidate(who, tokens)
            assert lease.resumable_length == self.model.bound(who, tokens)
        self.seen["shortened"] += bool(lease.reasons)
        return lease

    def _restore(self, held, row):
        self.cache = self.store.restore(held.lease, self.cache, row)
        self.stands[row] = (held.who, held.tokens)
        length = world.stands(self.cache, row)
        assert length == held.lease.resumable_length <= held.lease.candidate_length
        assert length <= self.model.bound(held.who, held.tokens)
        if held.safe:
            assert length == held.promised  # pins hold; a plan made anew may even be longer
        held.promised = length
        assert world.wrong(self.cache, row, held.who, held.tokens) == []
        self.seen["hit"] += length > 0
        self.seen["hit of others' blocks"] += length > 0 and len(self.model.history) > length // B

    # -- faults --------------------------------------------------------------------------------

    def _broken(self):
        self.exact = False
        self.acknowledged.clear()
        for held in self.leases:
            held.safe = False

    @rule(
        which=numbers,
        at=numbers,
        where=st.sampled_from(["host", "host", "disk", "swap"]),
        flushed=st.booleans(),
        met=st.booleans(),
    )
    def damage(self, which, at, where, flushed, met):
        """A byte changes, perhaps in one of two copies; perhaps a request meets it at once."""
        if flushed:
            self.flush()
        groups = [x for x in self.store.catalog.groups() if x.nbytes]
        if met and self.recent:  # one that the request will need
            with self.store.lookup(self.recent[-1], **WHO[0].arguments) as lease:
                groups = lease.groups() or groups
        if not groups:
            return
        group = groups[which % len(groups)]
        if where == "disk":
            done = world.flip_on_disk(self.store, group, at)
        elif where == "host":
            done = world.flip(self.store, group, at)
        else:
            done = self._swap(group, groups[at % len(groups)])
        if done:
            self._broken()
            self.hidden = True
            self.seen[f"damage: {where}"] += 1
        for tokens in self.recent[-3:] if done and met else ():
            self._serve(WHO[0], tokens, at % ROWS, 0)

    def _swap(self, one, other) -> bool:
        alike = one is not other and one.kind == other.kind and one.nbytes == other.nbytes
        if not (alike and one.on_host and other.on_host and one.nbytes):
            return False
        payloads = self.store.catalog.tier._payloads
        a, b = one.ticket.slot, other.ticket.slot
        payloads[a], payloads[b] = payloads[b], payloads[a]
        return True

    @precondition(lambda self: self.disk)
    @rule(operation=st.sampled_from(["read", "write", "sync", "create", "truncate"]))
    def the_disk_fails(self, operation):
        self.files.failing ^= {operation}
        if operation in self.files.failing:
            self._broken()
            self.hidden = True

    # -- upkeep --------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["flush", "flush", "verify", "clear"]))
    def upkeep(self, what):
        getattr(self, what)()

    def flush(self):
        flushed = self.store.flush()
        if self.exact:
            assert flushed.ok
        # What was lost once stays in host memory alone, until it is published again.
        safe = all(x.disk is not None for x in self.store.catalog.groups())
        if flushed.ok and safe and not self.hidden and self.room_on_disk:
            self.acknowledged = {
                (who, i): world.resumable(self.store, who, tokens)
                for who in WHO
                for i, tokens in enumerate(PROMPTS)
            }

    @precondition(lambda self: self.disk)
    @rule(
        host=st.sampled_from(HOSTS),
        disk=st.sampled_from((None, None, None, *DISKS)),
        crash=st.booleans(),
        flushed=st.sampled_from([True, True, False]),
    )
    def start_again(self, host, disk, crash, flushed):
        """Perhaps with other limits, after a clean end or none."""
        disk = disk or self.limit
        if flushed:
            self.flush()
        old, self.directory = self.directory, self.directory.with_name(f"{self._next()}")
        self.files.failing.clear()
        # A record that was written in part, and could be neither cut nor marked, is met after a
        # crash: by its checksum.
        torn = crash and "truncate" in self.files.failed
        known = {(x.kind, x.node.key) for x in self.store.catalog.groups()}
        if crash:
            shutil.copytree(old, self.directory)
            self.store.close()
        else:
            self.store.close()
            shutil.copytree(old, self.directory)
            self.acknowledged = self.acknowledged if self.room_on_disk else {}
        shutil.rmtree(old)
        for held in self.leases:
            held.lease.release()
        self.leases.clear()
        if crash and self.exact and not self.acknowledged:
            self.exact = False
        expected = self.acknowledged if disk == PLENTY else {}
        had_all = self.exact and not crash and self.room_on_disk
        self._open(host, disk)
        found = {(x.kind, x.node.key) for x in self.store.catalog.groups()}
        assert found <= known or torn
        self.hidden |= torn
        for (who, i), length in expected.items():
            assert world.resumable(self.store, who, PROMPTS[i]) >= length
        self.exact = had_all and self.roomy
        if disk != PLENTY:
            self.acknowledged = {}
        self.seen["found again"] += len(found)
        self.seen["acknowledged"] += any(expected.values())

    def _next(self) -> int:
        return int(self.directory.name) + 1

    def clear(self):
        self.store.clear()
        assert not self.store.catalog.groups()
        assert (
            stores.plain_metrics(self.store)["host_free_bytes"] == self.store.catalog.tier.capacity
        )
        self._broken()
        self.model = Model()
        self.exact = self.roomy and not self.files.failing

    def verify(self):
        """Finds and drops what is damaged: after it nothing is."""
        self.files.failing.clear()
        found = self.store.verify()
        assert not found or self.hidden
        self.seen["verify found"] += len(found)
        self.hidden = False

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def is_sound(self):
        if self.store is None:
            return
        world.healthy(self.store)
        if not self.hidden:
            assert self.store.verify() == []
        metrics = stores.plain_metrics(self.store)
        assert metrics["leases_open"] == len(self.leases)
        pins = sum(x.pins for x in self.store.catalog.groups())
        held = sum(len(x.lease.groups()) for x in self.leases)
        assert pins <= held
        if all(x.safe for x in self.leases):
            assert pins == held
        for row, (who, tokens) in enumerate(self.stands):
            assert world.wrong(self.cache, row, who, tokens) == []
        now = collections.Counter()
        totals = world.totals(self.store)
        for name in ("evicted", "demoted", "promoted", "dropped", "disk_evicted", "healed"):
            now[name] = totals[f"{name}_total"] + totals[f"{name}_groups_total"]
        for tokens in self.recent[-4:]:
            for who in WHO if self.exact else ():
                assert world.resumable(self.store, who, tokens) == self.model.bound(who, tokens)
        now["disk bytes"] = sum(
            n
            for x, n in metrics.items()
            if x.startswith("restored_bytes_total") and 'tier="disk"' in x
        )
        for operation, count in self.files.failed.items():
            now[f"failed: {operation}"] = count
        self.seen.update(now - self.before)
        self.before = now

    def teardown(self):
        if self.store is None:
            return
        self.files.failing.clear()
        for held in self.leases:
            held.lease.release()
        assert stores.plain_metrics(self.store)["leases_open"] == 0
        assert not any(x.pins for x in self.store.catalog.groups())
        self.store.clear()
        world.healthy(self.store)
        self.store.close()
        if self.disk:
            self.parent.cleanup()


def run(histories: int, steps: int, disk: bool, root=None) -> collections.Counter:
    """Drives so many histories; returns what has happened in them, by name."""
    seen = collections.Counter()
    machine = type("Histories", (Histories,), {"disk": disk, "seen": seen, "root": root})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return seen
