"""Needle in text: facts hidden in real source text, asked for at the end of the sequence.

    ...import re\\n\\n# K3141\\n\\nclass Parser:... | # K3141\\n ...

Each needle is one line; each question repeats the line's beginning, and the digits after it are
asked. Because the question is itself the start of the line, copying is all the model needs. The
name stands right before its digits, as a key before its value in `Recall`: with words between the
two, or with several digits, models of a few layers do not begin to copy within hundreds of steps.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments import config_checks
from experiments.tasks import corpus, task

_NAMES = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
_DIGITS = np.frombuffer(b"0123456789", np.uint8)


@dataclasses.dataclass(kw_only=True)
class Needle:
    """Needles in windows of the standard library's sources."""

    batch_size: int = 8
    length: int = 512  # bytes per sequence, questions included
    needles: int = 4
    questions: int = 4  # asked at the end, one after another
    digits: int = 4
    depth: float = -1.0  # place of the needles, 0 = start and 1 = end of the text; -1: random
    text_weight: float = 0.0  # weight of ordinary bytes, so that one model can learn both
    # The first steps of a training see shorter sequences, so that questions are dense, in as many
    # rows as make up for the bytes: copying is learnt there, and carries over.
    short_steps: int = 0
    short_length: int = 96
    eval_batches: int = 8

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def chance(self) -> float:
        return 0.1

    @property
    def line_length(self) -> int:
        """Bytes of a needle and of a question, each with its digits and line break."""
        return len(b"# K\n") + self.digits

    @property
    def text_length(self) -> int:
        """Bytes before the first question."""
        return self.length - self.questions * self.line_length

    def check(self) -> None:
        config_checks.at_least(self, 1, "batch_size", "eval_batches", "questions", "digits")
        config_checks.at_least(self, 0, "text_weight")
        if not 1 <= self.needles <= len(_NAMES):
            raise ValueError(f"{self.needles=} is not in 1..{len(_NAMES)}: names are letters")
        if not (self.depth == -1 or 0 <= self.depth <= 1):
            raise ValueError(f"{self.depth=} is neither -1 nor in 0..1")
        need = (self.needles + self.questions) * self.line_length
        if need > self.length:
            raise ValueError(f"{self.length=} < {need} bytes of needles and questions")
        if self.short_steps and not need <= self.short_length <= self.length:
            raise ValueError(
                f"{self.short_length=} is not in {need}..{self.length}: bytes of needles and "
                "questions, and length"
            )

    def corpus_digest(self) -> str:
        """Identifies the text this interpreter carries."""
        return corpus.stdlib().digest

    def batch(self, step: int, seed: int = 0) -> task.Batch:
        made = self.short() if step < self.short_steps else self
        rng = task.training_generator(seed, step)
        return made._batch(corpus.stdlib().text("train"), rng)

    def short(self) -> "Needle":
        """The task of the first `short_steps` steps."""
        rows = self.batch_size * self.length // self.short_length
        return dataclasses.replace(self, batch_size=rows, length=self.short_length, short_steps=0)

    def evaluate(self) -> Iterator[task.Batch]:
        for index in range(self.eval_batches):
            rng = task.evaluation_generator(index)
            yield self._batch(corpus.stdlib().text("val"), rng)

    def _line(self, name: int, code: np.ndarray) -> np.ndarray:
        return np.frombuffer(b"# %c%s\n" % (name, code.tobytes()), np.uint8)

    def _row(self, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """u8[length + 1]; the byte past the end is only a target."""
        names = rng.choice(_NAMES, self.needles, replace=False)
        codes = rng.choice(_DIGITS, (self.needles, self.digits))
        filler = self.text_length - self.needles * self.line_length
        start = rng.integers(0, len(text) - filler)
        if self.depth < 0:
            places = np.sort(rng.integers(0, filler + 1, self.needles))
        else:
            places = np.full(self.needles, round(self.depth * filler))
        parts = np.split(text[start : start + filler], places)
        pieces = [parts[0]]
        for name, code, rest in zip(names, codes, parts[1:], strict=True):
            pieces += [self._line(name, code), rest]
        for asked in rng.integers(0, self.needles, self.questions):
            pieces.append(self._line(names[asked], codes[asked]))
        return np.concatenate([*pieces, _DIGITS[:1]])

    def _batch(self, text: np.ndarray, rng: np.random.Generator) -> task.Batch:
        rows = np.stack([self._row(text, rng) for _ in range(self.batch_size)]).astype(np.int32)
        weights = np.full((self.batch_size, self.length), self.text_weight, np.float32)
        weights[:, -1] = 0  # its target is the made-up byte
        for question in range(self.questions):
            # The digits end one byte before the line break; targets lie one to the left of them.
            end = self.text_length + (question + 1) * self.line_length - 2
            weights[:, end - self.digits : end] = 1
        return task.Batch(tokens=rows[:, :-1], targets=rows[:, 1:], weights=weights)
