"""Runs one experiment over a grid of its configuration, with seeds, several cells at a time.

    python -m experiments.sweep --runner=experiments.train --config=configs/train_recall.py \\
        --grid 'model.csa_ratio=2,4,8' --seeds 3 --jobs 2 --out runs/ratios

A cell is named by the digest of its whole configuration: it is run once, however often the sweep is
started, stopped or killed, and a sweep with more values or seeds runs only what is new. Failed
cells are tried again at the end. `results.csv` holds one value a line, in the order of the grid;
`sweep.json` what was asked for and what failed.
"""

import sys

from absl import app, flags

from experiments import run_record, sweep_jobs, sweep_plan, sweep_results

_FLAGS = flags.FLAGS


def run(
    runner: str,
    config_file: str,
    grids: list[str],
    *,
    out: str,
    fixed: list[str] = (),
    mode: str = "product",
    seeds: int = 1,
    seed_field: str = "seed",
    jobs: int = 1,
    retries: int = 1,
    drop: str = sweep_results.TIMES,
) -> dict[str, str]:
    """Runs what is missing and writes the tidy file; returns what failed, and why, by digest.

    Raises:
        ValueError: there is no such runner or file, the grid or a field makes no sense, or a cell
            has no results.
    """
    sweep_plan.check_runner(runner)
    sweep_results.unwanted(drop)  # refused before a cell runs, as jobs are
    sweep_jobs.core_sets(jobs)
    if retries < 0:
        raise ValueError(f"retries={retries} must be at least 0")
    cells = sweep_plan.cells(runner, config_file, fixed, grids, mode, seeds, seed_field)
    with sweep_jobs.Place(out) as place:
        failed = sweep_jobs.run_all(place, runner, config_file, cells, jobs, retries)
        sweep_results.write(place, cells, drop)
    record = {
        "runner": runner,
        "config": config_file,
        "grid": list(grids),
        "set": list(fixed),
        "mode": mode,
        "seeds": seeds,
        "seed_field": seed_field,
        "cells": len(cells),
        "failed": failed,
    }
    run_record.write_json(place.path / "sweep.json", record)
    return failed


def main(argv: list[str]) -> None:
    """Runs the sweep; exit code 1 where a cell failed."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        failed = run(
            _FLAGS.runner,
            _FLAGS.config,
            _FLAGS.grid,
            out=_FLAGS.out,
            fixed=_FLAGS.set,
            mode=_FLAGS.mode,
            seeds=_FLAGS.seeds,
            seed_field=_FLAGS.seed_field,
            jobs=_FLAGS.jobs,
            retries=_FLAGS.retries,
            drop=_FLAGS.drop,
        )
    except ValueError as error:
        raise SystemExit(f"sweep: {error}") from error
    print(f"results.csv and sweep.json are in {_FLAGS.out}")
    for digest, why in failed.items():
        print(f"failed: {digest}: {why}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def _define() -> None:
    flags.DEFINE_string("runner", None, "module that is run: experiments.train")
    flags.DEFINE_string("config", None, "its configuration file")
    flags.DEFINE_multi_string("grid", [], "path=value,value; several are combined as --mode says")
    flags.DEFINE_multi_string("set", [], "path=value of every cell")
    flags.DEFINE_enum("mode", "product", sweep_plan.MODES, "how several --grid are combined")
    flags.DEFINE_integer("seeds", 1, "seeds 0, 1, … of every cell")
    flags.DEFINE_string("seed_field", "seed", "the field that takes the seed")
    flags.DEFINE_integer("jobs", 1, "cells at a time, each pinned to cores of its own")
    flags.DEFINE_integer("retries", 1, "how often a failed cell is tried again")
    flags.DEFINE_string("out", "runs/sweep", "directory of the sweep")
    flags.DEFINE_string("drop", sweep_results.TIMES, "results whose names match are left out")


if __name__ == "__main__":
    _define()
    flags.mark_flags_as_required(["runner", "config"])
    app.run(main)
