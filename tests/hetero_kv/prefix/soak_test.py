"""Many threads over a store far too small: no deadlock, no leak, no wrong byte."""

import collections
import faulthandler
import random
import threading
import time

import pytest

from hetero_kv import state
from hetero_kv.prefix.disk.tier import SMALLEST
from hetero_kv.prefix.policy import EVICTIONS
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores, world
from tests.hetero_kv.prefix.world import CAPACITY, PROMPTS, SPEC, WHO, G

THREADS, MANY = 16, 12
STEPS = 25  # each thread takes at least, however slow the machine
DEADLOCK = 120  # seconds beyond the end after which all threads are shown and the run dies
HOST = 6000  # bytes: one prompt and a half
DISK = SMALLEST + (80 << 10)  # about a third of what is asked for


class Worker(threading.Thread):
    """One client: does what a store's clients do until the time is over."""

    def __init__(self, store: PrefixStore, seed: int, until: float):
        super().__init__(name=f"client {seed}", daemon=True)
        self.store = store
        self.random = random.Random(seed)
        self.until = until
        self.did: collections.Counter = collections.Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            cache = state.init(SPEC, 1, CAPACITY)
            while time.monotonic() < self.until or self.did["steps"] < STEPS:
                self.did["steps"] += 1
                cache = self.step(cache)
        except BaseException as error:  # for the main thread to raise
            self.failure = error

    def step(self, cache):
        # Few of both, some more often than others, so that threads meet on the same prefix.
        which = min(self.random.randrange(MANY), self.random.randrange(MANY))
        who, tokens = self.random.choice(WHO), PROMPTS[which]
        action = self.random.random()
        if action < 0.45:
            cache = self.serve(cache, who, tokens)
        elif action < 0.7:
            stop = self.random.randrange(4, len(tokens) + 1, 4)
            told = self.store.publish(tokens, world.cold(who, tokens, stop), **who.arguments)
            self.did["published"] += told.new_blocks
        elif action < 0.8:
            with pytest.raises(KeyError), self.store.lookup(tokens, **who.arguments):
                raise KeyError
            self.did["cancelled"] += 1
        elif action < 0.9:
            assert str(self.store.explain(tokens, **who.arguments))
        elif action < 0.93:
            self.store.flush()
            self.did["flushed"] += 1
        elif action < 0.95:
            self.damage()
        elif action < 0.96:
            self.store.verify()
        elif action < 0.962:
            self.store.clear()
            self.did["cleared"] += 1
        else:
            assert self.store.metrics()
        return cache

    def serve(self, cache, who, tokens):
        told = world.contents(who, tokens)
        with self.store.lookup(tokens, **who.arguments) as lease:
            time.sleep(self.random.choice((0, 0, 0.001)))
            cache = self.store.restore(lease, cache)
            length = world.stands(cache, 0)
            assert length == lease.resumable_length < len(tokens)
            assert world.wrong(cache, 0, who, tokens) == []
            self.did["hit"] += length > 0
            stop = self.random.choice((0, len(tokens)))
            for end in (x for x in lease.checkpoint_points if x <= stop):
                cache = synthetic.advance(SPEC, cache, 0, told, end)
                new = self.store.publish(
                    tokens, cache, points=lease.checkpoint_points, **who.arguments
                ).new_blocks
                self.did["published"] += new
            assert world.wrong(cache, 0, who, tokens) == []
        return cache

    def damage(self) -> None:
        """Flips a byte of what is stored in host memory, if it is still there."""
        groups = self.store.catalog.groups()
        if groups:
            group = self.random.choice(groups)
            ticket = group.ticket
            payload = ticket and self.store.catalog.tier._payloads[ticket.slot]
            if payload is not None and len(payload.buffer):
                payload.buffer[self.random.randrange(len(payload.buffer))] ^= 1
                self.did["damaged"] += 1


def soak(store: PrefixStore, seconds: float) -> collections.Counter:
    """Lets all threads loose on a store; returns what they did."""
    until = time.monotonic() + seconds
    faulthandler.dump_traceback_later(seconds + DEADLOCK, exit=True)
    try:
        workers = [Worker(store, seed, until) for seed in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        faulthandler.cancel_dump_traceback_later()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
    return sum((x.did for x in workers), collections.Counter())


def warm_up() -> None:
    """Compiles, and makes what all threads share, before the time counts."""
    store, cache = PrefixStore(SPEC, world.IDENTITY, host_bytes=1 << 20), None
    for who in WHO:
        for tokens in PROMPTS[:MANY]:
            for length in range(4, len(tokens) + 1, 4):
                store.publish(tokens, world.cold(who, tokens, length), **who.arguments)
            cache = state.init(SPEC, 1, CAPACITY) if cache is None else cache
            for length in range(len(tokens), G, -G):
                cache, _, _ = world.restored(store, who, tokens[:length], cache)
    store.close()


@pytest.mark.parametrize(
    "seconds, orders",
    [(1.5, ["lru", "s3fifo"]), pytest.param(30, sorted(EVICTIONS), marks=pytest.mark.full)],
)
def test_threads_over_a_store_far_too_small(tmp_path, seconds, orders):
    warm_up()
    events = collections.Counter()
    for order in orders:
        before = set(threading.enumerate())
        store = PrefixStore(
            SPEC,
            world.IDENTITY,
            host_bytes=HOST,
            disk_dir=tmp_path / order,
            disk_bytes=DISK,
            policy=f"full/{order}",
        )
        did = soak(store, seconds if order == orders[0] else min(seconds, 4))
        moved = world.totals(store)
        assert all(did[x] for x in ("hit", "published", "cancelled", "flushed")), did
        assert moved["demoted_groups_total"] and moved["disk_evicted_groups_total"], moved
        events += did + moved
        assert stores.plain_metrics(store)["leases_open"] == 0
        assert not any(x.pins for x in store.catalog.groups())
        store.verify()  # finds what was damaged and not read since
        assert store.verify() == []
        store.flush()
        world.healthy(store)
        for who in WHO:
            for tokens in PROMPTS[:MANY]:
                world.restored(store, who, tokens)
        store.clear()
        world.healthy(store)
        assert stores.plain_metrics(store)["host_free_bytes"] == HOST
        assert not store.catalog.groups() and not store.disk.stored()
        store.close()
        assert set(threading.enumerate()) <= before
        again = world.opened(tmp_path / order, disk_bytes=DISK)
        assert not again.catalog.groups()
        again.close()
    if seconds > 10:
        seen = ("damaged", "cleared", "dropped_total", "healed_total", "promoted_groups_total")
        assert all(events[x] for x in seen), events
