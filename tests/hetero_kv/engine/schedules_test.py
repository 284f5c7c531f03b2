"""Random schedules of everything that can happen to an engine; the books are exact after each."""

import functools
import math

import numpy as np
import pytest

from hetero_kv import Engine, Request
from hetero_kv.contract import History
from hetero_kv.requests import CANCELLED, FAILED, FINISHED, REFUSED
from tests.hetero_kv.engine import world
from tests.models import families

REQUESTS = world.KNOWN
STORES = ("full", "full", "zero", "periodic:16", "fork")


@functools.cache
def unit(name: str) -> int:
    """Bytes of one block and one checkpoint."""
    transfer = world.store(name).transfer
    return transfer.history_layout(1).nbytes + transfer.checkpoint_layout.nbytes


def scaled(size: int, name: str) -> int:
    """As many blocks and checkpoints as `size` bytes hold of the small model."""
    return size * unit(name) // unit("small")


class BadStore:
    """Makes calls of a store raise while `failing` names them."""

    def __init__(self, store):
        self.failing: set[str] = set()
        for name in ("lookup", "restore", "publish", "wait"):
            setattr(store, name, self._wrapped(name, getattr(store, name)))

    def _wrapped(self, name: str, call):
        def wrapped(*args, **options):
            if name in self.failing:
                raise OSError(f"{name} fails")
            return call(*args, **options)

        return wrapped


class Schedule:
    """One random history; answers are drafted in every third, pages kept in every other one."""

    def __init__(self, seed: int, paged: bool = False, name: str = "small"):
        self.rng = np.random.default_rng([9, seed])
        self.paged, self.name = paged, name
        self.drafts = seed % 3 == 0 and name == "small"  # whose answers `guess` knows
        spec = world.model(name)[0].cache_spec
        leaves = [slot.leaf for slot in spec.slots()]
        self.history = sorted({x.component for x in leaves if isinstance(x.contract, History)})
        self.told = sorted({x.component for x in leaves if x.dtype == "int32"})  # by evidence
        replayed = not math.isinf(spec.replay_length)
        stores = [x for x in STORES if replayed or x != "zero"]
        self.reuse = str(self.rng.choice(["off", "validated", "validated", "validated", "shadow"]))
        self.store = self.bad = None
        if self.reuse != "off":
            size = scaled(int(self.rng.choice([20_000, 60_000, world.PLENTY])), name)
            self.store = world.store(name, policy=str(self.rng.choice(stores)), host_bytes=size)
            self.bad = BadStore(self.store)
        self.time = 0.0
        self.made: Engine = world.engine(
            self.reuse,
            name,
            store=self.store,
            clock=lambda: self.time,
            audit_share=0.3,
            chunks_per_step=int(self.rng.integers(1, 4)),
            preempt=str(self.rng.choice(["save", "recompute", "never"])),
            saved_bytes=scaled(int(self.rng.choice([0, 30_000, 1 << 30])), name),
            tenant_slots=self.rng.choice([None, 1, 2]),
            max_waiting=int(self.rng.choice([4, 64])),
            flight_timeout=float(self.rng.choice([0, 3, 1e9])),
            paged=paged,
            drafter=world.guess if self.drafts else None,
            keep_pages=paged and seed % 2 > 0,
        )
        self.numbers: dict = {}
        self.damaged = False

    def pick(self):
        """A handle, perhaps of a request that has ended."""
        return self.rng.choice(list(self.numbers)) if self.numbers else None

    def act(self) -> None:
        """One thing happens."""
        made, rng = self.made, self.rng
        rare = ["cancel", "preempt", "bad", "store", "row"] + ["page"] * self.paged
        what = rng.choice(["submit"] * 4 + ["step"] * 9 + rare)
        if what == "submit":
            number = int(rng.integers(REQUESTS))
            base = world.request(number)
            request = Request(
                base.tokens,
                base.max_new_tokens,
                base.stop,
                base.sampling,
                tenant=str(rng.choice(["", "a"])),
                priority=int(rng.integers(0, 3)),
                arrival=self.time + float(rng.choice([0, 0, 2])),
            )
            self.numbers[made.submit(request)] = number
        elif what == "bad":
            tokens = rng.choice([-1, world.model(self.name)[0].config.vocab_size, 10**6], 3)
            self.numbers[made.submit(Request(tokens, 3))] = None
        elif what == "cancel" and self.numbers:
            made.cancel(self.pick())
        elif what == "preempt" and self.numbers:
            made.preempt(self.pick(), save=bool(rng.integers(2)))
        elif what == "store" and self.store is not None:
            if rng.integers(2):
                self.store.clear()
            else:
                calls = ["lookup", "restore", "publish", "wait"]
                self.bad.failing = set(rng.choice(calls, rng.integers(0, 3)).tolist())
        elif what == "row" and made.scheduler.active():
            entry = made.scheduler.active()[0]
            self.damaged |= world.damage(made, entry.slot, self.told[-1], evidence=True)
        elif what == "page" and made.scheduler.active():
            # What the books of references say is left alone: they are compared after each action.
            entry = made.scheduler.active()[-1]
            component, field = rng.choice(self.history), rng.choice(["generation", "owner", "form"])
            self.damaged |= world.damage_page(made, entry.slot, component, field)
        else:
            made.step()
            self.time += 1
        assert made.problems() == []

    def run(self) -> dict[str, int]:
        """The whole history; how many requests ended in which way."""
        for _ in range(90):
            self.act()
        if self.bad is not None:
            self.bad.failing.clear()
        while self.made.busy:
            self.made.step()
            self.time += 1
            assert self.made.problems() == []
        ends: dict[str, int] = {}
        for handle, number in self.numbers.items():
            result = self.made.result(handle)
            ends[result.status] = ends.get(result.status, 0) + 1
            if number is None:
                assert result.status == REFUSED and "tokens must be in" in result.why
            elif result.status == FINISHED:
                world.same_answer(result, number, self.name, drafts=self.drafts)
            elif result.status == FAILED:
                assert self.damaged, result.why
            else:
                assert result.status in (CANCELLED, REFUSED)
                want = world.alone(number, self.name, drafts=self.drafts).tokens
                assert result.tokens.tolist() == want[: len(result.tokens)].tolist()
        world.settled(self.made)
        assert world.count(self.made, "redecode_mismatches_total") == 0
        assert world.count(self.made, "audits_total", outcome="differs") == 0
        return ends


def _run(seeds: range, paged: bool = False, name: str = "small") -> None:
    ends: dict[str, int] = {}
    happened: dict[str, int] = {}
    for seed in seeds:
        schedule = Schedule(seed, paged, name)
        for status, number in schedule.run().items():
            ends[status] = ends.get(status, 0) + number
        for what, number in schedule.made.counters.snapshot().items():
            happened[what] = happened.get(what, 0) + number
    few = 0.4 * len(seeds)
    assert min(ends.get(x, 0) for x in (FINISHED, CANCELLED, REFUSED)) > few, ends
    assert ends[FINISHED] > 8 * len(seeds), ends
    drafted = ("drafted_tokens_total", "accepted_tokens_total", "redecoded_tokens_total")
    for what in drafted if name == "small" else ():
        assert sum(n for x, n in happened.items() if f"engine_{what}" in x) > few, what
    if paged:
        some = ("shared_pages_total", "page_waits_total", "verdict_bits_total")
        for what in (*some, "revived_pages_total", "dropped_pages_total"):
            assert sum(n for x, n in happened.items() if f"engine_{what}" in x) > few, what


@pytest.mark.parametrize("part", range(3))
def test_random_schedules(part: int) -> None:
    """50 in pages, 25 in rows."""
    _run(range(25 * part, 25 * part + 25), paged=part < 2)


@pytest.mark.full
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_many_random_schedules(paged: bool) -> None:
    _run(range(75, 1075), paged)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4", *families.every()])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_random_schedules_of_every_family(name: str, paged: bool) -> None:
    _run(range(10), paged, name)
