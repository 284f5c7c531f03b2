"""The store with a disk below host memory: found again, promoted, never wrong."""

import functools
import itertools
import random
import shutil
import threading

import numpy as np
import pytest

from hetero_kv.metrics import Counters, series
from hetero_kv.prefix.disk.lock import LockedError
from hetero_kv.prefix.disk.tier import SMALLEST, DiskTier
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS
from hetero_kv.prefix.keys import Keys, sha256
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, label
from hetero_kv.prefix.plan import Geometry, plan
from hetero_kv.prefix.policy import EVICTIONS, Policy, eviction
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.prefix.tiered import TieredCatalog
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.stores import SPEC, prompt, raw, serve, stored

ROOM = 1 << 20


def make(directory, disk_bytes=ROOM, **options):
    return stores.make(disk_dir=directory, disk_bytes=disk_bytes, **options)


def healthy(store):
    stores.healthy(store)
    ledger, metrics = store.disk.ledger(), stores.plain_metrics(store)
    assert ledger.exact and ledger.free >= 0
    parts = ("live", "dead", "overhead", "free")
    assert sum(metrics[f"disk_{x}_bytes"] for x in parts) == ledger.capacity


def groups(store):
    """Contents of all groups, wherever they are, by label."""
    found = {}
    for group in store.catalog.groups():
        fetched, _ = store._fetcher.read_group(group)
        assert not fetched.failure
        found[group.label] = fetched.payload.buffer.tobytes()
    return found


def total(store, name):
    return sum(n for x, n in stores.plain_metrics(store).items() if x.partition("{")[0] == name)


def lengths(store, seeds, **who):
    return [store.explain(prompt(x, shared=24), **who).plan.resumable_length for x in seeds]


def fill(store, cache, seeds, **who):
    for seed in seeds:
        cache, _ = serve(store, cache, 0, prompt(seed, shared=24), **who)
        healthy(store)
    return cache


def test_a_restart_finds_everything_again(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    cache = fill(store, cache, (1, 2, 3))
    before = groups(store)
    assert store.flush().ok
    healthy(store)
    assert total(store, "disk_refused_total") == 0
    store.close()
    store = make(tmp_path)
    healthy(store)
    assert groups(store) == before and len(before) == 3 + 3 * 3 + 1 + 2 * 3
    assert lengths(store, (1, 2, 3)) == [48] * 3
    for seed in (1, 2, 3):
        with store.lookup(prompt(seed, shared=24)) as lease:
            assert "disk" in lease.routes.values()
            cache = store.restore(lease, cache, 0)
        assert not synthetic.wrong_rows(SPEC, cache, 0, prompt(seed, shared=24))
        healthy(store)
        assert set(store.explain(prompt(seed, shared=24)).plan.routes.values()) == {"host"}
    assert total(store, "promoted_groups_total") == 3 + 3 * 3 + 3  # checkpoints: those at 48
    disk = [
        x
        for x in stores.plain_metrics(store)
        if x.startswith("restored_bytes") and 'tier="disk"' in x
    ]
    assert disk
    fill(store, cache, (1, 2, 3, 4))
    store.close()
    assert lengths(make(tmp_path), (1, 2, 3, 4)) == [48] * 4


def test_what_host_memory_has_no_room_for_comes_from_disk(tmp_path):
    block, state = stores.sizes()
    store = make(tmp_path, host_bytes=7 * block + 2 * state)
    cache = fill(store, synthetic.empty(SPEC), range(6))
    assert total(store, "demoted_groups_total") and not total(store, "evicted_groups_total")
    assert lengths(store, range(6)) == [48] * 6
    on_host = sum(x.on_host for x in store.catalog.groups())
    assert on_host < len(store.catalog.groups())
    for seed in (0, 1, 0, 5, 2):
        cache, length = serve(store, cache, 0, prompt(seed, shared=24))
        assert length == 48
        healthy(store)
        routes = store.explain(prompt(seed, shared=24)).plan.routes
        assert set(routes.values()) == {"host"}  # promoted
    # A prefix that is larger than all of host memory.
    small = make(tmp_path / "small", host_bytes=3 * block + state)
    cache, _ = serve(small, cache, 0, prompt(7))
    cache, length = serve(small, cache, 0, prompt(7))
    assert length == 48
    healthy(small)


def test_a_smaller_limit_keeps_prefixes_whole(tmp_path):
    store = make(tmp_path)
    cache = fill(store, synthetic.empty(SPEC), range(12))
    many = len(store.catalog.groups())
    store.close()
    need = store.disk.capacity
    for capacity in (SMALLEST + (1 << 16), SMALLEST + (1 << 14), SMALLEST):
        store = make(tmp_path, disk_bytes=capacity)
        healthy(store)
        found = lengths(store, range(12))
        left = len(store.catalog.groups())
        assert left <= many and capacity < need
        many = left
        for seed, length in enumerate(found):
            cache, got = serve(store, cache, 0, prompt(seed, shared=24), publish=False)
            assert got == length
        healthy(store)
        store.close()
    assert many < 100


def test_a_small_disk_evicts_leaf_first(tmp_path):
    store = make(tmp_path, disk_bytes=SMALLEST + (1 << 15))
    cache = synthetic.empty(SPEC)
    for seed in range(25):
        cache, _ = serve(store, cache, 0, prompt(seed, shared=24))
        healthy(store)
    assert total(store, "disk_evicted_groups_total")
    store.flush()
    on_disk = {x.label for x in store.catalog.groups() if x.disk is not None}
    assert on_disk
    store.close()
    store = make(tmp_path, disk_bytes=SMALLEST + (1 << 15))
    assert {x.label for x in store.catalog.groups()} == on_disk
    assert not total(store, "disk_orphans_total")
    assert lengths(store, [24]) == [48]  # the last one came through
    healthy(store)


@pytest.mark.parametrize("part", range(0, 100, 9))
def test_a_damaged_byte_shortens_the_hit(tmp_path, part):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    cache = fill(store, cache, (1,))
    store.close()
    path = max(tmp_path.glob("*seg*"), key=lambda x: x.stat().st_size)
    data = bytearray(path.read_bytes())
    data[4096 + part * (len(data) - 4097) // 100] ^= 1 << part % 8
    path.write_bytes(data)
    store = make(tmp_path)
    tokens = prompt(1, shared=24)
    with store.lookup(tokens) as lease:
        promised = lease.resumable_length
        cache = store.restore(lease, cache, 0)
        length = int(cache.length[0])
        assert length == lease.resumable_length
        if length < promised:
            codes = {x.code for x in lease.reasons}
            assert codes & {"corrupt", "unreadable", "stale"}
            assert total(store, "dropped_total") and total(store, "disk_read_failures_total")
    assert not synthetic.wrong_rows(SPEC, cache, 0, tokens)
    store.verify()
    healthy(store)
    serve(store, cache, 0, tokens)
    assert store.explain(tokens).plan.resumable_length == 48  # it heals


def test_a_damaged_payload_on_disk_is_told(tmp_path):
    for kind, blocks, left in ((HISTORY, 3, 16), (CHECKPOINT, 6, 32), (HISTORY, 1, 0)):
        store, cache = make(tmp_path / f"{kind}{blocks}"), synthetic.empty(SPEC)
        cache = fill(store, cache, (1,))
        store.close()
        store = make(tmp_path / f"{kind}{blocks}")
        entry = store.disk._books.entries[stored(store, kind, blocks).disk.generation]
        with open(entry.segment.path, "r+b") as file:
            file.seek(entry.place.offset + entry.place.header_bytes + 40)
            old = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([old[0] ^ 4]))
        tokens = prompt(1, shared=24)
        with store.lookup(tokens) as lease:
            assert lease.resumable_length == 48
            cache = store.restore(lease, cache, 0)
            assert int(cache.length[0]) == lease.resumable_length == left
            assert any(x.code == "corrupt" for x in lease.reasons)
        assert not synthetic.wrong_rows(SPEC, cache, 0, tokens)
        name = [x for x in stores.plain_metrics(store) if x.startswith("dropped_total")]
        assert len(name) == 1 and "corrupt" in name[0]
        healthy(store)


def test_damage_in_memory_is_healed_from_disk(tmp_path):
    store, cache, tokens = make(tmp_path), synthetic.empty(SPEC), prompt(1, shared=24)
    cache = fill(store, cache, (1,))
    store.flush()  # until then both tiers share the buffer
    raw(store, stored(store, HISTORY, 2))[9] ^= 1
    cache, length = serve(store, cache, 0, tokens)
    assert length == 48 and total(store, "healed_total") == 1
    raw(store, stored(store, CHECKPOINT, 6))[9] ^= 1
    (found,) = store.verify()
    assert "corrupt" in found and lengths(store, [1]) == [48]
    healthy(store)


def test_tenants_and_identities_do_not_meet_on_disk(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    fill(store, cache, (1,), tenant="a")
    store.close()
    store = make(tmp_path)
    assert lengths(store, [1], tenant="b") == lengths(store, [1]) == [0]
    assert lengths(store, [1], tenant="a") == [48]  # positive control
    store.close()
    other = PrefixStore(
        SPEC,
        stores.identity(tokenizer="0" * 64),
        host_bytes=stores.PLENTY,
        disk_dir=tmp_path,
        disk_bytes=ROOM,
    )
    assert not other.catalog.groups() and lengths(other, [1], tenant="a") == [0]
    assert total(other, "disk_ignored_files_total")
    healthy(other)
    other.close()
    store = make(tmp_path)
    assert lengths(store, [1], tenant="a") == [48]
    store.clear()
    assert stores.plain_metrics(store)["host_free_bytes"] == stores.PLENTY
    store.close()
    assert not make(tmp_path).catalog.groups()


def test_what_flush_acknowledged_survives_without_close(tmp_path):
    store, cache = make(tmp_path / "a"), synthetic.empty(SPEC)
    for seed in (1, 2):
        cache = fill(store, cache, (seed,))
        assert store.flush().ok
        shutil.copytree(tmp_path / "a", tmp_path / f"{seed}")
        again = make(tmp_path / f"{seed}")
        assert groups(again) == groups(store)
        assert lengths(again, (1, 2)) == [48, 48 if seed == 2 else 16]
        healthy(again)


def test_what_the_queue_had_no_room_for_is_written_by_flush(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    store.disk._queue_bytes = 1
    cache = fill(store, cache, (1, 2, 3))
    assert store.flush().ok
    assert all(x.disk for x in store.catalog.groups()) and not store.catalog.disk.missing
    store.close()
    assert lengths(make(tmp_path), (1, 2, 3)) == [48] * 3


def test_objects_lost_on_disk_are_forgotten(tmp_path):
    block, state = stores.sizes()
    store = make(tmp_path, host_bytes=7 * block + 2 * state)
    fill(store, synthetic.empty(SPEC), range(4))
    store.flush()
    for entry in list(store.disk._books.entries.values())[::3]:
        store.disk._lose(entry, "test")
    flushed = store.flush()
    assert not flushed.ok and flushed.lost
    healthy(store)


def test_a_directory_that_cannot_be_used(tmp_path):
    store = make(tmp_path / "a")
    with pytest.raises(LockedError):
        make(tmp_path / "a")
    store.close()
    (tmp_path / "file").write_text("")
    store = make(tmp_path / "file")
    assert store.disk is None and store.disk_failure
    assert total(store, "disk_unusable_total") == 1
    cache, _ = serve(store, synthetic.empty(SPEC), 0, prompt(1))
    assert serve(store, cache, 0, prompt(1))[1] == 48 and store.flush().ok
    store.close()
    with pytest.raises(ValueError, match="disk tier needs both"):
        stores.make(disk_dir=tmp_path)


# -- the catalog alone, with small payloads -----------------------------------------------------

LAYOUTS = {
    HISTORY: GroupLayout((), (("kv", 0, 512),), 512),
    CHECKPOINT: GroupLayout((), (("w", 0, 1024),), 1024),
}
HYBRID = Geometry(block=1, granularity=1, replay_length=1e9, history=("kv",), checkpoint=("w",))
RECURRENT = Geometry(block=1, granularity=1, replay_length=1e9, history=(), checkpoint=("w",))
planner = functools.partial(plan, replay=False)


def keys_of(*blocks):
    contents = tuple(b"%d" % x for x in blocks)
    chain = list(itertools.accumulate(contents, lambda x, y: sha256(x + y), initial=sha256(b"")))
    return Keys(chain[0], b"", tuple(chain[1:]), contents, len(blocks))


class Model:
    """A catalog over both tiers, driven at random."""

    def __init__(self, directory, order, geometry, host, disk, quotas=None):
        self.quotas = quotas
        self.directory, self.geometry, self.host, self.disk = directory, geometry, host, disk
        self.policy = Policy(eviction=eviction(order))
        self.counters = Counters()
        self.open()

    def layout(self, kind, depth):
        del depth
        bare = kind == HISTORY and not self.geometry.history
        return GroupLayout((), (), 0) if bare else LAYOUTS[kind]

    def open(self):
        self.tier = DiskTier(
            self.directory,
            self.disk,
            bytes(32),
            self.layout,
            counters=self.counters,
            background=False,
            queue_bytes=1 << 14,
        )
        self.cat = TieredCatalog(
            self.geometry, HostTier(self.host), self.policy, self.counters, self.tier, self.quotas
        )
        self.cat.load(sha256, lambda *x: self.layout(*x).nbytes)

    def payload(self, kind, keys, depth):
        layout = self.layout(kind, depth)
        data = np.full(layout.nbytes, keys.keys[depth - 1][0], np.uint8)
        return ArrayPayload.seal(layout, label(kind, keys.keys[depth - 1], depth), data)

    def publish(self, keys, points):
        blocks = len(keys.keys)
        path = self.cat.hold(keys, blocks)
        try:
            for depth in range(len(path) + 1, blocks + 1):
                if self.cat.add_history(keys, path, self.payload(HISTORY, keys, depth)):
                    break
            for depth in points:
                if depth <= len(path) and not self.cat.has_checkpoint(path[:depth]):
                    self.cat.add_checkpoint(path[:depth], self.payload(CHECKPOINT, keys, depth))
        finally:
            self.cat.let_go(path)

    def read(self, keys):
        with self.cat.open(keys, keys.length + 1, planner) as lease:
            promoted = []
            for group in lease.groups():
                host, disk = self.cat.places(group)
                if host is not None:
                    fetched = self.cat.tier.read(host, group.label)
                else:
                    fetched = self.tier.read(disk, group.label)
                    promoted.append((group, fetched.payload))
                assert not fetched.failure
                assert set(fetched.payload.buffer.tobytes()) <= {group.node.key[0]}
            self.cat.promote(promoted)
            self.check()
            return lease.resumable_length

    def check(self):
        assert self.cat.problems() == []
        assert self.tier.ledger().exact

    def restart(self, step):
        """Everything that could be put on disk is found again."""
        self.cat.spill()
        self.cat.lose(self.tier.flush().lost)
        before = self.labels()
        self.cat.close()
        self.tier.close()
        self.open()
        assert self.labels() == before, step

    def moved(self):
        seen = self.counters.snapshot()
        names = [f"{x}_groups_total" for x in ("demoted", "promoted", "disk_evicted")]
        return min(sum(seen.get(series(x, kind=y), 0) for y in KINDS) for x in names)

    def labels(self):
        """What is on disk, but for blocks without bytes: a start keeps those under checkpoints."""
        return {x.label for x in self.cat.groups() if x.disk is not None and x.nbytes}


@pytest.mark.parametrize("geometry", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
@pytest.mark.parametrize("order", sorted(EVICTIONS))
def test_random_histories_keep_both_ledgers_exact(tmp_path, order, geometry):
    rng = random.Random(order)
    model = Model(tmp_path, order, geometry, 6 << 10, SMALLEST + (5 << 14))
    hits = 0
    for step in range(160):
        keys = keys_of(*[rng.randrange(3) for _ in range(rng.randrange(1, 9))])
        action = rng.random()
        if action < 0.55:
            points = sorted(rng.sample(range(1, 9), 2))
            model.publish(keys, points)
        elif action < 0.9:
            hits += model.read(keys)
        elif action < 0.93:
            some = model.cat.groups()
            if some:
                model.cat.discard(rng.choice(some))
        elif action < 0.96:
            some = [x for x in model.cat.groups() if x.disk is not None]
            if some:
                model.cat.leave_disk(rng.choice(some))
        elif action < 0.98:
            model.cat.spill()
            model.cat.lose(model.tier.flush().lost)
        else:
            model.restart(step)
        model.check()
    assert hits and model.moved()
    model.cat.clear()
    model.check()
    assert not model.cat.groups() and not model.tier.stored()
    assert model.cat.tier.free == model.cat.tier.capacity


def test_threads_over_stores_far_too_small(tmp_path):
    model = Model(tmp_path, "lru", HYBRID, 6 << 10, SMALLEST + (1 << 17))
    failures = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                keys = keys_of(*[rng.randrange(3) for _ in range(rng.randrange(1, 9))])
                if rng.random() < 0.6:
                    model.publish(keys, sorted(rng.sample(range(1, 9), 2)))
                else:
                    model.read(keys)
        except Exception as error:  # for the main thread to show
            failures.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    model.check()
    assert not any(x.pins for x in model.cat.groups())
    assert model.moved()
