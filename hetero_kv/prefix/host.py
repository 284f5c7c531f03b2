"""The host tier: a bounded number of bytes in main memory, handed out and taken back exactly.

Objects are read by copy. Generation and checksum are compared *after* the copy (DESIGN rule 11),
so whatever happened to a slot while it was read is noticed.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hetero_kv.prefix.payload import Payload

STALE, CORRUPT = "stale", "corrupt"


class Ticket(NamedTuple):
    """A slot of the tier and the generation it had when the object was put there."""

    slot: int
    generation: int


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What a read delivered: a payload of its own, or a failure (STALE or CORRUPT, and where)."""

    payload: Payload | None
    failure: str = ""
    component: str = ""


class HostTier:
    """Payloads in main memory within `capacity` bytes. Slots are recycled, generations are not."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"a tier needs capacity >= 1 byte, got {capacity}")
        self.capacity = capacity
        self.free = capacity  # bytes nobody owns
        self._least_free = capacity  # before anything was last dropped
        self._payloads: list[Payload | None] = []  # per slot
        self._generations: list[int] = []  # per slot, bumped whenever it is recycled
        self._vacant: list[int] = []

    def put(self, payload: Payload) -> Ticket | None:
        """Takes over a payload that the caller will not touch again; None if it does not fit."""
        placed = self.place(payload)
        return None if placed is None else Ticket(*placed)

    def place(self, payload: Payload) -> tuple[int, int] | None:
        """`put`, for many at a time: slot and generation as plain numbers."""
        nbytes = payload.nbytes
        if nbytes > self.free:
            return None
        self.free -= nbytes
        if self._vacant:
            slot = self._vacant.pop()
            self._payloads[slot] = payload
            return slot, self._generations[slot]
        self._payloads.append(payload)
        self._generations.append(0)
        return len(self._payloads) - 1, 0

    def place_run(self, payloads: Sequence[Payload], total: int) -> int | None:
        """`place` for all of them, `total` bytes, in slots side by side of generation 0.

        Returns the first slot; None if they do not fit, or slots are to be recycled first.
        """
        if total > self.free or self._vacant:
            return None
        self.free -= total
        first, count = len(self._payloads), len(payloads)
        self._payloads += payloads
        self._generations += [0] * count
        return first

    def read(self, ticket: Ticket, label: bytes) -> Fetched:
        """Copies an object out, then checks that the copy is the group that `label` names."""
        payload = self._payloads[ticket.slot]
        if payload is None:
            return Fetched(None, STALE)
        copy = payload.copy()
        if self._generations[ticket.slot] != ticket.generation:
            return Fetched(None, STALE)
        component = copy.damaged(label)
        return Fetched(None, CORRUPT, component) if component else Fetched(copy)

    def payload(self, ticket: Ticket) -> Payload:
        """The object itself, which nobody may change. The ticket must be current."""
        if not self.is_current(ticket):
            raise ValueError(f"{ticket} is not current")
        return self._payloads[ticket.slot]

    def drop(self, ticket: Ticket) -> None:
        """Gives an object's bytes back. The ticket must be current."""
        slot, generation = ticket
        payload = self._payloads[slot]
        if payload is None or self._generations[slot] != generation:
            raise ValueError(f"{ticket} is not current: dropped twice?")
        self._payloads[slot] = None
        self._generations[slot] = generation + 1
        self._vacant.append(slot)
        if self.free < self._least_free:
            self._least_free = self.free
        self.free += payload.nbytes

    def is_current(self, ticket: Ticket) -> bool:
        """Whether the ticket's object is still there."""
        held = self._payloads[ticket.slot] is not None
        return held and self._generations[ticket.slot] == ticket.generation

    @property
    def peak(self) -> int:
        """The most bytes that were ever owned."""
        return self.capacity - min(self._least_free, self.free)

    def owned(self) -> int:
        """Bytes of all objects, counted anew; free + owned == capacity (DESIGN rule 7)."""
        return sum(x.nbytes for x in self._payloads if x is not None)
