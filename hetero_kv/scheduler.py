"""Who waits, who runs, in which slot: the host's books of an engine. No arrays, no model.

Order: higher priority first, then earlier arrival, then earlier submission.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from hetero_kv.pages.brought import Brought
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.plan import Reason
from hetero_kv.requests import DECODE, PREFILL, WAITING, Handle, Request
from hetero_kv.slot_pages import Prefix
from hetero_kv.state import Cache


@dataclasses.dataclass(eq=False)
class Run:
    """One pass of a prompt through the model, in prompt tokens. A preempted request may need more.

    The three counts add up to `position` once the replay is over.
    """

    candidate: int = 0
    resumable: int = 0
    reused: int = 0  # state that came out of the store
    replayed: int = 0
    computed: int = 0
    replay: tuple[int, int] | None = None
    position: int = 0  # where the row stands
    approximate: bool = False
    routes: dict[str, str] = dataclasses.field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    points: tuple[int, ...] = ()  # lengths at which to publish
    epoch: bytes | None = None
    brought: Brought | None = None  # by the restore, until the first call after it has run
    shared: dict[str, int] = dataclasses.field(default_factory=dict)  # pages got by sharing
    prompt_logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    bits: list[jax.Array] = dataclasses.field(default_factory=list)  # verdicts not read yet

    @property
    def tokens(self) -> int:
        """All tokens that it has gone through."""
        return self.reused + self.replayed + self.computed


@dataclasses.dataclass(eq=False)
class Saved:
    """The state of a preempted request in host memory."""

    row: Cache  # of numpy arrays, batch 1
    status: str
    prefix: Prefix  # whose pages it may share again

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return sum(x.nbytes for x in jax.tree.leaves(self.row))


@dataclasses.dataclass(eq=False)
class Entry:
    """A request within the engine."""

    handle: Handle
    request: Request
    prompt: np.ndarray  # i32[n], a copy of its own
    arrival: float
    status: str = WAITING
    slot: int | None = None
    run: Run = dataclasses.field(default_factory=Run)
    emitted: list[int] = dataclasses.field(default_factory=list)  # tokens of the answer
    cursor: int = 0  # how many of them this run has made (again)
    # Fed tokens of each call that verified a guess, by the number of the token it made first.
    pieces: dict[int, int] = dataclasses.field(default_factory=dict)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    first_token_s: float = float("nan")
    lease: Lease | None = None
    patience: float | None = None  # until when it waits for a flight
    saved: Saved | None = None
    cold: bool = False  # no reuse any more, after a bad verdict or a failure
    apart: bool = False  # shares no pages any more, after a bad verdict on shared ones
    failures: int = 0
    notes: list[Reason] = dataclasses.field(default_factory=list)  # of all runs
    discarded: int = 0
    preemptions: int = 0

    @property
    def order(self) -> tuple:
        """Sorts entries: who goes first."""
        return -self.request.priority, self.arrival, self.handle.number

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        """Tokens that its row holds at the end: the last one of the answer is never fed."""
        return self.size + int(self.request.max_new_tokens) - 1

    def discard(self) -> int:
        """Starts a new run; the tokens of the old one were in vain."""
        lost = self.run.tokens
        self.discarded += lost
        self.run, self.cursor = Run(), 0
        return lost


class Scheduler:
    """Waiting entries in order, and the slots.

    tenant_slots: slots that one tenant may have at a time; None: all.
    """

    def __init__(self, slots: int, max_waiting: int, tenant_slots: int | None = None):
        if max_waiting < 1 or (tenant_slots is not None and tenant_slots < 1):
            raise ValueError(f"need at least 1, got {max_waiting=}, {tenant_slots=}")
        self.slots: list[Entry | None] = [None] * slots
        self.waiting: list[Entry] = []
        self.max_waiting = max_waiting
        self.tenant_slots = tenant_slots

    # -- queries -------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no request can be taken in any more."""
        return len(self.waiting) >= self.max_waiting

    def active(self) -> list[Entry]:
        """Entries in slots, by slot."""
        return [x for x in self.slots if x is not None]

    def prefilling(self) -> list[Entry]:
        """In the order in which their prompts are run."""
        return sorted((x for x in self.active() if x.status == PREFILL), key=lambda x: x.order)

    def decoding(self) -> list[Entry]:
        """By slot."""
        return [x for x in self.active() if x.status == DECODE]

    def arrived(self, now: float) -> list[Entry]:
        """Waiting entries whose time has come, in order."""
        return sorted((x for x in self.waiting if x.arrival <= now), key=lambda x: x.order)

    def next_arrival(self) -> float | None:
        """When the next waiting entry arrives or has arrived."""
        return min((x.arrival for x in self.waiting), default=None)

    def has_room(self, may_preempt: bool) -> bool:
        """Whether `place` can find a slot for anybody who waits; quick where it cannot."""
        if not self.waiting or None in self.slots:
            return bool(self.waiting)
        highest = max(x.request.priority for x in self.waiting)
        return may_preempt and any(x.request.priority < highest for x in self.active())

    def place(self, entry: Entry, may_preempt: bool) -> tuple[int, Entry | None] | None:
        """A slot for an entry, and who must leave it; None: there is none for it now.

        Only entries of strictly lower priority are preempted: the last in order of them.
        """
        mine = [x for x in self.active() if x.request.tenant == entry.request.tenant]
        among = self.active()
        if self.tenant_slots is not None and len(mine) >= self.tenant_slots:
            among = mine  # its tenant has no more than these slots
        elif None in self.slots:
            return self.slots.index(None), None
        lower = [x for x in among if x.request.priority < entry.request.priority]
        if not (may_preempt and lower):
            return None
        victim = max(lower, key=lambda x: x.order)
        return victim.slot, victim

    def below(self, entry: Entry) -> list[Entry]:
        """Entries in slots that may be preempted for one, the first to go last."""
        lower = (x for x in self.active() if x.request.priority < entry.request.priority)
        return sorted(lower, key=lambda x: x.order)

    # -- changes -------------------------------------------------------------------------------

    def wait(self, entry: Entry) -> None:
        """Into the queue, out of its slot if it has one."""
        self.leave(entry)
        entry.status = WAITING
        self.waiting.append(entry)

    def enter(self, entry: Entry, slot: int) -> None:
        """Out of the queue into a free slot."""
        if self.slots[slot] is not None:
            raise AssertionError(f"slot {slot} is taken by {self.slots[slot].handle}")
        self.waiting.remove(entry)
        self.slots[slot] = entry
        entry.slot = slot

    def leave(self, entry: Entry) -> None:
        """Out of wherever it is."""
        if entry.slot is not None:
            self.slots[entry.slot] = None
            entry.slot = None
        elif entry in self.waiting:
            self.waiting.remove(entry)

    def problems(self) -> list[str]:
        """What is wrong with the books (DESIGN rule 7); an empty list: nothing."""
        found = list(self._wrong(self.active(), lambda i, x: self.slots[x.slot or 0] is x))
        found += self._wrong(self.waiting, lambda i, x: x.slot is None and x.status == WAITING)
        numbers = [x.handle.number for x in self.active() + self.waiting]
        if len(set(numbers)) < len(numbers):
            found.append(f"entries are in two places: {sorted(numbers)}")
        free = sum(x is None for x in self.slots)
        if free + len(self.active()) != len(self.slots):
            found.append(f"{free} free + {len(self.active())} owned != {len(self.slots)} slots")
        if len(self.waiting) > self.max_waiting + len(self.slots):
            found.append(f"{len(self.waiting)} wait, more than {self.max_waiting=} allows")
        return found

    @staticmethod
    def _wrong(entries: list[Entry], right: Callable[[int, Entry], bool]) -> Iterator[str]:
        for i, entry in enumerate(entries):
            if not right(i, entry):
                yield f"{entry.handle} is {entry.status} in slot {entry.slot}"
