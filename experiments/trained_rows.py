"""Rows of an ablation whose arms are trained: cells that are done once, one tidy file a row.

A cell is an arm with a seed: its model is trained, then measured. Models are shared between rows
(`trained_models`), measurements are kept by the digest of all that decides them. So a run that is
killed at any moment and started again leaves the very files of one that was not.
"""

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import models
from experiments import progress, run_record, sweep_results, train_config, training
from experiments.trained_models import Models, digest

Metrics = Mapping[str, object]  # numbers, nested by name
Measure = Callable[[train_config.TrainConfig, training.TrainResult], Metrics]
Check = Callable[[], object]
Results = dict[str, dict[str, dict[str, Metrics]]]  # row → arm → seed → metrics
COLUMNS = ("cell", "arm", "seed", "metric", "value")


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """Arms by name, the seed aside, and what is measured of each.

    settings: JSON values besides the model's that decide a measurement; a cell is measured anew
    where they change. check: raises ValueError, before anything is trained, where `measure` could
    not do its work.
    """

    name: str
    arms: Mapping[str, train_config.TrainConfig]
    measure: Measure
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    check: Check = lambda: None


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """An arm of a row with its seed."""

    row: Row
    arm: str
    seed: int

    @property
    def config(self) -> train_config.TrainConfig:
        """What is trained."""
        return dataclasses.replace(self.row.arms[self.arm], seed=self.seed)

    @property
    def digest(self) -> str:
        """Names what is measured."""
        values = {
            "row": self.row.name,
            "model": digest(self.config),
            "settings": dict(self.row.settings),
        }
        return run_record.digest(values)[:16]


def run(rows: Sequence[Row], place: str | os.PathLike, seeds: int, jobs: int) -> Results:
    """Trains and measures what is missing, and writes `<row>.csv` of each row.

    rows: those that `check` has let through. seeds: 0 .. seeds - 1. jobs: trainings at a time,
    each pinned to cores of its own.
    """
    place = pathlib.Path(place)
    (place / "cells").mkdir(parents=True, exist_ok=True)
    trained = Models(place / "models")
    cells = [Cell(row, arm, seed) for row in rows for arm in row.arms for seed in range(seeds)]
    trained.train([x.config for x in cells if _read(place, x) is None], jobs)
    found: Results = {}
    with progress.Progress(len(cells), title="cells measured") as bar:
        for done, cell in enumerate(cells, 1):
            metrics = _read(place, cell)
            if metrics is None:
                metrics = cell.row.measure(cell.config, trained.get(cell.config))
                run_record.write_json(place / "cells" / f"{cell.digest}.json", metrics)
                metrics = _read(place, cell)  # what a later run reads
            found.setdefault(cell.row.name, {}).setdefault(cell.arm, {})[str(cell.seed)] = metrics
            bar.update(done)
    for row in rows:
        _write(place, [x for x in cells if x.row is row], found[row.name])
    return found


def check(rows: Sequence[Row]) -> None:
    """Raises ValueError naming an arm that cannot be trained, or a row that cannot be measured.

    Of all rows, before hours go into the first; nothing is written.
    """
    for row in rows:
        for arm, made in row.arms.items():
            try:
                made.check()
                models.build(made.model)
            except ValueError as error:
                raise ValueError(f"{row.name}, arm {arm}: {error}") from error
        try:
            row.check()
        except ValueError as error:
            raise ValueError(f"{row.name}: {error}") from error


def _read(place: pathlib.Path, cell: Cell) -> dict | None:
    return run_record.read_json(place / "cells" / f"{cell.digest}.json")


def _write(place: pathlib.Path, cells: Sequence[Cell], found: Mapping) -> None:
    """The tidy file of a row, whole or not at all; it holds no times."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        for metric, value in sweep_results.flat(found[cell.arm][str(cell.seed)]):
            writer.writerow([cell.digest, cell.arm, cell.seed, metric, value])
    path = place / f"{cells[0].row.name}.csv"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text.getvalue())
    os.replace(temporary, path)


def learnt(result: training.TrainResult) -> dict:
    """What every row tells of a training, times aside."""
    names = ("steps", "stopped", "eval_accuracy", "steps_to_95", "parameters", "chance")
    return {name: result.results[name] for name in names}
