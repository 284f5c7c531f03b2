"""Checks and times every kernel on the device at hand, in under five minutes.

    python -m experiments.bench_kernels [--config.ops=indexer,page_copy]

On a CPU only the references are timed, at small sizes; kernels are checked there by an interpreter.
Where this device's kernel cannot take a case, its row says why. Writes results.json and report.md
to the work directory.
"""

import pathlib

from experiments import cli, config_tools, run_record
from experiments.bench import kernels
from experiments.bench.kernel_config import KernelBenchConfig


def run(config: KernelBenchConfig) -> dict:
    """Measures all, writes the files."""
    config.check()
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, config_tools.to_dict(config), seed=config.seed)
    results = {"platform": run_record.platform_info(), **kernels.run(config)}
    run_record.write_results(workdir, results)
    (workdir / "report.md").write_text(kernels.table(results).markdown())
    return results


def main(config: KernelBenchConfig) -> None:
    """Measures and prints the table."""
    results = run(config)
    cli.show([kernels.table(results)], config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/bench_kernels.py")
