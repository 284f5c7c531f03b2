"""Trains and measures byte models on the standard library's sources: rows C1 to C7, and B6.

    python -m experiments.lm [--config.rows=C1,C4] [--config.seeds=1] [--config.jobs=2]

Writes to the work directory: config.json, run.json, `<row>.csv` (a value a line), results.json
(metrics by row, arm and seed; what xz needs), report.md and figures. Trained models stay below
`models`: a run that was killed, or one with more rows or seeds, trains only what is missing.
"""

from experiments import (
    cli,
    config_tools,
    lm_arms,
    lm_metrics,
    lm_probe,
    lm_report,
    run_record,
    train_config,
    trained_rows,
)
from experiments.lm_config import LmConfig
from experiments.tasks import corpus


def baselines(config: LmConfig) -> dict[str, float]:
    """Bits a byte of `xz -6`: held-out text as one stream, and the scored windows one by one."""
    text = lm_probe.text_of(config.base.task, config.text_batches)
    return {
        "stream": lm_metrics.xz_stream(corpus.stdlib().text("val").tobytes()),
        "windows": lm_metrics.xz_windows(lm_probe.windows_of(text)),
    }


def run(config: LmConfig) -> dict:
    """Trains and measures every cell and reports.

    Raises:
        ValueError: The configuration makes no sense.
    """
    config.check()
    asked = lm_arms.rows(config)
    trained_rows.check(asked)
    values = config_tools.to_dict(config)
    values["base"] = train_config.to_dict(config.base)
    digest = config.base.task.corpus_digest()
    run_record.write(config.workdir, values, seed=0, runner="lm", corpus_digest=digest)
    rows = trained_rows.run(asked, config.workdir, config.seeds, config.jobs)
    results = {"config": values, "xz": baselines(config), "rows": rows}
    run_record.write_results(config.workdir, results)
    lm_report.exhibit(results).write(config.workdir)
    return results


def main(config: LmConfig) -> None:
    """Runs and shows the tables."""
    cli.show(lm_report.exhibit(run(config)).shown, config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/lm.py")
