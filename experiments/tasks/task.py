"""What a training task is: numbered batches, a held-out set, and the score of a blind guess."""

from collections.abc import Iterator
from typing import Protocol, TypedDict

import numpy as np


class Batch(TypedDict):
    """One batch; position t of `targets` is what to say after reading `tokens[:, : t + 1]`."""

    tokens: np.ndarray  # i32[B, T]
    targets: np.ndarray  # i32[B, T]
    weights: np.ndarray  # f32[B, T]; 0 where nothing is asked


class Task(Protocol):
    """A mutable dataclass whose fields are the task's configuration."""

    batch_size: int

    @property
    def vocab_size(self) -> int:
        """Number of token ids the task uses."""

    @property
    def chance(self) -> float:
        """Accuracy of a guess that has seen none of the facts."""

    def check(self) -> None:
        """Raises ValueError where the fields do not fit together."""

    def batch(self, step: int, seed: int = 0) -> Batch:
        """The training batch of a step: a pure function of the fields, `step` and `seed`."""

    def evaluate(self) -> Iterator[Batch]:
        """The held-out batches, the same ones each time and for every seed."""


def training_generator(seed: int, step: int) -> np.random.Generator:
    """Depends on nothing but its arguments, so that a data position is an integer."""
    return np.random.default_rng([0, seed, step])


def evaluation_generator(index: int) -> np.random.Generator:
    """A stream of its own, so that no training step repeats a held-out batch."""
    return np.random.default_rng([1, index])
