"""Single flight: one request computes a cold prefix, the others wait for what it publishes."""

import gc
import threading

import pytest

from hetero_kv.prefix.keys import block_keys
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.sized import SizedStore
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix.stores import SPEC, make, prompt, serve
from tests.hetero_kv.prefix.stores import identity as identity_of
from tests.hetero_kv.prefix.threads import in_threads

LONG = 60.0  # seconds that no test waits for
WORKERS = 64


class Fake:
    """Requests over a store of sizes; prefill only counts, at every checkpoint point."""

    def __init__(self, policy="full", geometry=None, capacity=1 << 20):
        geometry = geometry or Geometry(8, 16, 1e9, ("kv",), ("w",), 16)
        self.store = SizedStore(geometry, 8, 8, capacity=capacity, policy=policy)
        self.computed: list[int] = []  # tokens, per request
        self._lock = threading.Lock()

    def keys(self, tokens):
        return block_keys(identity_of(), tokens)

    def run(self, keys, lease):
        start = lease.resumable_length
        for stop in lease.checkpoint_points:
            self.store.publish(keys, stop // 8, [stop])
        self.store.publish(keys, len(keys.keys), [])
        with self._lock:
            self.computed.append(keys.length - start)

    def request(self, tokens, wait=LONG):
        keys = self.keys(tokens)
        with self.store.lookup(keys, wait=wait) as lease:
            self.run(keys, lease)

    def cold(self):
        return sum(x > 16 for x in self.computed)


@pytest.mark.parametrize("policy", ["full", "end", "fork", "periodic:2", "full/s3fifo"])
def test_identical_cold_requests_prefill_once(policy):
    fake, tokens = Fake(policy), prompt(1, 100)
    in_threads([lambda: fake.request(tokens)] * WORKERS, LONG)
    assert len(fake.computed) == WORKERS
    assert fake.cold() == 1
    assert fake.store.catalog.leases == 0 and not fake.store.catalog.problems()


def test_without_waiting_they_all_compute():
    # The positive control: everyone is in before anyone publishes.
    fake, tokens = Fake(), prompt(1, 100)
    keys, inside = fake.keys(tokens), threading.Barrier(8)

    def request():
        with fake.store.lookup(keys) as lease:
            inside.wait(LONG)
            fake.run(keys, lease)

    in_threads([request] * 8, LONG)
    assert fake.cold() == 8


def test_history_alone_is_enough_where_there_are_no_checkpoints():
    stateless = Geometry(8, 16, 0, ("kv",), (), 16)
    replayed = Geometry(8, 16, 32, ("kv",), ("w",), 16)
    for policy, geometry in (("never", stateless), ("zero", replayed), ("bounded:16", replayed)):
        fake, tokens = Fake(policy, geometry), prompt(1, 100)
        in_threads([lambda fake=fake, tokens=tokens: fake.request(tokens)] * 16, LONG)
        assert fake.cold() == 1, policy


def test_several_prefixes_at_once():
    fake = Fake()
    in_threads([lambda i=i: fake.request(prompt(i % 4, 100)) for i in range(WORKERS)], LONG)
    assert fake.cold() == 4


def test_who_leads_and_who_follows():
    fake = Fake()
    keys = fake.keys(prompt(1, 100))
    with fake.store.lookup(keys) as first, fake.store.lookup(keys) as second:
        assert first.leader and not first.pending
        assert not second.leader and second.pending == 96
        assert not fake.store.wait(second, 0)  # polling changes nothing
        assert second.pending == 96 and not second.leader
        with fake.store.lookup(fake.keys(prompt(2, 100))) as other:
            assert other.leader and not other.pending
        fake.run(keys, first)
        assert not second.pending
        assert fake.store.wait(second, 0) and second.resumable_length == 96
        assert not second.leader  # nothing is left to publish
    with fake.store.lookup(keys) as warm:
        assert not warm.leader and not warm.pending
    assert not fake.store.catalog.flights.followed


def test_a_follower_takes_what_is_there():
    fake = Fake()
    keys = fake.keys(prompt(1, 100))
    first, second = fake.store.lookup(keys), fake.store.lookup(keys)
    fake.store.publish(keys, 4, [16, 32])
    assert second.resumable_length == 0 and second.pending == 96
    assert not fake.store.wait(second, 0)  # there is more to come,
    assert second.resumable_length == 32 and second.pending == 96  # but this is there
    late = fake.store.lookup(keys)
    assert late.resumable_length == 32 and late.pending == 96 and not late.leader
    for lease in (first, second, late):
        lease.release()


def test_only_what_is_shared_is_waited_for():
    fake = Fake()
    one, two = (fake.keys(prompt(x, 100, shared=40)) for x in (1, 2))
    three = fake.keys(prompt(3, 100, shared=15))
    with fake.store.lookup(one) as a, fake.store.lookup(two) as b, fake.store.lookup(three) as c:
        assert a.leader and b.pending == 32 and c.leader
        fake.store.publish(one, 4, [16, 32])
        assert fake.store.wait(b, 0)  # the rest of it is no use
        assert b.resumable_length == 32 and b.leader
    # A leader that stores nothing on the way is nobody's to wait for.
    fake = Fake("end")
    with fake.store.lookup(one) as a, fake.store.lookup(two) as b, fake.store.lookup(two) as c:
        assert a.leader and b.leader and c.pending == 96


@pytest.mark.parametrize("how", ["error", "garbage", "release"])
def test_when_the_leader_dies_exactly_one_takes_over(how):
    fake, tokens = Fake(), prompt(1, 100)
    keys, leads = fake.keys(tokens), []
    leader = fake.store.lookup(keys)
    started = threading.Semaphore(0)

    def follower():
        with fake.store.lookup(keys) as lease:
            started.release()
            assert not lease.leader and lease.pending
            assert fake.store.wait(lease, LONG)
            leads.append(lease.leader)
            fake.run(keys, lease)

    def dies(leader):
        for _ in range(16):
            started.acquire(timeout=LONG)
        if how == "release":
            leader.release()
        elif how == "error":
            with pytest.raises(RuntimeError), leader:
                raise RuntimeError("a prefill fails")

    jobs = [follower] * 16 + [lambda: dies(leader)]
    if how == "garbage":
        holder = [leader]
        jobs[-1] = lambda: (dies(None), holder.clear(), gc.collect())
        del leader
    in_threads(jobs, LONG)
    assert sum(leads) == 1 and fake.cold() == 1
    assert fake.store.catalog.leases == 0
    abandoned = fake.store.counters.get("abandoned_leases_total")
    assert abandoned == (how == "garbage")


def test_a_stuck_leader_does_not_keep_anyone():
    fake = Fake()
    keys = fake.keys(prompt(1, 100))
    with fake.store.lookup(keys) as stuck:
        with fake.store.lookup(keys) as lease:
            assert not fake.store.wait(lease, 0.02)
            assert lease.leader and lease.resumable_length == 0
            with fake.store.lookup(keys) as later:
                assert later.pending == 96  # of the new one
                fake.run(keys, lease)
                assert fake.store.wait(later, 0) and later.resumable_length == 96
        fake.run(keys, stuck)
    assert fake.store.counters.get("flight_timeouts_total") == 1
    assert not fake.store.catalog.flights.followed and not fake.store.catalog.problems()


def test_leaders_that_cannot_publish_are_not_waited_for_one_after_the_other():
    # Nothing fits, so every leader ends without having published anything.
    fake, tokens = Fake(capacity=4), prompt(1, 100)
    order = []
    keys = fake.keys(tokens)

    def request():
        with fake.store.lookup(keys, wait=LONG) as lease:
            order.append(lease.fruitless)
            fake.run(keys, lease)

    in_threads([request] * 16, LONG)
    assert len(fake.computed) == 16 and max(order) <= 3


def test_closing_lets_everyone_go():
    store, tokens = make(), prompt(1)
    leader = store.lookup(tokens)
    done = []

    def follower():
        with store.lookup(tokens) as lease:
            waiting.set()
            done.append(store.wait(lease, LONG))

    waiting = threading.Event()
    thread = threading.Thread(target=follower, daemon=True)
    thread.start()
    assert waiting.wait(LONG)
    store.close()
    thread.join(LONG)
    assert not thread.is_alive() and done == [True]
    leader.release()
    with pytest.raises(ValueError, match="closed"):
        store.wait(leader, 0)


def test_waiting_is_for_open_leases():
    store = make()
    lease = store.lookup(prompt(1))
    lease.release()
    with pytest.raises(ValueError, match="released"):
        store.wait(lease, 0)


def test_tenants_do_not_wait_for_each_other():
    store, tokens = make(), prompt(1)
    with store.lookup(tokens, tenant="a"), store.lookup(tokens, tenant="b") as other:
        assert other.leader and not other.pending
        with store.lookup(tokens, tenant="a") as same:
            assert same.pending


def test_what_cannot_be_cached_does_not_wait():
    store = make()
    with (
        store.lookup(prompt(1), extra={"lora": 1}),
        store.lookup(prompt(1), extra={"lora": 1}) as lease,
    ):
        assert not lease.leader and not lease.pending
    with store.lookup(prompt(1)[:7]) as lease:
        assert not lease.leader


def test_the_arrays_of_a_follower_are_right():
    store, tokens = make(), prompt(1)
    cache, lengths = synthetic.empty(SPEC), []
    with store.lookup(tokens) as leader, store.lookup(tokens) as follower:
        cold = synthetic.advance(SPEC, synthetic.empty(SPEC), 1, tokens, 32)
        store.publish(tokens, cold, 1, points=leader.checkpoint_points)
        store.wait(follower, 0)
        cache = store.restore(follower, cache)
        lengths.append(int(cache.length[0]))
        assert not synthetic.wrong_rows(SPEC, cache, 0, tokens)
    assert lengths == [32]
    metrics = store.counters
    assert metrics.get("resumable_tokens_total") == 32
    serve(store, cache, 0, tokens)
