"""Random histories against a dict: the same objects, the ledger exact, the budget kept."""

import pathlib
import shutil
import tempfile

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from tests.hetero_kv.prefix import conftest
from tests.hetero_kv.prefix.disk import objects

NUMBERS = st.integers(0, 60)
CAPACITIES = (1 << 17, 3 << 16)


class Histories(stateful.RuleBasedStateMachine):
    """`durable` and `present`: what must be found after a crash, and now."""

    def __init__(self):
        super().__init__()
        parent = conftest.MEMORY if pathlib.Path(conftest.MEMORY).is_dir() else None
        self.directory = pathlib.Path(tempfile.mkdtemp(dir=parent))
        self.tickets, self.dead = {}, []
        self.capacity = CAPACITIES[1]
        self.index_rows = 1
        self.tier = self.open()

    def open(self):
        return objects.make(
            self.directory,
            capacity=self.capacity,
            segment_bytes=5000,
            queue_bytes=8000,
            index_rows=self.index_rows,
        )

    @stateful.rule(i=NUMBERS)
    def put(self, i):
        ticket = objects.put(self.tier, i)
        if i in self.tickets:
            assert ticket == self.tickets[i]
        elif ticket is not None:
            self.tickets[i] = ticket
            assert ticket not in self.dead

    @stateful.rule(start=NUMBERS, count=st.integers(5, 20))
    def put_many(self, start, count):
        for i in range(start, start + count):
            self.put(i)

    @stateful.rule(i=NUMBERS)
    def drop(self, i):
        ticket = self.tickets.pop(i, None)
        if ticket is not None:
            assert self.tier.drop(ticket)
            self.dead.append(ticket)

    @stateful.rule(modulus=st.integers(2, 5))
    def drop_many(self, modulus):
        for i in list(self.tickets):
            if i % modulus == 0:
                self.drop(i)

    @stateful.rule(i=NUMBERS)
    def read(self, i):
        found = objects.read(self.tier, i)
        assert found is True if i in self.tickets else found == "absent"

    @stateful.rule()
    def read_dead(self):
        for ticket in self.dead[-5:]:
            assert self.tier.read(ticket, objects.name(0)).failure == "stale"
            assert not self.tier.drop(ticket)

    @stateful.rule(most=st.integers(1, 9))
    def write_back(self, most):
        self.tier.write_back(most)

    @stateful.rule()
    def flush(self):
        self.settle(self.tier.flush())

    @stateful.rule()
    def clear(self):
        self.dead += self.tickets.values()
        self.tickets = {}
        self.tier.clear()

    @stateful.rule(
        capacity=st.sampled_from(CAPACITIES),
        index=st.booleans(),
        crash=st.booleans(),
        index_rows=st.sampled_from((1, 4, 512)),
    )
    def restart(self, capacity, index, crash, index_rows):
        """crash: the tier ends after a flush, without a close; its index may be behind then."""
        if crash:
            self.flush()
            old, self.directory = self.directory, pathlib.Path(f"{self.directory}x")
            objects.copy(old, self.directory)
            self.tier.close()
            shutil.rmtree(old)
        else:
            self.settle(self.tier.close())
        self.index_rows = index_rows
        if not index:
            for path in self.directory.glob("index*"):
                path.unlink()
        smaller, self.capacity = capacity < self.capacity, capacity
        self.tier = self.open()
        held = objects.held(self.tier)
        assert held <= self.tickets.keys() if smaller else held == self.tickets.keys()
        self.tickets = {i: self.tickets[i] for i in held}
        assert {x.ticket for x in self.tier.stored()} == set(self.tickets.values())
        self.dead = []  # tickets do not outlive the process

    def settle(self, flushed):
        assert flushed.ok, flushed
        lost = set(flushed.lost)
        self.tickets = {i: x for i, x in self.tickets.items() if x not in lost}
        assert objects.held(self.tier) in (self.tickets.keys(), set())

    @stateful.invariant()
    def ledger_is_exact(self):
        assert self.tier.problems() == []
        assert objects.usage(self.directory) <= self.capacity

    def teardown(self):
        self.flush()
        assert objects.good(self.tier, range(90)) == self.tickets.keys()
        self.tier.close()
        shutil.rmtree(self.directory)


def run(examples, steps):
    stateful.run_state_machine_as_test(
        Histories,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def test_random_histories():
    run(12, 25)


@pytest.mark.full
def test_many_random_histories():
    run(600, 60)
