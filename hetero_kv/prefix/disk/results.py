"""What the tier's methods return."""

import dataclasses
from collections.abc import Callable

from hetero_kv.prefix.disk.books import Entry
from hetero_kv.prefix.host import Ticket

LOST = "lost"  # the failure of a flush that could not keep everything


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """An object of the tier, as a start needs to know it. nbytes: what it takes on disk."""

    ticket: Ticket
    kind: str
    key: bytes
    depth: int
    meta: bytes
    nbytes: int

    @classmethod
    def of(cls, entry: Entry) -> "Stored":
        """From the books."""
        return cls(entry.ticket, entry.kind, entry.key, entry.depth, entry.meta, entry.record_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush achieved. ok: everything put or dropped before it is durable.

    failure: the first reason why not. lost: tickets of objects that were put, or had been
    stored, and are not there any more, since the last flush.
    """

    ok: bool
    failure: str = ""
    lost: tuple[Ticket, ...] = ()


def leaf_first(stored: Stored) -> tuple[int, int]:
    """What goes first when a limit was lowered: the deepest blocks, the oldest of them."""
    return -stored.depth, stored.ticket.generation


Order = Callable[[Stored], object]
