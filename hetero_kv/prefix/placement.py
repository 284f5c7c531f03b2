"""Placement: at which lengths of a prompt a checkpoint is taken."""

import dataclasses
from typing import ClassVar, Protocol


class HasGranularity(Protocol):
    """A CacheSpec or a plan's Geometry."""

    @property
    def granularity(self) -> int:
        """G, tokens."""


class CheckpointPolicy(Protocol):
    """Decides at which lengths of a prompt a checkpoint is published."""

    @property
    def replay(self) -> bool:
        """Whether windows and tails may be rebuilt by replay where no checkpoint is stored."""

    @property
    def bound(self) -> int | None:
        """Tokens that such a replay may run at most, approximate or not; None: an exact one's."""

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Ascending multiples of G, at most `prompt_length`.

        candidate: how far the prompt's keys matched when it was looked up, in tokens; there it
        parts from what was stored before.
        """


@dataclasses.dataclass(frozen=True)
class Full:
    """Every multiple of G."""

    replay: bool = False
    bound: ClassVar[None] = None

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Every multiple of G up to the prompt's length."""
        step = spec.granularity
        return tuple(range(step, prompt_length + 1, step))


@dataclasses.dataclass(frozen=True)
class Periodic:
    """Every `period`-th multiple of G, and (with `end`) the last one of the prompt."""

    period: int
    replay: bool = False
    end: bool = True
    bound: ClassVar[None] = None

    def __post_init__(self):
        if self.period < 1:
            raise ValueError(f"period is a number of multiples of G >= 1, got {self.period}")

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Multiples of period * G, and what `End` chooses."""
        step = spec.granularity * self.period
        points = range(step, prompt_length + 1, step)
        if not self.end:
            return tuple(points)
        return tuple(sorted({*points, *End().points(prompt_length, spec)}))


@dataclasses.dataclass(frozen=True)
class End:
    """The largest multiples of G that the same prompt, and a longer one, can resume at."""

    replay: bool = False
    bound: ClassVar[None] = None

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """The largest multiple of G at most `prompt_length - 1`, and at most `prompt_length`."""
        step = spec.granularity
        same, longer = max(0, prompt_length - 1) // step * step, prompt_length // step * step
        if same == longer:
            return (longer,) if longer else ()
        return (same, longer) if same else (longer,)


_ENDS = End()


@dataclasses.dataclass(frozen=True)
class Fork:
    """Where requests have parted before (the candidate length), and the end."""

    replay: bool = False
    bound: ClassVar[None] = None

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """The candidate length rounded down to G, and what `End` chooses."""
        fork = min(candidate, prompt_length) // spec.granularity * spec.granularity
        ends = _ENDS.points(prompt_length, spec)
        return ends if not fork or fork in ends else (fork, *ends)


@dataclasses.dataclass(frozen=True)
class Never:
    """No checkpoints. With `replay` ("zero" in the V4 report) exact replay stands in for them."""

    replay: bool = False
    bound: ClassVar[None] = None

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Nothing."""
        return ()


@dataclasses.dataclass(frozen=True)
class Bounded:
    """No checkpoints; the last `bound` tokens are replayed, rounded up to the chunk grid.

    Approximate, and said so, where exact replay needs more: windows then begin with the replayed
    tokens, and what follows depends on where the prompt was resumed. Such state is not published.
    """

    bound: int
    replay: ClassVar[bool] = True

    def __post_init__(self):
        if self.bound < 1:
            raise ValueError(f"bounded replay runs a number of tokens >= 1, got {self.bound}")

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Nothing."""
        return ()


def placement(name: str) -> CheckpointPolicy:
    """From a name: full, periodic:<n>, every:<n>, end, fork, zero (replay), bounded:<n>, never.

    every:<n> is periodic:<n> without the end of the prompt; bounded:<n> replays n tokens, which is
    approximate where that is too few.
    """
    kind, _, number = name.partition(":")
    simple = {
        "full": Full,
        "end": End,
        "fork": Fork,
        "never": Never,
        "zero": lambda: Never(replay=True),
    }
    if number.isdigit() and kind in ("periodic", "every"):
        return Periodic(int(number), end=kind == "periodic")
    if number.isdigit() and kind == "bounded":
        return Bounded(int(number))
    if kind not in simple or number:
        known = ", ".join((*simple, "periodic:<n>", "every:<n>", "bounded:<n>"))
        raise ValueError(f"unknown checkpoint policy {name!r}; known: {known}")
    return simple[kind]()
