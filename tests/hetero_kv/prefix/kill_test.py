"""kill -9 of a process that publishes: what a flush acknowledged is found, and only right bytes."""

import multiprocessing
import time

import numpy as np
import pytest

from hetero_kv import state
from hetero_kv.prefix.disk.tier import SMALLEST
from tests.hetero_kv.prefix import kill_writer, world
from tests.hetero_kv.prefix.histories import Model
from tests.hetero_kv.prefix.world import CAPACITY, PLENTY, PROMPTS, SPEC, WHO, B, G

SMALL = SMALLEST + (1 << 14)


def messages(pipe):
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def test_the_writer_stores_what_a_cache_would(tmp_path):
    store = kill_writer.make(tmp_path, PLENTY)
    for who in WHO:
        for tokens in PROMPTS[:6]:
            hashes = kill_writer.synthetic.prefix_hashes(world.contents(who, tokens))
            for length in range(1, len(tokens) + 1):
                store.publish(tokens, kill_writer.Row(hashes, length), **who.arguments)
    store.close()
    plain = _groups(world.opened(tmp_path))
    store = world.opened()
    for who in WHO:
        for tokens in PROMPTS[:6]:
            world.published(store, who, tokens)
    assert plain == _groups(store)


def _groups(store):
    read = ((x.label, store._fetcher.read_group(x)[0].payload) for x in store.catalog.groups())
    found = {label: payload.buffer.tobytes() for label, payload in read}
    store.close()
    return found


class Told:
    """What the process has said so far: an upper and a lower bound of what must be found."""

    def __init__(self):
        self.model = Model()
        self.held: dict = {}
        self.flushes = 0

    def hear(self, kind, value, enough: bool) -> None:
        assert kind != "failed", value
        if kind == "put":
            w, i, stop = value
            for length in (*range(G, stop, G), stop):
                point = length if length % G == 0 else 0
                self.model.put(WHO[w], PROMPTS[i], length // G * G // B, point)
        elif kind == "clear":
            self.held = {}
        elif kind == "cleared":
            self.model = Model()
        elif kind == "open":
            assert not enough or all(value[x] >= y for x, y in self.held.items())
        else:
            self.held = value
            self.flushes += 1


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.full)])
def test_nothing_acknowledged_is_lost_and_nothing_wrong_is_served(tmp_path, rounds):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([kill_writer.__name__])
    random = np.random.default_rng(rounds)
    cache = state.init(SPEC, 2, CAPACITY)
    told = {PLENTY: Told(), SMALL: Told()}
    hits = 0
    for turn in range(rounds):
        budget = SMALL if turn % 4 == 3 else PLENTY
        directory, now = tmp_path / str(budget), told[budget]
        here, there = context.Pipe(duplex=False)
        arguments = (there, directory, budget, turn)
        process = context.Process(target=kill_writer.work, args=arguments, daemon=True)
        process.start()
        there.close()
        if turn % 3:  # it is at work; otherwise it may still be starting
            now.hear(*here.recv(), budget == PLENTY)
        time.sleep(random.exponential(0.12))
        process.kill()
        for message in messages(here):
            now.hear(*message, budget == PLENTY)
        process.join(30)
        assert process.exitcode == -9
        store = world.opened(directory, disk_bytes=budget)
        assert not store.disk_failure
        world.healthy(store)
        assert store.verify() == []
        found = kill_writer.lengths(store)
        for (w, i), length in found.items():
            assert length <= now.model.bound(WHO[w], PROMPTS[i])
        if budget == PLENTY:
            assert all(found[x] >= length for x, length in now.held.items())
        for which in random.permutation(list(found))[:20]:
            who, tokens = WHO[which[0]], PROMPTS[which[1]]
            cache, length, _ = world.restored(store, who, tokens, cache, turn % 2)
            assert length == found[tuple(which)]
            hits += length > 0
        world.healthy(store)
        assert store.verify() == []
        store.close()
        now.held = found
    assert sum(x.flushes for x in told.values()) >= rounds // 2
    assert hits >= 4 * rounds
