"""Leases: what a lookup promised, pinned until released."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from hetero_kv.pages.brought import Brought
from hetero_kv.prefix.index import Group
from hetero_kv.prefix.keys import Keys, read_root
from hetero_kv.prefix.plan import Plan, Reason


class Flight:
    """What one open lease is computing of a prefix, for single flight; see flight.py.

    start: its first block. goals: ascending lengths that others can resume once they are published.
    """

    open = True
    progress = 0  # publishes of it
    reached = 0  # tokens published of it
    changed: threading.Condition | None = None  # made by the first that waits

    def __init__(self, keys: Keys, start: int, goals: Sequence[int]):
        self.keys = keys
        self.start = start
        self.goals = goals


class Lease:
    """The answer to a lookup. A context manager: leaving it, also by an error, releases the pins.

    Pinned groups are not evicted. They may still vanish by `clear` or by damage, which the restore
    notices by their tickets' generations; it then makes a shorter plan, and the properties below
    tell that one. A lease that becomes garbage is released by and by.
    """

    # For single flight: see flight.py.
    flight: Flight | None = None  # the one that this lease leads
    following: Flight | None = None
    goal = 0  # tokens that the flight followed is going to publish of this prompt
    seen = 0  # its progress when the plan was made
    fruitless = 0  # flights that were followed and brought nothing
    released = True  # until pinned
    brought: Brought | None = None  # by the last restore

    def __init__(
        self,
        unpin: Callable[["Lease"], None],
        abandon: Callable[["Lease"], None],
        keys: Keys,
        prompt_length: int,
        plan: Plan,
        history: list[Group],
        checkpoint: Group | None,
        points: tuple[int, ...] = (),
    ):
        self.keys = keys
        self.prompt_length = prompt_length
        self._points = points
        self._unpin = unpin
        self._abandon = abandon
        self.renew(plan, history, checkpoint)
        self.released = False

    @property
    def epoch(self) -> bytes:
        """Digest of the identity that it was opened under; b"" if the prompt is not cacheable."""
        return read_root(self.keys.root_content).epoch

    @property
    def candidate_length(self) -> int:
        """How far the keys matched, in tokens; a multiple of B."""
        return self.plan.candidate_length

    @property
    def resumable_length(self) -> int:
        """How far all components can be resumed, in tokens; a multiple of G."""
        return self.plan.resumable_length

    @property
    def routes(self) -> Mapping[str, str]:
        """Per component how it comes back: "host", "disk" (some of it), "replay" or "none"."""
        return self.plan.routes

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the length was shortened, component by component."""
        return self.plan.reasons

    @property
    def replay(self) -> tuple[int, int] | None:
        """Tokens [start, stop) to replay after the restore, or None."""
        return self.plan.replay

    @property
    def approximate(self) -> bool:
        """Whether that replay is too short to be exact: results differ from a cold run's."""
        return self.plan.approximate

    @property
    def leader(self) -> bool:
        """Whether later requests may wait for what this one computes and publishes."""
        return self.flight is not None

    @property
    def pending(self) -> int:
        """How far another open lease is computing this prompt's prefix now, in tokens.

        0: there is nothing (more) to wait for; if there was, `store.wait` plans anew.
        """
        flight = self.following
        return self.goal if flight and flight.open and flight.reached < self.goal else 0

    @property
    def checkpoint_points(self) -> tuple[int, ...]:
        """Lengths beyond the resumable one at which prefill should end a chunk and publish."""
        length = self.plan.resumable_length
        return tuple([x for x in self._points if x > length])

    def groups(self) -> list[Group]:
        """Everything pinned."""
        return self.history + ([self.checkpoint] if self.checkpoint else [])

    def renew(self, plan: Plan, history: list[Group], checkpoint: Group | None) -> None:
        """Another plan, made because this one's promise could not be kept. For the catalog."""
        self.plan = plan
        self.history = history  # groups of the blocks to restore, in order
        self.checkpoint = checkpoint

    def release(self) -> None:
        """Unpins everything. May be called again."""
        if not self.released:
            self.released = True
            self._unpin(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if not self.released:
            self._abandon(self)
