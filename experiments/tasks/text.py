"""Byte-level language modelling of the standard library's sources."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments import config_checks
from experiments.tasks import corpus, task


@dataclasses.dataclass(kw_only=True)
class Text:
    """Random windows of the training files; the next byte is asked at every position."""

    batch_size: int = 8
    length: int = 256  # bytes per sequence
    eval_batches: int = 16
    split: str = "val"  # what `evaluate` reads

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def chance(self) -> float:
        return 1 / 256

    def check(self) -> None:
        config_checks.at_least(self, 1, "batch_size", "eval_batches", "length")
        if self.split not in corpus.SPLITS:
            raise ValueError(f"{self.split=} is not one of {corpus.SPLITS}")

    def corpus_digest(self) -> str:
        """Identifies the text this interpreter carries."""
        return corpus.stdlib().digest

    def documents(self, split: str, length: int) -> Iterator[tuple[str, np.ndarray]]:
        """(path, i32[length]) of every file of a split that is long enough, cut to `length`."""
        for path, content in corpus.stdlib().files[split]:
            if len(content) >= length:
                yield path, np.frombuffer(content, np.uint8, length).astype(np.int32)

    def batch(self, step: int, seed: int = 0) -> task.Batch:
        text = corpus.stdlib().text("train")
        rng = task.training_generator(seed, step)
        return self._cut(text, rng.integers(0, len(text) - self.length, self.batch_size))

    def evaluate(self) -> Iterator[task.Batch]:
        text = corpus.stdlib().text(self.split)
        # Evenly spaced, so that every part of the split counts.
        count = self.eval_batches * self.batch_size
        starts = np.linspace(0, len(text) - self.length - 1, count).astype(np.int64)
        for rows in starts.reshape(self.eval_batches, self.batch_size):
            yield self._cut(text, rows)

    def _cut(self, text: np.ndarray, starts: np.ndarray) -> task.Batch:
        rows = text[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)
        weights = np.ones((self.batch_size, self.length), np.float32)
        return task.Batch(tokens=rows[:, :-1], targets=rows[:, 1:], weights=weights)
