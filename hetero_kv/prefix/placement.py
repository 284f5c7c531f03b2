"""Placement: at which lengths of a prompt a checkpoint is taken."""

import dataclasses
from typing import Protocol


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

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """The largest multiple of G at most `prompt_length - 1`, and at most `prompt_length`."""
        step = spec.granularity
        ends = {max(0, prompt_length - 1) // step * step, prompt_length // step * step}
        return tuple(sorted(ends - {0}))


@dataclasses.dataclass(frozen=True)
class Fork:
    """Where requests have parted before (the candidate length), and the end."""

    replay: bool = False

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """The candidate length rounded down to G, and what `End` chooses."""
        fork = min(candidate, prompt_length) // spec.granularity * spec.granularity
        ends = set(End().points(prompt_length, spec))
        return tuple(sorted((ends | {fork}) - {0}))


@dataclasses.dataclass(frozen=True)
class Never:
    """No checkpoints. With `replay` ("zero" in the V4 report) exact replay stands in for them."""

    replay: bool = False

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Nothing."""
        return ()


def placement(name: str) -> CheckpointPolicy:
    """From a name: full, periodic:<n>, every:<n>, end, fork, zero (replay), never.

    every:<n> is periodic:<n> without the end of the prompt.
    """
    kind, _, number = name.partition(":")
    simple = {
        "full": Full,
        "end": End,
        "fork": Fork,
        "never": Never,
        "zero": lambda: Never(replay=True),
    }
    if kind in ("periodic", "every") and number.isdigit():
        return Periodic(int(number), end=kind == "periodic")
    if kind not in simple or number:
        raise ValueError(f"unknown checkpoint policy {name!r}; see placement.placement")
    return simple[kind]()
