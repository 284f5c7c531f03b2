"""What a trained indexer picks, beside random picks and those the attention would make."""

import copy
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np

import models
from experiments import recall_metrics, train_config, training
from models.config import DecoderConfig

WAYS = {
    "indexer": "csa",
    "random": "experiments.mechanisms.random_csa",
    "oracle": "experiments.mechanisms.oracle_csa",
}
ALL = 1 << 20  # more entries than there are


def picking(config: DecoderConfig, way: str, k: int) -> DecoderConfig:
    """The same model with its CSA layers picking k entries in one of WAYS; weights fit both."""
    changed = copy.deepcopy(config)
    own = {**changed.attention.get("csa", {}), "mechanism": WAYS[way]}
    return changed.replace(index_topk=k, attention={**changed.attention, "csa": own})


class Probe:
    """Evaluation of models that differ in weights alone; compiled once for each way and k."""

    def __init__(self, config: train_config.TrainConfig, batches: int):
        self.config = copy.deepcopy(config)
        self.batches = list(itertools.islice(self.config.task.evaluate(), batches))
        self._evaluate = functools.cache(self._make)

    def check(self) -> None:
        """Raises ValueError where there is no indexer to look at, or a model cannot be built."""
        model = models.build(self.config.model)
        layers = [layer.attention for group in model.stack.groups for layer in group.layers]
        if not any(getattr(layer, "indexer", None) for layer in layers):
            raise ValueError(
                "what an indexer picks is measured, and the model has none: set base.model.indexer="
                "True and base.model.index_topk >= 1"
            )
        for way in WAYS:
            models.build(picking(self.config.model, way, 1))

    def _make(self, way: str, k: int):
        return training.make_evaluate(models.build(picking(self.config.model, way, k)))

    def accuracy(self, params: dict, way: str = "indexer", k: int = ALL) -> float:
        """Of the held-out batches. k: not beyond the entries of a sequence."""
        entries = self.config.task.length // self.config.model.csa_ratio
        return self._evaluate(way, min(k, entries))(params, self.batches)["accuracy"]

    @functools.cached_property
    def _dense(self):
        model = models.build(self.config.model)

        @jax.jit
        def dense(params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            _, aux = model.forward(params, tokens, aux=True, select="all")
            return aux["targets"][-1][0], aux["index_scores"][-1][0]

        return dense

    def picks(self, params: dict, counts: Sequence[int]) -> dict[str, dict[str, float]]:
        """By k: the indexer's recall of the oracle set, attention it covers, facts it finds.

        Of the last CSA layer, at the positions that ask.
        """
        task, model = self.config.task, self.config.model
        parts = []
        for batch in self.batches:
            tokens = np.asarray(batch["tokens"])
            shares, scores = (np.asarray(x) for x in self._dense(params, tokens))
            places = recall_metrics.fact_places(tokens, task.document_length)
            asked = np.asarray(batch["weights"]) > 0
            position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)[asked]
            parts.append((shares[asked], scores[asked], places[asked], position))
        shares, scores, places, position = (np.concatenate(x) for x in zip(*parts, strict=True))
        visible = np.arange(scores.shape[1]) < ((position + 1) // model.csa_ratio)[:, None]
        results = {}
        for k in counts:
            picked = recall_metrics.top(scores, visible, k)
            wanted = recall_metrics.top(shares, visible, k)
            in_reach = model.csa_ratio, model.csa_overlap
            results[str(k)] = {
                "recall": recall_metrics.recall_at(picked, wanted),
                "mass": recall_metrics.mass(picked, shares),
                "oracle_mass": recall_metrics.mass(wanted, shares),
                "found": recall_metrics.found(picked, places, *in_reach),
                "oracle_found": recall_metrics.found(wanted, places, *in_reach),
            }
        return results
