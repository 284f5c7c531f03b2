"""Trains and measures what hybrids recall: rows B1 to B7.

    python -m experiments.recall [--config.rows=B1,B2] [--config.seeds=1] [--config.jobs=2]

Writes to the work directory: config.json, run.json, `<row>.csv` (a value a line), results.json
(metrics by row, arm and seed), report.md and figures. Trained models stay below `models`, so that a
run that was killed, or one with more rows or seeds, trains only what is missing.
"""

from experiments import (
    cli,
    config_tools,
    recall_arms,
    recall_report,
    run_record,
    train_config,
    trained_rows,
)
from experiments.recall_config import RecallConfig


def run(config: RecallConfig) -> dict:
    """Trains and measures every cell and reports.

    Raises:
        ValueError: The configuration makes no sense.
    """
    config.check()
    asked = recall_arms.rows(config)
    trained_rows.check(asked)
    values = config_tools.to_dict(config)
    values["base"] = train_config.to_dict(config.base)
    run_record.write(config.workdir, values, seed=0, runner="recall")
    rows = trained_rows.run(asked, config.workdir, config.seeds, config.jobs)
    results = {"config": values, "rows": rows}
    run_record.write_results(config.workdir, results)
    recall_report.exhibit(results).write(config.workdir)
    return results


def main(config: RecallConfig) -> None:
    """Runs and shows the tables."""
    cli.show(recall_report.exhibit(run(config)).shown, config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/recall.py")
