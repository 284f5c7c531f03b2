"""The benchmark as a function: measures what `results.json` does not hold yet, then reports."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable

from experiments import config_tools, progress, run_record
from experiments.bench import compile_time, growth, report, side_by_side, timing
from experiments.bench.bench_config import BenchConfig

# The fields of results.json; it says so itself.
FIELDS = {
    "cells": "by name",
    "part": "model (beside HF), growth (by context) or compile",
    "digest": "of everything that the cell depends on but the code: equal, so not measured again",
    "commit": "that was checked out",
    "versions": "that were measured (those at the top: of the last run)",
    "seconds": "wall time of the whole cell",
    "other_cores": "cores that other processes kept busy meanwhile, mean (null: unknown)",
    "samples": "seconds by name, round by round; every time below is a median of these",
    "model.arms": "by layout of ours (stacked: repeating layers are scanned) and hf",
    "model.arms.*.prefill_ms": "the whole context into an empty cache, logits of the last token",
    "model.arms.*.decode_ms": "one step: logits to the host, the likeliest token from there",
    "model.arms.*.scanned_ms": "one step inside decode_many, greedy",
    "model.over_hf": "HF's time over ours, by layout; scanned: HF's decode over our scanned",
    "model.difference": "largest |logit - HF's logit|: after the prefill, over the first steps; "
    "same_tokens: share of those where HF's likeliest token is ours",
    "model.logit_size": "largest |logit| of the compared steps",
    "model.scan_agrees": "whether decode_many chose the tokens of the step loop",
    "model.hf": "how HF ran, the fastest of what was tried once (call_tokens 0: one call); "
    "self_difference: largest |logit difference| between its ways to prefill",
    "growth.points": "ms of a step per layer, by context and capacity of the cache; growth: "
    "scanned_ms over that of the first point",
    "compile": "trace_s, lower_s, compile_s, their sum total_s, and processor_s of all cores, in a "
    "process of its own without a compilation cache",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One cell that is wanted. `rounds` is what its progress counts to."""

    name: str
    rounds: int
    depends_on: dict
    versions: dict[str, str]
    measure: Callable[[side_by_side.Shown], dict]


def run(config: BenchConfig) -> dict:
    """Measures, writes `results.json` and `report.md` after every cell, returns the results.

    Raises:
      ValueError: The configuration is inconsistent.
    """
    config.check()
    config = config.effective()
    threads = _cores() if config.hf and _has_hf() else 0
    versions = _versions(with_hf=bool(threads))
    workdir = pathlib.Path(config.workdir)
    run_record.write(
        workdir, config_tools.to_dict(config), seed=config.seed, hf=bool(threads), threads=_cores()
    )
    results = run_record.read_json(workdir / "results.json") or {}
    results |= {
        "fields": FIELDS,
        "versions": versions,
        "platform": run_record.platform_info(),
        "cells": results.get("cells", {}),
    }
    with contextlib.ExitStack() as stack:
        loaded = _Loaded(config, threads, stack)
        wanted = _plan(config, loaded, versions)
        for number, plan in enumerate(wanted, 1):
            digest = run_record.digest({**plan.depends_on, "versions": plan.versions})
            if results["cells"].get(plan.name, {}).get("digest") == digest:
                continue
            title = f"[{number}/{len(wanted)}] {plan.name}"
            with progress.Progress(plan.rounds, title=title) as bar, timing.usage() as usage:
                cell = plan.measure(bar.update)
                bar.update(plan.rounds)
            results["cells"][plan.name] = {
                **cell,
                "digest": digest,
                "commit": run_record.commit(),
                "versions": plan.versions,
                **usage,
            }
            _write(workdir, results)
    _write(workdir, results)
    return results


class _Loaded:
    """The arms of one size at a time, made when first asked for."""

    def __init__(self, config: BenchConfig, threads: int, stack: contextlib.ExitStack):
        self._config, self._threads = config, threads
        self._directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._size, self._arms = "", {}

    def arms(self, size: str) -> side_by_side.Arms:
        if size != self._size:
            self._arms = {}  # the last size's memory goes first
            self._arms = side_by_side.load(
                self._config, size, self._directory / size, self._threads
            )
            self._size = size
        return self._arms


def _plan(config: BenchConfig, loaded: _Loaded, with_hf: dict[str, str]) -> list[Plan]:
    plans, versions = [], run_record.versions()
    common = {
        name: getattr(config, name)
        for name in ("steps", "repeats", "least_repeats", "seconds", "seed")
    }
    hf = {
        name: getattr(config, name)
        for name in ("check_steps", "hf", "hf_experts", "hf_calls", "hf_gigabytes")
    }
    values = config_tools.to_dict(config)
    if "model" in config.parts:
        for size, context, batch in itertools.product(
            config.sizes, config.contexts, config.batches
        ):
            plans.append(
                Plan(
                    f"model/{size}/batch {batch}/context {context}",
                    2 * config.repeats,
                    {**common, **hf, "size": values[size], "batch": batch, "context": context},
                    with_hf,
                    lambda shown, size=size, batch=batch, context=context: side_by_side.cell(
                        config, loaded.arms(size), size, batch, context, shown
                    ),
                )
            )
    if "growth" in config.parts:
        for kind in config.growth.kinds:
            depends = {k: v for k, v in values["growth"].items() if k != "kinds"}
            plans.append(
                Plan(
                    f"growth/{kind}",
                    config.repeats,
                    {**common, "growth": depends, "kind": kind},
                    versions,
                    lambda shown, kind=kind: growth.cell(config, kind, shown),
                )
            )
    if "compile" in config.parts:
        for program, layout in itertools.product(config.compile.programs, config.compile.layouts):
            depends = {
                k: v for k, v in values["compile"].items() if k not in ("programs", "layouts")
            }
            plans.append(
                Plan(
                    f"compile/{program}/{layout}",
                    config.compile.processes,
                    {"compile": depends, "program": program, "layout": layout},
                    versions,
                    lambda shown, program=program, layout=layout: compile_time.cell(
                        config, program, layout, shown
                    ),
                )
            )
    return plans


def _write(workdir: pathlib.Path, results: dict) -> None:
    run_record.write_results(workdir, results)
    (workdir / "report.md").write_text(report.markdown(results))


def _has_hf() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def _versions(with_hf: bool) -> dict[str, str]:
    names = ("torch", "transformers") if with_hf else ()
    return run_record.versions() | {name: importlib.metadata.version(name) for name in names}


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
