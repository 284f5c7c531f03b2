"""Dense associative recall: read key-value pairs, then answer queries until the end.

    [offset noise] k v (noise) k v (noise) ... | noise gap | k k k k k ...

Every query is one of the keys and its target is that key's value; answers are never shown. It is
MQAR (arXiv 2312.04927) with a query at every remaining position: the same skill, learnt in minutes
on one core where the sparse layout needs hours.

With a gap longer than the reach of the windows, `layers * (window - 1)`, a window-only model sees
no value at all and stays at `chance`.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments import config_checks
from experiments.tasks import task


class Document(NamedTuple):
    """A prefix that many requests can share."""

    tokens: np.ndarray  # i32[length]
    facts: dict[int, int]  # key token -> value token


@dataclasses.dataclass(kw_only=True)
class Recall:
    """Dense associative recall; token ids are keys, then values, then noise symbols."""

    batch_size: int = 16
    length: int = 128  # tokens per sequence
    pairs: int = 8
    stride: int = 2  # tokens per slot; a slot holds key and value, then noise
    slots: int = 0  # slots the pairs are scattered over; 0: as many as pairs, so they are adjacent
    offset: int = 0  # noise tokens before the first slot; moves pairs against the entry borders
    gap: int = 32  # noise tokens between the last slot and the first query
    vocab: int = 64  # half keys, half values
    noise_symbols: int = 0  # 0: noise is drawn from the values; n: from n symbols of its own
    eval_batches: int = 16

    @property
    def vocab_size(self) -> int:
        return self.vocab + self.noise_symbols

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - self.vocab // 2)

    @property
    def document_length(self) -> int:
        """Tokens before the first query."""
        return self.offset + (self.slots or self.pairs) * self.stride + self.gap

    def check(self) -> None:
        config_checks.at_least(self, 1, "batch_size", "eval_batches", "pairs")
        config_checks.at_least(self, 0, "slots", "offset", "gap", "noise_symbols")
        slots = self.slots or self.pairs
        if self.stride < 2:
            raise ValueError(f"{self.stride=}: a slot holds a key and a value, so at least 2")
        if slots < self.pairs:
            raise ValueError(f"{self.slots=} < {self.pairs=}: every pair needs a slot")
        if self.pairs > self.vocab // 2:
            raise ValueError(f"{self.pairs=} > {self.vocab // 2=}: keys are distinct")
        if self.document_length >= self.length:
            raise ValueError(
                f"{self.document_length=} >= {self.length=}: no room is left for a query"
            )

    def document(self, rng: np.random.Generator, length: int = 0) -> Document:
        """Draws pairs and noise.

        Args:
          length: Tokens of the document; 0 is `document_length`, more makes the gap longer. Reuse
            happens in whole blocks, so a demo asks for a multiple of its block here.
        """
        length = length or self.document_length
        if length < self.document_length - self.gap:
            raise ValueError(f"{length=} < {self.document_length - self.gap=}: pairs do not fit")
        tokens = self._noise(rng, length)
        slots = self.slots or self.pairs
        chosen = np.sort(rng.choice(slots, self.pairs, replace=False))
        at = self.offset + chosen * self.stride
        keys, values = self._pairs(rng)
        tokens[at], tokens[at + 1] = keys, values
        return Document(tokens, dict(zip(keys.tolist(), values.tolist(), strict=True)))

    def questions(
        self, rng: np.random.Generator, document: Document, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`count` queries about a document and their answers, each i32[count]."""
        keys = np.fromiter(document.facts, np.int32)
        queries = rng.choice(keys, count)
        answers = np.array([document.facts[key] for key in queries.tolist()], np.int32)
        return queries, answers

    def batch(self, step: int, seed: int = 0) -> task.Batch:
        return self._batch(task.training_generator(seed, step))

    def evaluate(self) -> Iterator[task.Batch]:
        for index in range(self.eval_batches):
            yield self._batch(task.evaluation_generator(index))

    def _noise(self, rng: np.random.Generator, length: int) -> np.ndarray:
        keys = self.vocab // 2
        low, high = (self.vocab, self.vocab_size) if self.noise_symbols else (keys, self.vocab)
        return rng.integers(low, high, length, dtype=np.int32)

    def _pairs(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys = self.vocab // 2
        return (
            rng.choice(keys, self.pairs, replace=False).astype(np.int32),
            rng.integers(keys, self.vocab, self.pairs, dtype=np.int32),
        )

    def _batch(self, rng: np.random.Generator) -> task.Batch:
        start = self.document_length
        tokens = np.empty((self.batch_size, self.length), np.int32)
        targets = np.zeros_like(tokens)
        for row in range(self.batch_size):
            document = self.document(rng)
            queries, answers = self.questions(rng, document, self.length - start)
            tokens[row] = np.concatenate([document.tokens, queries])
            targets[row, start:] = answers
        weights = np.zeros(tokens.shape, np.float32)
        weights[:, start:] = 1
        return task.Batch(tokens=tokens, targets=targets, weights=weights)
