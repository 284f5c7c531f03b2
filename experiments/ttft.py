"""Time to the first token by hit: what resuming a prefix saves, and from where on it pays.

    python -m experiments.ttft [--config=configs/ttft.py:long] [--config.prompts=512,2048]

Every request is served by the engine: lookup, restore, replay, prefill, and publishing on the way.
Writes to the work directory: config.json, run.json, results.json (`cells` by name, see `run_cell`;
`timelines`, see `timeline.record`), report.md, figures. Finished cells are kept and skipped when
they would be the same.
"""

import contextlib
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable

from experiments import (
    cli,
    config_tools,
    counting,
    progress,
    run_record,
    timeline,
    ttft_report,
)
from experiments.bench import timing
from experiments.shared_prefix import OFF, Arm, Bench, Served, fill_cells
from experiments.ttft_config import TtftConfig
from hetero_kv.requests import Result

CELL_FIELDS = ("hits", "arms", "repeats", "seconds", "seed")  # and the model


def run_cell(
    config: TtftConfig, bench: Bench, prompt: int, on_round: Callable[..., None]
) -> dict[str, object]:
    """One model and prompt length: every arm and hit in turns.

    Fields: off_seconds: to the first token, a sample a turn, without a store. arms: by arm a list
    over hits of {hit: as asked, shared: tokens, resumed, replayed, computed: tokens, bytes: read
    from the tier, routes, seconds: a sample a turn}. operations: by hit, counted, of what is
    computed. usage: wall seconds, cores that others used.
    """
    lengths = bench.shared_lengths(prompt, config.hits)
    distinct = sorted(set(lengths.values()))
    last: dict[tuple[str, int], Result] = {}

    def ask(served: Served, shared: int) -> float:
        result = last[served.arm, shared] = served.ask(prompt, shared)
        return result.first_token_s

    with contextlib.ExitStack() as stack, timing.usage() as usage:
        blocks: dict[tuple[str, int], Callable[[], float]] = {}
        for arm in (OFF, *bench.arms(config.arms)):
            room = sum(1 - hit for hit in config.hits)
            served = stack.enter_context(bench.served(arm, directory=config.directory, room=room))
            for shared in distinct if arm != OFF else ():
                if shared:
                    served.publish(shared)
            for shared in distinct if arm != OFF else (0,):
                blocks[arm, shared] = functools.partial(ask, served, shared)
        samples = timing.in_turns(
            blocks,
            repeats=config.repeats,
            least_repeats=min(3, config.repeats),
            seconds=config.seconds,
            on_round=on_round,
        )
    arms: dict[str, list[dict]] = {}
    for arm in bench.arms(config.arms):
        for hit, shared in lengths.items():
            result = last[arm, shared]
            resumed = result.resumable_length
            arms.setdefault(arm, []).append(
                {
                    "hit": hit,
                    "shared": shared,
                    "resumed": resumed,
                    "replayed": result.replayed_length,
                    "computed": result.computed_length,
                    "bytes": bench.bytes_of(resumed, Arm.of(arm).policy),
                    "routes": dict(result.routes),
                    "seconds": samples[arm, shared],
                }
            )
    operations = {
        str(hit): sum(counting.prefill_flops(bench.model, shared, prompt).values())
        for hit, shared in lengths.items()
    }
    return {
        "prompt": prompt,
        "off_seconds": samples[OFF, 0],
        "arms": arms,
        "operations": operations,
        "usage": usage,
    }


def run(config: TtftConfig) -> dict:
    """Runs the cells that `results.json` does not hold yet, and reports.

    Raises:
        ValueError: the configuration makes no sense.
    """
    config.check()
    values = config_tools.to_dict(config)
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, values, seed=config.seed, runner="ttft")
    longest = max(config.prompts)
    old = (run_record.read_json(workdir / "results.json") or {}).get("timelines", {})
    timelines = {kind: old[kind] for kind in config.kinds if kind in old}
    results: dict = {
        "config": values,
        "platform": run_record.platform_info(),
        "cells": {},
        "timelines": timelines,
    }

    def measure(bench: Bench, kind: str, prompt: int, bar: progress.Progress) -> dict:
        cell = run_cell(config, bench, prompt, _shown(bar))
        if prompt == longest:
            timelines[kind] = _timelines(config, bench, prompt)
        return cell

    def whole(kind: str, prompt: int) -> bool:
        return prompt != longest or kind in timelines

    fill_cells(config, results, CELL_FIELDS, longest + 1, measure, whole)
    ttft_report.exhibit(results).write(workdir)
    return results


def _shown(bar: progress.Progress) -> Callable[..., None]:
    def on_round(samples: dict) -> None:
        first = samples[OFF, 0]
        bar.update(len(first), {"cold_ms": 1e3 * statistics.median(first)})

    return on_round


def _timelines(config: TtftConfig, bench: Bench, prompt: int) -> dict[str, dict]:
    """By arm: one cold request and one that shares about half of its prompt."""
    shared = bench.shared_lengths(prompt, (0.5,))[0.5]
    found = {}
    for arm in bench.arms(config.arms):
        with bench.served(arm, directory=config.directory) as served:
            served.publish(shared)
            found[arm] = {
                "cold": dataclasses.asdict(timeline.record(served, prompt, 0)),
                "warm": dataclasses.asdict(timeline.record(served, prompt, shared)),
            }
    return found


def main(config: TtftConfig) -> None:
    """Runs and shows the tables."""
    results = run(config)
    cli.show(ttft_report.exhibit(results).shown, config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/ttft.py")
