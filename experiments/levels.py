"""Three levels of caching: none, within a request, across requests; cost a token and a request.

    python -m experiments.levels [--config.prompts=256,1024] [--config.answer=8]

none: for every token of the answer the whole sequence runs through the model, and what that leaves
is thrown away. request: the prompt runs once, each token of the answer is a decode step. across:
the same, but what an earlier request shares is resumed. The last two go through the engine.
Writes to the work directory: config.json, run.json, results.json (`cells` by name, see `run_cell`),
report.md and figures. Finished cells are kept and skipped when they would be the same.
"""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from experiments import cli, config_tools, counting, levels_report, progress, run_record
from experiments.bench import timing
from experiments.levels_config import LevelsConfig
from experiments.shared_prefix import OFF, Bench, Served, fill_cells

NONE, REQUEST = "none", "request"
CELL_FIELDS = ("overlaps", "answer", "recomputed", "arm", "repeats", "seconds", "seed")


def level(overlap: float) -> str:
    """Name of cross-request reuse at an overlap."""
    return f"across {overlap:g}"


def run_cell(
    config: LevelsConfig, bench: Bench, prompt: int, on_round: Callable[..., None]
) -> dict[str, object]:
    """One model and prompt length: every level in turns.

    Fields, by level a sample a turn: request_seconds, from arrival to the last token;
    token_seconds, of one token more after the prompt; first_token_seconds.
    operations: counted, by level: {request, token}. shared: tokens by level. usage.
    """
    overlaps = bench.shared_lengths(prompt, config.overlaps)
    shared = {level(x): n for x, n in overlaps.items() if n}
    first: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack, timing.usage() as usage:
        alone = stack.enter_context(bench.served(OFF))
        across = stack.enter_context(bench.served(config.arm, room=len(shared)))
        for length in sorted(set(shared.values())):
            across.publish(length)

        def ask(served: Served, name: str, length: int) -> float:
            result = served.ask(prompt, length, config.answer)
            first.setdefault(name, []).append(result.first_token_s)
            return result.total_s

        blocks = {
            NONE: functools.partial(_recompute, config, bench, alone, prompt),
            REQUEST: functools.partial(ask, alone, REQUEST, 0),
            f"{NONE} token": functools.partial(_prefill, bench, alone, prompt),
            f"{REQUEST} token": _Steps(bench, alone, prompt, config.answer),
        }
        blocks |= {
            name: functools.partial(ask, across, name, length) for name, length in shared.items()
        }
        found = timing.in_turns(
            blocks,
            repeats=config.repeats,
            least_repeats=min(3, config.repeats),
            seconds=config.seconds,
            on_round=on_round,
        )
    return {
        "prompt": prompt,
        "request_seconds": {x: found[x] for x in (NONE, REQUEST, *shared)},
        "token_seconds": {x: found[f"{x} token"] for x in (NONE, REQUEST)},
        "first_token_seconds": {name: x[1:] for name, x in first.items()},  # the first one compiles
        "shared": shared,
        "operations": operations(config, bench, prompt, shared),
        "usage": usage,
    }


def operations(
    config: LevelsConfig, bench: Bench, prompt: int, shared: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Counted by level: of a request, and of one token more after the prompt."""
    model = bench.model

    def prefill(start: int, stop: int) -> float:
        return sum(counting.prefill_flops(model, start, stop).values())

    ends = range(prompt, prompt + config.answer)
    steps = [sum(counting.decode_flops(model, n + 1).values()) for n in ends]
    decode = sum(steps[:-1])  # the last token of an answer is not fed again
    found = {
        NONE: {"request": sum(prefill(0, n) for n in ends), "token": prefill(0, prompt + 1)},
        REQUEST: {"request": prefill(0, prompt) + decode, "token": steps[0]},
    }
    for name, length in shared.items():
        found[name] = {"request": prefill(length, prompt) + decode, "token": steps[0]}
    return found


def _recompute(config: LevelsConfig, bench: Bench, served: Served, prompt: int) -> float:
    """Seconds of a request without any cache, from the first few tokens of its answer."""
    tokens = served.prompt(prompt + config.recomputed, 0)[None]
    spent = sum(_run(bench, tokens[:, : prompt + i]) for i in range(config.recomputed))
    return spent / config.recomputed * config.answer


def _prefill(bench: Bench, served: Served, prompt: int) -> float:
    """Seconds of one token more where nothing is kept: the whole sequence."""
    return _run(bench, served.prompt(prompt + 1, 0)[None])


def _run(bench: Bench, tokens: np.ndarray) -> float:
    """Seconds of running a sequence from an empty cache to its next token."""
    cache = jax.block_until_ready(bench.model.init_cache(1, bench.capacity))
    began = time.perf_counter()
    logits, _ = bench.model.prefill(bench.params, tokens, cache, logits="last")
    int(np.argmax(logits))
    return time.perf_counter() - began


class _Steps:
    """Seconds of one decode step after a prompt, the mean over an answer."""

    def __init__(self, bench: Bench, served: Served, prompt: int, answer: int):
        self._bench, self._answer = bench, answer
        tokens = served.prompt(prompt, 0)[None]
        cache = bench.model.init_cache(1, bench.capacity)
        _, self._cache = bench.model.prefill(bench.params, tokens, cache, logits="none")

    def __call__(self) -> float:
        model, params = self._bench.model, self._bench.params
        cache = jax.block_until_ready(jax.tree.map(lambda x: x.copy(), self._cache))
        token = np.zeros(1, np.int32)
        began = time.perf_counter()
        for _ in range(self._answer):
            logits, cache = model.decode_step(params, token, cache)
            token = np.argmax(logits, axis=-1).astype(np.int32)
        return (time.perf_counter() - began) / self._answer


def run(config: LevelsConfig) -> dict:
    """Runs the cells that `results.json` does not hold yet, and reports.

    Raises:
        ValueError: the configuration makes no sense.
    """
    config.check()
    values = config_tools.to_dict(config)
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, values, seed=config.seed, runner="levels")
    results: dict = {"config": values, "platform": run_record.platform_info(), "cells": {}}

    def measure(bench: Bench, kind: str, prompt: int, bar: progress.Progress) -> dict:
        return run_cell(config, bench, prompt, lambda found: bar.update(len(found[REQUEST])))

    capacity = max(config.prompts) + config.answer + 1
    fill_cells(config, results, CELL_FIELDS, capacity, measure)
    levels_report.exhibit(results).write(workdir)
    return results


def main(config: LevelsConfig) -> None:
    """Runs and shows the tables."""
    cli.show(levels_report.exhibit(run(config)).shown, config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/levels.py")
