"""Policies: where checkpoints are taken, what is evicted first, how the budget is shared."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar


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
    """Every `period`-th multiple of G, and the last one of the prompt."""

    period: int
    replay: bool = False

    def __post_init__(self):
        if self.period < 1:
            raise ValueError(f"period is a number of multiples of G >= 1, got {self.period}")

    def points(
        self, prompt_length: int, spec: HasGranularity, candidate: int = 0
    ) -> tuple[int, ...]:
        """Multiples of period * G, and the largest multiple of G."""
        step = spec.granularity * self.period
        points = set(range(step, prompt_length + 1, step))
        return tuple(sorted(points | set(End().points(prompt_length, spec))))


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


Item = TypeVar("Item", bound=Hashable)


class Eviction(Protocol[Item]):
    """An order of eviction. One instance per kind of group."""

    def add(self, item: Item) -> None:
        """A new item."""

    def touch(self, item: Item) -> None:
        """The item was used."""

    def remove(self, item: Item) -> None:
        """The item is gone."""

    def order(self) -> Iterator[Item]:
        """All items, first victim first. Not to be changed while iterating."""


class Lru(Eviction[Item]):
    """Least recently used first."""

    def __init__(self):
        self._items: collections.OrderedDict[Item, None] = collections.OrderedDict()

    def add(self, item: Item) -> None:
        """A new item, the most recent one."""
        self._items[item] = None

    def touch(self, item: Item) -> None:
        """Makes the item the most recent one."""
        self._items.move_to_end(item)

    def remove(self, item: Item) -> None:
        """Forgets the item."""
        del self._items[item]

    def order(self) -> Iterator[Item]:
        """Oldest first."""
        return iter(self._items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """All choices of a store.

    checkpoint_share: part of the byte budget that checkpoint groups are entitled to; history
    groups have the rest. Either kind may use what the other leaves free.
    """

    checkpoints: CheckpointPolicy = Full()
    eviction: Callable[[], Eviction] = Lru
    checkpoint_share: float = 0.5

    def __post_init__(self):
        if not 0.0 <= self.checkpoint_share <= 1.0:
            raise ValueError(f"checkpoint_share is within 0 .. 1, got {self.checkpoint_share}")

    @classmethod
    def named(cls, name: str, **fields) -> "Policy":
        """From a name: full, periodic:<n>, end, fork, zero (replay), never."""
        kind, _, number = name.partition(":")
        simple = {
            "full": Full,
            "end": End,
            "fork": Fork,
            "never": Never,
            "zero": lambda: Never(replay=True),
        }
        if kind == "periodic" and number.isdigit():
            return cls(checkpoints=Periodic(int(number)), **fields)
        if kind not in simple or number:
            raise ValueError(f"unknown checkpoint policy {name!r}; see Policy.named")
        return cls(checkpoints=simple[kind](), **fields)
