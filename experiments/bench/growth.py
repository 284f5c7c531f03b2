"""Decode cost of one layer kind by context."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

import models
from experiments.bench import arms, side_by_side, timing, weights
from experiments.bench.bench_config import BenchConfig


def cell(config: BenchConfig, kind: str, shown: side_by_side.Shown) -> dict:
    """Measures all contexts in turns; see `runner.FIELDS`.

    The caches hold random rows, since only the time matters.
    """
    growth = config.growth
    model = models.build(growth.of_kind(kind))
    params = model.init(jax.random.key(config.seed))
    places = [(context, context + config.steps) for context in growth.contexts]
    if growth.padded and len(places) > 1:
        places.append((places[0][0], places[-1][1]))
    token = np.zeros(growth.batch, np.int32)
    blocks: dict[str, Callable[[], float]] = {}
    for context, capacity in places:
        arm = arms.Ours(model, params)
        arm.use(weights.filled_cache(model, growth.batch, context, capacity, config.seed))
        arm.save()

        def decode(arm: arms.Ours = arm) -> float:
            arm.restore()
            return side_by_side.step_seconds(arm, token, config.steps)

        def scan(arm: arms.Ours = arm) -> float:
            arm.restore()
            return side_by_side.scan_seconds(arm, token, config.steps)

        name = f"{context}/{capacity}"
        blocks |= {f"{name} decode": decode, f"{name} scanned": scan}

    def on_round(samples: Mapping[str, list[float]]) -> None:
        shown(len(next(iter(samples.values()))), None)

    samples = timing.in_turns(
        blocks,
        repeats=config.repeats,
        least_repeats=config.least_repeats,
        seconds=config.seconds,
        on_round=on_round,
    )
    points = []
    for context, capacity in places:
        times = side_by_side.medians(f"{context}/{capacity}", samples)
        per_layer = {name: ms / growth.layers for name, ms in times.items()}
        points.append({"context": context, "capacity": capacity, **per_layer})
    for point in points:
        point["growth"] = point["scanned_ms"] / points[0]["scanned_ms"]
    return {
        "part": "growth",
        "kind": kind,
        "layers": growth.layers,
        "batch": growth.batch,
        "points": points,
        "samples": samples,
    }
