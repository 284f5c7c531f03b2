"""Of requests for one cold prefix one computes; the others wait, and hold nobody up."""

import numpy as np

from hetero_kv import Request
from hetero_kv.requests import ADMITTED, FINISHED
from tests.hetero_kv.engine import world

SHARED = world.document(0)


def ask(own: int, new: int = 4, **options) -> Request:
    """A prompt that shares 40 tokens with all others."""
    tail = np.random.default_rng([5, own]).integers(0, world.VOCAB, 5).astype(np.int32)
    return Request(np.concatenate([SHARED, tail]), new, **options)


def test_followers_wait_and_reuse() -> None:
    made = world.engine("validated", store=world.store())
    handles = [made.submit(ask(i)) for i in range(3)]
    made.step()
    assert [x.handle for x in made.scheduler.active()] == handles[:1]
    world.drain(made)
    results = [made.result(x) for x in handles]
    assert [x.reused_length for x in results] == [0, 40, 40]
    assert world.count(made, "prompt_tokens_total", how="computed") == 45 + 5 + 5
    world.settled(made)


def test_those_who_wait_hold_nobody_up() -> None:
    made = world.engine("validated", store=world.store(), slots=3)
    leader, follower = made.submit(ask(0)), made.submit(ask(1))
    other = made.submit(world.request(3))
    made.step()
    assert {x.handle for x in made.scheduler.active()} == {leader, other}
    world.drain(made)
    assert made.result(follower).reused_length == 40


def test_a_leader_that_is_cancelled_has_a_successor() -> None:
    made = world.engine("validated", store=world.store())
    leader, second, third = (made.submit(ask(i)) for i in range(3))
    made.step()
    made.cancel(leader)
    world.drain(made)
    lengths = [made.result(x).reused_length for x in (second, third)]
    assert lengths[0] < 40 and lengths[1] == 40, "one computes, the other one waits for it"
    world.settled(made)


def test_a_leader_that_is_preempted_keeps_nobody_waiting() -> None:
    for save in (True, False):
        made = world.engine("validated", store=world.store(), slots=1)
        leader = made.submit(ask(0))
        made.step()
        made.step()
        first = made.submit(ask(1, priority=1))
        made.preempt(leader, save=save)
        world.drain(made)
        assert made.result(first).status == made.result(leader).status == FINISHED
        world.settled(made)


def test_patience_ends() -> None:
    time = 0.0
    made = world.engine(
        "validated", store=world.store(), clock=lambda: time, flight_timeout=2.0, slots=2
    )
    made.submit(ask(0))
    follower = made.submit(ask(1))
    events = made.step()
    assert sum(x.kind == ADMITTED for x in events) == 1
    time = 2.5  # the leader is still at it
    events = made.step()
    assert [x.handle for x in events if x.kind == ADMITTED] == [follower]
    assert world.count(made, "flight_timeouts_total") == 1
    world.drain(made)
    assert made.result(follower).status == FINISHED
    world.settled(made)


def test_a_leader_outside_of_the_engine() -> None:
    """Somebody else computes the prefix and gives up: the engine does not hang."""
    store = world.store()
    made = world.engine("validated", store=store)
    lease = store.lookup(ask(0).tokens)
    handle = made.submit(ask(1))
    for _ in range(5):
        assert made.step() == [] and made.busy
    lease.release()
    world.drain(made)
    assert made.result(handle).status == FINISHED
    world.settled(made)
