"""kill -9 of a writer at random moments: what a flush has acknowledged is there, and only that."""

import multiprocessing
import time

import numpy as np
import pytest

from tests.hetero_kv.prefix.disk import kill_writer, objects


def messages(pipe):
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=pytest.mark.full)])
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path, rounds):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([kill_writer.__name__])
    random = np.random.default_rng(rounds)
    acknowledged, flushes = set(), 0
    for turn in range(rounds):
        here, there = context.Pipe(duplex=False)
        arguments = (there, tmp_path, turn, bool(turn % 2))
        process = context.Process(target=kill_writer.work, args=arguments, daemon=True)
        process.start()
        there.close()
        if turn % 3:
            kind, at_start = here.recv()  # it is at work; otherwise it may still be starting
            assert (kind, at_start) == ("open", acknowledged)
        time.sleep(random.exponential(0.15))
        process.kill()
        put, dropped = set(), set()
        for kind, value in messages(here):
            assert kind != "failed", value
            if kind == "put":
                put.add(value)
            elif kind == "drop":
                dropped.add(value)
            elif kind == "open":
                assert value == acknowledged
            else:
                acknowledged, put, dropped = set(value), set(), set()
                flushes += 1
        process.join(30)
        if turn % 4 == 3:  # without the index, deleted objects must not come back either
            for path in tmp_path.glob("index*"):
                path.unlink()
        with_open = objects.make(tmp_path, capacity=kill_writer.CAPACITY)
        objects.healthy(with_open)
        held = objects.held(with_open)
        assert held >= acknowledged - dropped
        assert held <= acknowledged | put
        assert objects.good(with_open, range(kill_writer.NUMBERS)) == held
        with_open.close()
        acknowledged = held
    assert flushes >= rounds // 2
