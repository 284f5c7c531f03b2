"""Copying at a distance: a random segment repeats until the end, and its continuation is asked.

The smallest task that needs an induction head (arXiv 2209.11895). With windows only, the reach is
`layers * (window - 1)` tokens, so accuracy falls to chance at exactly that distance.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments import config_checks
from experiments.tasks import task


@dataclasses.dataclass(kw_only=True)
class Induction:
    """Rows repeat with a period drawn from `distances`."""

    batch_size: int = 16
    length: int = 128
    distances: tuple[int, ...] = (8, 16, 24, 32, 48, 64)
    vocab: int = 64
    eval_batches: int = 12  # batch i holds distance i modulo their number

    @property
    def vocab_size(self) -> int:
        return self.vocab

    @property
    def chance(self) -> float:
        return 1 / self.vocab

    def check(self) -> None:
        config_checks.at_least(self, 1, "batch_size", "eval_batches")
        config_checks.at_least(self, 2, "length", "vocab")
        if not self.distances or not all(1 <= d < self.length for d in self.distances):
            raise ValueError(f"{self.distances=} are not all in 1..{self.length - 1}")

    def batch(self, step: int, seed: int = 0) -> task.Batch:
        rng = task.training_generator(seed, step)
        return self._batch(rng, rng.choice(self.distances, self.batch_size))

    def evaluate(self) -> Iterator[task.Batch]:
        for index in range(self.eval_batches):
            distance = self.distances[index % len(self.distances)]
            yield self.at(distance, index)

    def at(self, distance: int, index: int = 0) -> task.Batch:
        """A held-out batch of one distance, for accuracy over distance."""
        rng = task.evaluation_generator(index)
        return self._batch(rng, np.full(self.batch_size, distance))

    def _batch(self, rng: np.random.Generator, distances: np.ndarray) -> task.Batch:
        segments = rng.integers(0, self.vocab, (self.batch_size, self.length), dtype=np.int32)
        source = np.arange(self.length + 1) % distances[:, None]
        rows = np.take_along_axis(segments, source, axis=1)
        # The token at t was seen before, followed by the target, once t is in the second segment.
        weights = (np.arange(self.length) >= distances[:, None]).astype(np.float32)
        return task.Batch(tokens=rows[:, :-1], targets=rows[:, 1:], weights=weights)
