"""Trains a model: `python -m experiments.train --config=configs/train_recall.py`."""

from experiments import cli, training


def main(config) -> None:
    """Trains and prints the results."""
    results = training.run(config).results
    print("\n".join(f"{name:20} {value}" for name, value in results.items()))


if __name__ == "__main__":
    cli.run(main, default="configs/train_recall.py")
