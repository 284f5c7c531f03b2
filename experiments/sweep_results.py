"""A sweep's results as one tidy file: a value a line."""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence

from experiments.sweep_jobs import Place
from experiments.sweep_plan import Cell

TIMES = r"seconds|_ms$|_time$"  # what no two runs have alike
Value = float | int | str | bool


def flat(values: object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Names joined by dots, and their numbers, words and truth values; None is left out."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list):
        for place, value in enumerate(values):
            yield from flat(value, f"{prefix}.{place}" if prefix else str(place))
    elif values is not None:
        yield prefix, values


def unwanted(drop: str) -> re.Pattern | None:
    """What a name is searched for to be left out; ValueError if it is no regular expression."""
    try:
        return re.compile(drop) if drop else None
    except re.error as error:
        raise ValueError(f"drop={drop!r} is no regular expression: {error}") from error


def rows(place: Place, cells: Sequence[Cell], drop: str) -> tuple[list[str], list[list[Value]]]:
    """Columns and lines: digest, seed, what the grid changed, metric, value."""
    pattern = unwanted(drop)
    paths = list(dict.fromkeys(path for cell in cells for path in cell.changes))
    lines = []
    for cell in cells:
        record = place.record(cell)
        if record is None:
            continue
        own = [cell.digest, *(_cell_text(cell.changes.get(path, "")) for path in paths)]
        # What a runner repeats of its configuration is the cell's, and names the work directory.
        results = {k: v for k, v in record["results"].items() if k != "config"}
        for name, value in flat(results):
            if not (pattern and pattern.search(name)):
                lines.append([*own, name, value])
    return ["cell", *paths, "metric", "value"], lines


def _cell_text(value: object) -> Value:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def write(place: Place, cells: Sequence[Cell], drop: str) -> None:
    """Writes results.csv whole or not at all; its bytes depend on the cells alone."""
    columns, lines = rows(place, cells, drop)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *lines])
    temporary = place.path / "results.csv.tmp"
    temporary.write_text(text.getvalue())
    os.replace(temporary, place.path / "results.csv")


def read(path: str | os.PathLike) -> list[dict[str, str]]:
    """The lines of a results.csv."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
