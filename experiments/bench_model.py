"""Times the model, beside transformers where it is installed.

python -m experiments.bench_model --config.sizes=small --config.batches=1
"""

import rich.console

from experiments import cli
from experiments.bench import report, runner


def main(config) -> None:
    """Measures what the work directory does not hold yet, and prints the tables."""
    results = runner.run(config)
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 140
    for table in report.tables(results):
        console.print(table.rich())
    console.print(f"results.json and report.md are in {config.effective().workdir}", markup=False)


if __name__ == "__main__":
    cli.run(main, default="configs/bench_model.py")
