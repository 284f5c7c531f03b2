"""Times the model, beside transformers where it is installed.

python -m experiments.bench_model --config.sizes=small --config.batches=1
"""

from experiments import cli
from experiments.bench import report, runner


def main(config) -> None:
    """Measures what the work directory does not hold yet, and prints the tables."""
    results = runner.run(config)
    cli.show(report.tables(results), config.effective().workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/bench_model.py")
