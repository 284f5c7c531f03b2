"""The arms of the language-model rows: `base` with a few fields changed, and what is measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import models
from experiments import attention_probe, counting, lm_probe, tasks, train_config, training
from experiments.lm_config import LmConfig
from experiments.recall_arms import changed
from experiments.tasks import corpus
from experiments.trained_rows import Row, learnt
from models.config import DecoderConfig

GLOBAL, LOCAL = "all global", "all local"
STREAMING = "experiments.mechanisms.streaming_full"


def rows(config: LmConfig) -> list[Row]:
    """The rows that are asked for."""
    made: Mapping[str, Callable[[LmConfig, Asked], Row]] = {
        "C1": _ratios, "C2": _sinks, "C3": _streams, "C4": _sparse, "C5": _compressed,
        "C6": _longer, "C7": _keys, "B6": _windows,
    }  # fmt: skip
    asked = Asked(config)
    return [made[name](config, asked) for name in config.rows]


def arm(config: LmConfig, *pattern: str, **changes: object) -> train_config.TrainConfig:
    """base with its layers repeating a pattern."""
    count = len(config.base.model.layer_types)
    if count % len(pattern):
        raise ValueError(f"{count} layers are no whole number of {pattern}")
    layers = pattern * (count // len(pattern))
    return changed(config.base, model__layer_types=layers, **changes)


class Asked:
    """What is measured of a model, compiled once for each kind of model."""

    def __init__(self, config: LmConfig):
        self.config, self.task = config, config.base.task
        self._probes: dict[tuple[str, int], lm_probe.Probe] = {}

    def probe(self, model: DecoderConfig, length: int = 0) -> lm_probe.Probe:
        """For sequences up to `length`; 0: that of training."""
        length = length or self.task.length
        key = repr(model), length
        if key not in self._probes:
            rows = max(1, self.task.batch_size * self.task.length // length)
            self._probes[key] = lm_probe.Probe(model, rows, length)
        return self._probes[key]

    def bits(self, model: DecoderConfig, params: dict) -> dict[str, float]:
        """Of text as long as training's."""
        text = lm_probe.text_of(self.task, self.config.text_batches)
        return self.probe(model).bits(params, text, self.config.edges)

    def grid(
        self, probe: lm_probe.Probe, params: dict, lengths: Sequence[int], batches: int
    ) -> dict[str, dict[str, float]]:
        """Needles by length and depth."""
        found = {}
        points = lm_probe.grid(self.task, lengths, self.config.depths, batches)
        for length, depth, task in points:
            found.setdefault(length, {})[depth] = probe.needles(params, task)
        return found

    def __call__(self, made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        """Text, needles, and bytes of the cache."""
        spec, config = models.build(made.model).cache_spec, self.config
        probe = self.probe(made.model)
        return {
            **learnt(result),
            "bits": self.bits(made.model, result.params),
            "needle": self.grid(probe, result.params, config.lengths, config.grid_batches),
            "cache_bytes": sum(counting.cache_bytes(spec, self.task.length).values()),
        }

    def check(self) -> None:
        """Raises ValueError where needles of a point of the grid do not fit its sequence."""
        config = self.config
        for _, _, task in lm_probe.grid(self.task, config.lengths, config.depths, 1):
            task.check()

    @property
    def settings(self) -> dict:
        """Fields of the configuration that decide it."""
        names = ("edges", "text_batches", "depths", "lengths", "grid_batches")
        return {name: getattr(self.config, name) for name in names}


def _ratios(config: LmConfig, asked: Asked) -> Row:
    """C1: windows between full layers."""
    count = len(config.base.model.layer_types)
    last = ("local",) * (count - 1) + ("full",)
    arms = {
        GLOBAL: config.base,
        "1:1": arm(config, "local", "full"),
        f"{count - 1}:1": arm(config, *last),
        LOCAL: arm(config, "local"),
    }
    return Row("C1", arms, asked, asked.settings, asked.check)


def _sinks(config: LmConfig, asked: Asked) -> Row:
    """C2: windows of two widths, with a learned sink and without."""
    count = len(config.base.model.layer_types)
    last = ("local",) * (count - 1) + ("full",)
    widths = (config.small_window, config.base.model.window)
    arms = {
        f"W = {width}, {'sink' if sinks else 'no sink'}": arm(
            config, *last, model__window=width, model__sinks=sinks
        )
        for width in widths
        for sinks in (False, True)
    }

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        text = lm_probe.text_of(made.task, 1)
        tokens = np.asarray(next(iter(text.evaluate()))["tokens"])
        found = attention_probe.masses(models.build(made.model), result.params, tokens)
        return {**asked(made, result), "attention": found}

    return Row("C2", arms, measure, asked.settings, asked.check)


def _streams(config: LmConfig, asked: Asked) -> Row:
    """C3: full attention of which only a window is left at evaluation, and the first tokens."""
    width, first = config.base.model.window, config.stream_first

    def streaming(kept: int) -> DecoderConfig:
        own = {"mechanism": STREAMING, "stream_width": width, "stream_first": kept}
        return config.base.model.replace(attention={"full": own})

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        kinds = {"full": made.model, "window": streaming(0), "first": streaming(first)}
        return {**learnt(result), "bits": {
            name: asked.bits(model, result.params) for name, model in kinds.items()}}  # fmt: skip

    def check() -> None:
        for kept in (0, first):
            models.build(streaming(kept))

    settings = {**asked.settings, "width": width, "first": first}
    return Row("C3", {GLOBAL: config.base}, measure, settings, check)


def _nsa(config: LmConfig) -> train_config.TrainConfig:
    names = ("nsa_span", "nsa_stride", "nsa_select", "nsa_top")
    own = dict(zip(names, config.nsa, strict=True))
    return arm(config, "nsa", model__attention={"nsa": own})


def _sparse(config: LmConfig, asked: Asked) -> Row:
    """C4: full attention, NSA, and CSA in every layer."""
    arms = {GLOBAL: config.base, "all NSA": _nsa(config), "all CSA": arm(config, "csa")}
    return Row("C4", arms, asked, asked.settings, asked.check)


def _compressed(config: LmConfig, asked: Asked) -> Row:
    """C5: CSA and HCA alone, and in turns."""
    arms = {
        "all CSA": arm(config, "csa"),
        "CSA, HCA": arm(config, "csa", "hca"),
        "all HCA": arm(config, "hca"),
    }
    return Row("C5", arms, asked, asked.settings, asked.check)


def _longer(config: LmConfig, asked: Asked) -> Row:
    """C6: sequences longer than any that was trained."""
    task, length = config.base.task, config.base.task.length * config.longer
    steps = [task.length << i for i in range(config.longer.bit_length())]
    plain = {"rope": {"dim": 0}}
    arms = {
        GLOBAL: config.base,
        "1:1": arm(config, "local", "full"),
        "1:1, full without positions": arm(
            config, "local", "full", model__attention={"full": plain}
        ),
        "CSA, HCA": arm(config, "csa", "hca"),
    }

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        probe = asked.probe(made.model, length)
        text = lm_probe.text_of(task, config.text_batches, length)
        text.batch_size = probe.shape[0]  # as many bytes as in the other rows
        edges = [x for x in (*config.edges, *steps) if x < length]
        batches = -(-config.grid_batches // config.longer)
        return {
            **learnt(result),
            "bits": probe.bits(result.params, text, edges),
            "needle": asked.grid(probe, result.params, steps, batches),
        }

    def check() -> None:
        held_out = len(corpus.stdlib().text("val"))
        if length >= held_out:
            raise ValueError(f"longer={config.longer}: {length} bytes a sequence, but only "
                             f"{held_out} are held out; lower it")  # fmt: skip

    settings = {**asked.settings, "longer": config.longer}
    return Row("C6", arms, measure, settings, check)


def _keys(config: LmConfig, asked: Asked) -> Row:
    """C7: one needle against several, one of which is asked for."""
    arms = {GLOBAL: config.base, "1:1": arm(config, "local", "full"), LOCAL: arm(config, "local"),
            "CSA, HCA": arm(config, "csa", "hca")}  # fmt: skip
    batches = config.grid_batches * len(config.depths)

    def point(count: int) -> tasks.Needle:
        """So many needles anywhere, one question."""
        task = config.base.task
        ((_, _, made),) = lm_probe.grid(task, (task.length,), (0.0,), batches)
        return dataclasses.replace(made, needles=count, depth=-1.0)

    def check() -> None:
        for count in config.keys:
            point(count).check()

    def measure(made: train_config.TrainConfig, result: training.TrainResult) -> dict:
        probe = asked.probe(made.model)
        found = {str(n): probe.needles(result.params, point(n)) for n in config.keys}
        return {**learnt(result), "needle": found}

    return Row("C7", arms, measure, {"keys": config.keys, "batches": batches}, check)


def _windows(config: LmConfig, asked: Asked) -> Row:
    """B6: CSA with its window branch and without."""
    arms = {f"W = {config.base.model.window}": arm(config, "csa"),
            "W = 0": arm(config, "csa", model__window=0)}  # fmt: skip
    return Row("B6", arms, asked, asked.settings, asked.check)
