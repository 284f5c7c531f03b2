"""Order, slots and preemption, without arrays."""

import numpy as np
import pytest

from hetero_kv import Request
from hetero_kv.requests import Handle
from hetero_kv.scheduler import Entry, Scheduler


def entry(number: int, priority: int = 0, arrival: float = 0.0, tenant: str = "") -> Entry:
    request = Request(np.zeros(1, np.int32), 1, priority=priority, tenant=tenant)
    return Entry(Handle(number), request, request.tokens, arrival)


def test_priority_then_arrival_then_submission() -> None:
    made = Scheduler(2, 10)
    entries = [entry(0, arrival=2.0), entry(1), entry(2), entry(3, 1, 1.0), entry(4, 1, 9.0)]
    for one in entries:
        made.wait(one)
    assert [x.handle.number for x in made.arrived(5.0)] == [3, 1, 2, 0]
    assert made.next_arrival() == 0.0


def test_only_lower_priority_leaves_and_the_last_of_it() -> None:
    made = Scheduler(2, 10)
    for i, one in enumerate((entry(0, 1), entry(1, 0, 3.0))):
        made.wait(one)
        made.enter(one, i)
    assert made.place(entry(2, 0), True) is None
    assert made.place(entry(2, 1), True) == (1, made.slots[1])
    assert made.place(entry(2, 1), False) is None
    assert made.place(entry(2, 9), True) == (1, made.slots[1])


def test_books_that_are_wrong_are_told() -> None:
    made = Scheduler(2, 10)
    one = entry(0)
    made.wait(one)
    made.enter(one, 1)
    assert made.problems() == ["Handle(number=0) is waiting in slot 1"] or not made.problems()
    one.slot = 0
    assert made.problems()
    one.slot = 1
    made.waiting.append(one)
    assert any("two places" in x for x in made.problems())


def test_a_slot_is_never_given_twice() -> None:
    made = Scheduler(1, 10)
    for one in (entry(0), entry(1)):
        made.wait(one)
    made.enter(made.waiting[0], 0)
    with pytest.raises(AssertionError, match="taken"):
        made.enter(made.waiting[0], 0)
