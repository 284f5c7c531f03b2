"""What a trained byte model is asked: text by position, needles by depth and length."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import models
from experiments import lm_metrics, tasks
from models.config import DecoderConfig


class Probe:
    """Losses of a model at every position, for sequences up to `length`; compiled once.

    Shorter sequences are padded on the right, which no earlier position sees; larger batches are
    taken `rows` at a time.
    """

    def __init__(self, config: DecoderConfig, rows: int, length: int):
        model, self.shape = models.build(config), (rows, length)

        @jax.jit
        def one(params: dict, tokens: jax.Array, targets: jax.Array):
            logits = model.forward(params, tokens).astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return loss, jnp.argmax(logits, axis=-1) == targets

        self._one = one

    def __call__(self, params: dict, batch: tasks.Batch) -> tuple[np.ndarray, np.ndarray]:
        """f32[B, T] losses in nats and bool[B, T] whether the target was the likeliest byte."""
        rows, length = batch["tokens"].shape
        pad = [(0, -rows % self.shape[0]), (0, self.shape[1] - length)]
        tokens, targets = (np.pad(batch[name], pad) for name in ("tokens", "targets"))
        parts = [
            self._one(params, tokens[at : at + self.shape[0]], targets[at : at + self.shape[0]])
            for at in range(0, len(tokens), self.shape[0])
        ]
        return tuple(np.concatenate(x)[:rows, :length] for x in zip(*parts, strict=True))

    def bits(self, params: dict, text: tasks.Text, edges: Sequence[int]) -> dict[str, float]:
        """Bits a byte of held-out text, in all and by stretch of positions."""
        nats = np.concatenate([self(params, batch)[0] for batch in text.evaluate()])
        return lm_metrics.bits_by_bucket(nats, edges)

    def needles(self, params: dict, task: tasks.Needle) -> float:
        """Share of asked digits that are right."""
        right, asked = 0.0, 0.0
        for batch in task.evaluate():
            _, hit = self(params, batch)
            weights = batch["weights"] == 1
            right, asked = right + (hit & weights).sum(), asked + weights.sum()
        return float(right / asked)


def text_of(task: tasks.Needle, batches: int, length: int = 0) -> tasks.Text:
    """Plain held-out text in batches like the task's."""
    return tasks.Text(batch_size=task.batch_size, length=length or task.length,
                      eval_batches=batches)  # fmt: skip


def grid(
    task: tasks.Needle, lengths: Sequence[int], depths: Sequence[float], batches: int
) -> Iterator[tuple[str, str, tasks.Needle]]:
    """(length, depth, task) of every point: one needle, one question."""
    for length in lengths:
        for depth in depths:
            point = dataclasses.replace(
                task,
                length=length,
                depth=depth,
                needles=1,
                questions=1,
                text_weight=0.0,
                short_steps=0,
                eval_batches=batches,
            )
            yield str(length), f"{depth:g}", point


def windows_of(text: tasks.Text) -> list[bytes]:
    """The bytes that `bits` scores, a window each."""
    return [bytes(row.astype(np.uint8)) for batch in text.evaluate() for row in batch["targets"]]
