"""The arms of the recall rows: `base` with a few fields changed, and what is measured of each."""

import copy
from collections.abc import Callable, Mapping

import models
from experiments import (
    config_tools,
    counting,
    recall_metrics,
    selection_probe,
    tasks,
    train_config,
    training,
)
from experiments.recall_config import RecallConfig
from experiments.trained_rows import Row, learnt

Arms = dict[str, train_config.TrainConfig]
BASE = "swa, csa"


def rows(config: RecallConfig) -> list[Row]:
    """The rows that are asked for."""
    made: Mapping[str, Callable[[RecallConfig], Row]] = {
        "B1": _mixers, "B2": _ratios, "B3": _picks, "B4": _warm_up, "B5": _borders,
        "B6": _windows, "B7": _distances,
    }  # fmt: skip
    return [made[name](config) for name in config.rows]


def changed(base: train_config.TrainConfig, **changes: object) -> train_config.TrainConfig:
    """A copy with fields set by path, dots written as two underscores."""
    paths = {name.replace("__", "."): value for name, value in changes.items()}
    return config_tools.override(copy.deepcopy(base), paths)


def cache_bytes(config: train_config.TrainConfig) -> int:
    """Of the cache pytree of one sequence of the task's length."""
    spec = models.build(config.model).cache_spec
    return sum(counting.cache_bytes(spec, config.task.length).values())


def _of(base: train_config.TrainConfig, *layers: str, **changes: object):
    return changed(base, model__layer_types=layers, **changes)


def _measure(config: train_config.TrainConfig, result: training.TrainResult) -> dict:
    return {**learnt(result), "cache_bytes": cache_bytes(config)}


def _mixers(config: RecallConfig) -> Row:
    """B1: what each kind of layer recalls, and what its cache takes."""
    base, (keys, values) = config.base, config.state
    heads = {"key_heads": 2, "value_heads": 2, "key_dim": keys, "value_dim": values}
    arms = {
        "full, full": _of(base, "full", "full"),
        "swa, full": _of(base, "swa", "full"),
        BASE: base,
        "swa, hca": _of(base, "swa", "hca", model__hca_ratio=config.hca_ratio),
        "linear, linear": _of(base, "linear", "linear", model__attention={
            "linear": {"mechanism": "gated_delta", **heads}}),
        "swa, swa": _of(base, "swa", "swa"),
    }  # fmt: skip
    return Row("B1", arms, _measure)


def ratio_arm(ratio: int, overlap: bool) -> str:
    """Its name."""
    return f"m = {ratio}, overlap" if overlap else f"m = {ratio}"


def _ratios(config: RecallConfig) -> Row:
    """B2: several facts in an entry. All entries that hold facts can be picked."""
    cells = [(m, False) for m in config.ratios] + [(m, True) for m in config.overlap_ratios]
    arms = {
        ratio_arm(m, overlap): changed(config.base, model__csa_ratio=m, model__csa_overlap=overlap)
        for m, overlap in cells
    }

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        model = made.model
        crowd = recall_metrics.facts_per_entry(made.task, model.csa_ratio, model.csa_overlap)
        return {**_measure(made, result), "facts_per_entry": crowd}

    return Row("B2", arms, measure)


def _picks(config: RecallConfig) -> Row:
    """B3: k at evaluation, of the hybrid as it was trained."""
    probe = selection_probe.Probe(config.base, config.pick_batches)

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        accuracy = {
            way: {str(k): probe.accuracy(result.params, way, k) for k in config.picks}
            for way in selection_probe.WAYS
        }
        accuracy["all"] = probe.accuracy(result.params)
        return {"trained_with": made.model.index_topk, "accuracy": accuracy,
                "picks": probe.picks(result.params, config.picks)}  # fmt: skip

    settings = {"picks": config.picks, "batches": config.pick_batches}
    return Row("B3", {BASE: config.base}, measure, settings, probe.check)


def _warm_up(config: RecallConfig) -> Row:
    """B4: dense, indexer alone, sparse; against sparse from the start, and no divergence at all."""
    steps = config.warm_dense + config.warm_frozen + config.warm_sparse
    base = changed(config.base, steps=steps, target_accuracy=0.0)
    dense, frozen = config.warm_dense, config.warm_frozen

    def arm(dense_steps: int, frozen_steps: int, weight: float) -> train_config.TrainConfig:
        return changed(base, indexer__dense_steps=dense_steps, indexer__frozen_steps=frozen_steps,
                       indexer__kl_weight=weight)  # fmt: skip

    arms = {
        "warm-up": arm(dense, frozen, 1.0),
        "sparse from the start": arm(0, 0, 1.0),
        "no divergence": arm(dense, frozen, 0.0),
    }
    probe = selection_probe.Probe(base, config.pick_batches)
    k = base.model.index_topk

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        before = [row for row in result.rows if row["step"] <= dense and "accuracy" in row]
        return {
            **learnt(result),
            # Of one training batch, since evaluations pick from the first step on.
            "dense_accuracy": before[-1]["accuracy"] if made.indexer.dense_steps else None,
            "kl": result.rows[-1]["eval_indexer_kl"],
            "accuracy": probe.accuracy(result.params, k=k),
            "accuracy_all": probe.accuracy(result.params),
            "accuracy_random": probe.accuracy(result.params, "random", k),
        }

    settings = {"batches": config.pick_batches, "dense": dense}
    return Row("B4", arms, measure, settings, probe.check)


def _borders(config: RecallConfig) -> Row:
    """B5: the offset puts key and value of every fact into different groups."""
    base = config.base
    arms = {
        f"{where}, {kind}": changed(
            base, task__offset=offset, model__csa_overlap=overlap, steps=steps
        )
        for where, offset, steps in (
            ("aligned", 0, base.steps),
            ("misaligned", 1, config.border_steps),
        )
        for kind, overlap in (("overlap", True), ("no overlap", False))
    }
    return Row("B5", arms, _measure)


def _windows(config: RecallConfig) -> Row:
    """B6: the window branch of the CSA layer."""
    own = config.base.model.attention.get("csa", {})
    arms = {
        f"W = {width}": changed(config.base, model__attention={"csa": {**own, "window": width}})
        for width in config.windows
    }
    arms[f"W = {config.base.model.window}"] = config.base
    return Row("B6", arms, _measure)


def _distances(config: RecallConfig) -> Row:
    """B7: copying over a distance, with one layer and with two."""
    task = tasks.Induction(
        batch_size=config.base.task.batch_size,
        length=config.base.task.length,
        distances=config.distances,
        vocab=config.base.task.vocab,
        eval_batches=len(config.distances),
    )
    base = changed(config.base, task=task, steps=config.induction_steps)
    arms = {
        "full, full": _of(base, "full", "full"),
        "swa, swa": _of(base, "swa", "swa"),
        "full": _of(base, "full", model__mlp_types=("dense",)),
    }

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        evaluate = training.make_evaluate(models.build(made.model))
        by_distance = {
            str(d): evaluate(result.params, [made.task.at(d)])["accuracy"] for d in config.distances
        }
        reach = len(made.model.layer_types) * (made.model.window - 1)
        return {**learnt(result), "reach": reach, "accuracy": by_distance}

    return Row("B7", arms, measure)
