"""The fault matrix: which check finds which fault, and what happens without it.

    python -m experiments.faults [--config.sample=all] [--config.model=random]

Writes to the work directory: config.json, run.json, results.json (a row per trial, and the summary
of `faults_report.summarise`), report.md, faults.png.
"""

import dataclasses
import pathlib
import sys
import tempfile

import rich.console

from experiments import cli, config_tools, faults_report, progress, run_record
from experiments.faults_benches import benches
from experiments.faults_config import ALL_OFF, ALL_ON, AND, COVERING, GUARD, FaultsConfig
from hetero_kv.faults import kinds
from hetero_kv.faults.trial import Outcome


def columns_of(config: FaultsConfig) -> list[str]:
    """Columns of the matrix."""
    if config.paged:
        return [ALL_ON, ALL_OFF]
    return [ALL_ON, *(f"no {x}" for x in config.checks), GUARD, ALL_OFF]


def switched_off(column: str, case: kinds.Case) -> tuple[str, ...]:
    """The checks that are off in a column."""
    if column == GUARD:
        return kinds.all_but(case.guard)
    if column in (ALL_ON, ALL_OFF):
        return () if column == ALL_ON else kinds.CHECKS
    return tuple(column.removeprefix("no ").split(AND))


def concerns(column: str, case: kinds.Case) -> bool:
    """Whether all checks that a column is about can find anything at the case's moment."""
    if column in (ALL_ON, GUARD, ALL_OFF):
        return True
    return set(switched_off(column, case)) <= set(kinds.at(case.moment))


def row_of(outcome: Outcome, column: str, request: int) -> dict:
    """One trial as plain values."""
    case = dataclasses.asdict(outcome.case)
    about = dataclasses.asdict(outcome)
    del about["case"], about["off"]
    told = {"bites": outcome.bites, "right_reason": outcome.right_reason}
    return {"column": column, "request": request, **case, **about, **told}


def run(config: FaultsConfig) -> dict:
    """All trials; writes results, report and figure."""
    config.check()
    made = benches(config)  # first: what it refuses leaves nothing behind
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, config_tools.to_dict(config), seed=config.seed, runner="faults")
    todo = [x for x in made[0].cases(config.extents) if x.kind in config.kinds]
    if config.sample == COVERING:
        todo = kinds.covering(todo)
    columns, rows, some = columns_of(config), [], range(len(made))
    trials = [
        (column, case, request)
        for column in columns
        for i, case in enumerate(todo)
        if concerns(column, case)
        for request in (some if column == ALL_OFF else (i % len(made),))
    ]
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress.Progress(len(trials), title=f"{len(todo)} faults") as bar,
    ):
        for i, (column, case, request) in enumerate(trials):
            place = pathlib.Path(scratch) / str(i)
            outcome = made[request].run(case, switched_off(column, case), place)
            rows.append(row_of(outcome, column, request))
            bar.update(i + 1)
    results = {
        "model": config.model,
        "granularity": made[0].spec.granularity,
        "outputs": made[0].outputs,
        "columns": columns,
        "summary": faults_report.summarise(rows),
        "trials": rows,
    }
    run_record.write_results(workdir, results)
    faults_report.exhibit(results).write(workdir)
    return results


def main(config: FaultsConfig) -> None:
    """Runs and shows the tables."""
    results = run(config)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 180)
    faults_report.show(results, console)
    console.print(f"\nreport: {pathlib.Path(config.workdir) / 'report.md'}")


if __name__ == "__main__":
    cli.run(main, default="configs/faults.py")
