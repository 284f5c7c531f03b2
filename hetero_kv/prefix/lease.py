"""Leases: what a lookup promised, pinned until released."""

from collections.abc import Callable
from typing import Self

from hetero_kv.prefix.index import Group
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.plan import Plan, Reason


class Lease:
    """The answer to a lookup. A context manager: leaving it, also by an error, releases the pins.

    Pinned groups are not evicted. They may still vanish by `clear` or by damage, which the restore
    notices by their tickets' generations; it then makes a shorter plan, and the properties below
    tell that one.
    """

    def __init__(
        self,
        unpin: Callable[["Lease"], None],
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
        self.released = False
        self._unpin = unpin
        self.renew(plan, history, checkpoint)

    @property
    def candidate_length(self) -> int:
        """How far the keys matched, in tokens; a multiple of B."""
        return self.plan.candidate_length

    @property
    def resumable_length(self) -> int:
        """How far all components can be resumed, in tokens; a multiple of G."""
        return self.plan.resumable_length

    @property
    def routes(self) -> dict[str, str]:
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
    def checkpoint_points(self) -> tuple[int, ...]:
        """Lengths beyond the resumable one at which prefill should end a chunk and publish."""
        return tuple(x for x in self._points if x > self.resumable_length)

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
