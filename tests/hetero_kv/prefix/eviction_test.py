"""Orders of eviction against plain lists, on flat keys; then what trees ask of all of them."""

import functools

import numpy as np
import pytest

from hetero_kv.metrics import Counters
from hetero_kv.prefix.catalog import Catalog
from hetero_kv.prefix.eviction import Fifo, FlopAware, Gdsf, Lfu, Lru
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.payload import SizedPayload
from hetero_kv.prefix.plan import Geometry, plan
from hetero_kv.prefix.policy import EVICTIONS, Flops, Periodic, Policy, eviction
from hetero_kv.prefix.queues import S3Fifo, Sieve, WTinyLfu
from tests.hetero_kv.prefix.catalog_test import trace_keys

FACTS = {key: (1 + key % 3, 1.0 + key % 5) for key in range(60)}  # nbytes, cost


def drive(order, capacity, accesses, sized=True):
    """A cache of flat keys: what it evicts, in order. `order` is one of ours."""
    held, used, gone = set(), 0, []
    for key in accesses:
        nbytes, cost = FACTS[key] if sized else (1, 1.0)
        if key in held:
            order.touch(key)
            continue
        while used + nbytes > capacity:
            victim = order.victim(lambda item: True)
            order.remove(victim, True)
            held.remove(victim)
            used -= FACTS[victim][0] if sized else 1
            gone.append(victim)
        order.add(key, key, nbytes, 0, cost)
        held.add(key)
        used += nbytes
    return gone


def accesses(seed, n=1500):
    rng = np.random.default_rng(seed)
    skewed = np.minimum(rng.zipf(1.3, n) - 1, 59)
    return [int(x) for x in np.where(rng.uniform(size=n) < 0.3, rng.integers(0, 60, n), skewed)]


def scan(rank):
    """A reference that keeps a record per key and evicts the least by `rank(record, state)`."""

    def run(capacity, keys, sized):
        held, gone, age = {}, [], 0.0
        for now, key in enumerate(keys):
            nbytes, cost = FACTS[key] if sized else (1, 1.0)
            if key in held:
                held[key]["uses"] += 1
                held[key]["last"], held[key]["age"] = now, age
                continue
            while sum(x["nbytes"] for x in held.values()) + nbytes > capacity:
                victim = min(held, key=lambda k: rank(held[k], held, now - 1))
                age = max(age, value(held[victim]))
                del held[victim]
                gone.append(victim)
            held[key] = dict(uses=1, last=now, first=now, nbytes=nbytes, cost=cost, age=age)
        return gone

    return run


def value(x):
    return x["age"] + x["uses"] * x["cost"] / x["nbytes"]


def marconi(x, held, now):
    first = min(y["last"] for y in held.values())
    efficiency = {
        id(y): 2 ** (round(2 * np.log2(y["cost"] / y["nbytes"])) / 2) for y in held.values()
    }
    recency = (x["last"] - first) / max(now - first, 1)
    return recency + efficiency[id(x)] / max(efficiency.values()), x["last"]


def s3fifo(capacity, keys, sized):
    small, main, ghost, gone = [], [], [], []  # [key, uses], oldest first
    for key in keys:
        known = next((x for x in small + main if x[0] == key), None)
        if known:
            known[1] = min(3, known[1] + 1)
            continue
        while len(small) + len(main) >= capacity:
            if len(small) * 10 > len(small) + len(main) or not main:
                item = small.pop(0)
                if item[1] >= 2:
                    main.append([item[0], 0])
                    continue
                ghost = [*ghost, item[0]][-max(1, len(small) + len(main)) :]
            else:
                item = main.pop(0)
                if item[1]:
                    main.append([item[0], item[1] - 1])
                    continue
                ghost = ghost[-max(1, len(small) + len(main)) :]
            gone.append(item[0])
        if key in ghost:
            ghost.remove(key)
            main.append([key, 0])
        else:
            small.append([key, 0])
    return gone


def sieve(capacity, keys, sized):
    queue, hand, gone = [], 0, []  # [key, used], oldest first
    for key in keys:
        known = next((x for x in queue if x[0] == key), None)
        if known:
            known[1] = True
            continue
        if len(queue) == capacity:
            while queue[hand % len(queue)][1]:
                hand %= len(queue)
                queue[hand][1] = False
                hand += 1
            hand %= len(queue)
            gone.append(queue.pop(hand)[0])
            hand = 0 if hand == len(queue) else hand  # past the newest: from the oldest again
        queue.append([key, False])
    return gone


def wtinylfu(capacity, keys, sized):
    window, arrivals, probation, protected, gone = [], [], [], [], []
    counts, counted, owed = {}, 0, 0

    def held():
        return len(window) + len(arrivals) + len(probation) + len(protected)

    def count(key):
        nonlocal counts, counted
        counts[key] = counts.get(key, 0) + 1
        counted += 1
        if counted >= 10 * max(1, held()):
            counts = {k: v // 2 for k, v in counts.items()}
            counted = sum(counts.values())

    def pick():
        resident = (probation or protected or [None])[0]
        while arrivals:
            newest = arrivals[0]
            if resident is None or counts.get(newest, 0) <= counts.get(resident, 0):
                return newest
            probation.append(arrivals.pop(0))
            return resident
        return resident if resident is not None else window[0]

    for key in keys:
        if key in window or key in protected:
            count(key)
            queue = window if key in window else protected
            queue.append(queue.pop(queue.index(key)))
            continue
        if key in arrivals or key in probation:
            count(key)
            (arrivals if key in arrivals else probation).remove(key)
            protected.append(key)
            main = len(arrivals) + len(probation) + len(protected)
            while len(protected) > 1 and len(protected) > 0.8 * main:
                probation.append(protected.pop(0))
            continue
        if held() == capacity:
            victim = pick()
            for queue in (window, arrivals, probation, protected):
                if victim in queue:
                    queue.remove(victim)
            owed += 1
            gone.append(victim)
        window.append(key)
        count(key)
        while len(window) > 1 and len(window) > 0.01 * held():
            (arrivals if owed else probation).append(window.pop(0))
        owed = max(0, owed - 1)
    return gone


REFERENCES = {
    "lru": (Lru, scan(lambda x, *_: x["last"]), True),
    "fifo": (Fifo, scan(lambda x, *_: x["first"]), True),
    "lfu": (Lfu, scan(lambda x, *_: (x["uses"], x["last"])), True),
    "gdsf": (Gdsf, scan(lambda x, *_: (value(x), x["last"])), True),
    "flop": (FlopAware, scan(marconi), True),
    "s3fifo": (S3Fifo, s3fifo, False),
    "sieve": (Sieve, sieve, False),
    "wtinylfu": (WTinyLfu, wtinylfu, False),
}


@pytest.mark.parametrize("capacity", [1, 5, 20, 33])
@pytest.mark.parametrize("name", REFERENCES)
def test_victims_are_those_of_a_plain_list(name, capacity):
    assert REFERENCES.keys() == EVICTIONS.keys()
    make, reference, sized = REFERENCES[name]
    capacity += 2 * sized  # the largest item has 3 bytes
    for seed in range(3):
        keys = accesses(seed, 600)
        have, want = drive(make(), capacity, keys, sized), reference(capacity, keys, sized)
        assert len(want) > 80 and have == want


@pytest.mark.parametrize("name", [x for x in EVICTIONS if x not in ("lru", "fifo")])
def test_refused_items_wait_until_they_are_offered(name):
    order = eviction(name)()
    for item in range(6):
        order.add(item, item)
    asked = []

    def only_even(item):
        asked.append(item)
        return item % 2 == 0

    gone = []
    for _ in range(3):
        gone.append(order.victim(only_even))
        order.remove(gone[-1], True)
    assert sorted(gone) == [0, 2, 4] and order.victim(only_even) is None
    assert sorted(order.parked) == [1, 3, 5] and max(map(asked.count, (1, 3, 5))) == 1
    order.touch(3)
    order.remove(1)
    for item in (3, 5, 99):
        order.offer(item)
    assert not order.parked
    left = []
    while (victim := order.victim(lambda item: True)) is not None:
        order.remove(victim, True)
        left.append(victim)
    assert sorted(left) == [3, 5]


HYBRID = Geometry(block=1, granularity=1, replay_length=1e9, history=("kv",), checkpoint=("w",))
planner = functools.partial(plan, replay=False)


@pytest.mark.parametrize("cost", [None, Flops(1.0, 0.5), Flops(1.0, -0.01)], ids=str)
@pytest.mark.parametrize("name", [*EVICTIONS, "flop:0.3"])
def test_every_order_is_leaf_first_and_keeps_the_ledger(name, cost):
    policy = Policy(eviction=eviction(name), cost=cost, checkpoint_share=0.3)
    cat = Catalog(HYBRID, HostTier(60), policy, Counters())
    rng = np.random.default_rng(0)
    leases, hits = [], 0
    for step in range(400):
        length = int(rng.integers(1, 12))
        keys = trace_keys(*(int(x) for x in np.minimum(rng.zipf(1.5, length), 4)))
        leases.append(cat.open(keys, length + 1, planner))
        hits += leases[-1].resumable_length
        if len(leases) > 3:
            leases.pop(int(rng.integers(0, 3))).release()
        path = cat.hold(keys, length)
        cat.add_history(keys, path, *[SizedPayload(1)] * (length - len(path)))
        if len(path) == length and not cat.has_checkpoint(path):
            cat.add_checkpoint(path, SizedPayload(2))
        cat.let_go(path)
        if not step % 60:
            cat.discard(cat.groups()[0])
        assert cat.problems() == []  # among them: history without the parent's history
    assert hits
    for lease in leases:
        lease.release()
    for kind in ("history", "checkpoint"):  # nothing waits for ever
        while (victim := cat._victim(kind)) is not None:
            cat._evict(victim, [])
        assert cat.used[kind] == 0, kind
    assert cat.tier.free == 60 and not len(cat.index)


def test_publishing_again_is_no_use():
    cat = Catalog(HYBRID, HostTier(4), Policy(eviction=Lfu, checkpoint_share=0.0), Counters())

    def publish(keys):
        path = cat.hold(keys, 1)
        cat.add_history(keys, path, *[SizedPayload(1)] * (1 - len(path)))
        cat.let_go(path)

    for _ in range(5):
        publish(trace_keys(1))
    lfu = cat._eviction["history"]
    (group,) = cat.groups()
    assert lfu._entry[group][0] == 1
    stateless = Geometry(1, 1, 0, ("kv",), ())
    cat.geometry = stateless
    cat.open(trace_keys(1), 2, planner).release()
    assert lfu._entry[group][0] == 2


def test_names():
    policy = Policy.named("every:4/s3fifo", checkpoint_share=0.1)
    assert policy.checkpoints == Periodic(4, end=False) and policy.eviction is S3Fifo
    assert policy.checkpoints.points(70, HYBRID)[:2] == (4, 8)
    assert Policy.named("end/flop:2").eviction().alpha == 2
    assert Policy.named("end/flop").cost == Flops() and Policy.named("end/lru").cost is None
    assert Flops(2.0, 1.0)(2, 4) == 4 + 6
    for bad in ("end/", "end/none", "lru/end", "end/lru:2", "every", "every:0", "end/flop:x"):
        with pytest.raises(ValueError):
            Policy.named(bad)
    with pytest.raises(ValueError):
        FlopAware(-1.0)
