"""What a sweep shows: mean and spread over seeds per cell, and a figure per chosen metric."""

import collections
import difflib
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence

import matplotlib.figure

from experiments import run_record, sweep_plan, sweep_results
from experiments.bench.report import Table
from experiments.exhibit import COLOURS, Exhibit, plain

Cell = tuple[str, ...]  # values of the varied paths


LISTED = 40  # metrics that an error names


def metrics_of(place: pathlib.Path) -> list[str]:
    """Names of the sweep's numeric metrics, in the order of its results."""
    return list(_by_metric(sweep_results.read(place / "results.csv"), ()))


def check(metrics: Sequence[str], places: Sequence[pathlib.Path]) -> None:
    """Raises ValueError where no sweep of `places` has a metric; it names those that there are."""
    if metrics and not places:
        raise ValueError(f"metrics {list(metrics)} are those of a sweep, and no run is one")
    known = list(dict.fromkeys(x for place in places for x in metrics_of(place)))
    for metric in metrics:
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=5, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            more = f", and {len(known) - LISTED} more" if len(known) > LISTED else ""
            raise ValueError(
                f"{', '.join(map(str, places))}: no metric {metric!r}; {hint}There are: "
                f"{'; '.join(known[:LISTED])}{more} (column `metric` of results.csv)"
            )


def exhibit(place: pathlib.Path, metrics: Sequence[str] = ()) -> Exhibit:
    """A table and figures of those of `metrics` that the sweep has; of none: a table of all."""
    asked = run_record.read_json(place / "sweep.json")
    lines = sweep_results.read(place / "results.csv")
    paths = _varied(asked)
    found = _by_metric(lines, paths)
    shown = [x for x in metrics if x in found] if metrics else list(found)
    rows = [
        [f"{name}: {_label(paths, cell)}", *_spread(values)]
        for name in shown
        for cell, values in found[name].items()
    ]
    title = f"Sweep of {asked['runner']} ({asked['config']})"
    note = "sd: standard deviation over seeds."
    table = Table(
        "Results", ("metric and cell", "mean", "sd", "least", "most", "seeds"), rows, note
    )
    intro = f"{asked['cells']} cells, {len(asked['failed'])} failed."
    intro += "".join(f"\n- {digest}: {why}" for digest, why in asked["failed"].items())
    if not shown:
        intro += f"\n\nIt has none of the metrics that are asked for: {', '.join(metrics)}."
    drawn = shown if metrics else []
    figures = {f"sweep-{_stem(x)}": _figure(x, found[x], paths) for x in drawn}
    return Exhibit(title, intro, (), [table] if rows else [], figures)


def _stem(metric: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", metric).strip("-")


def _varied(asked: Mapping) -> list[str]:
    grids = [x for text in asked["grid"] for x in (text.split() if asked["mode"] == "list" else
                                                   [text])]  # fmt: skip
    return list(dict.fromkeys(sweep_plan.axis(x)[0] for x in grids))


def _by_metric(lines: Sequence[Mapping], paths: Sequence[str]) -> dict[str, dict[Cell, list]]:
    found: dict[str, dict[Cell, list[float]]] = collections.defaultdict(dict)
    for line in lines:
        try:
            value = float(line["value"])
        except ValueError:
            continue  # a word
        cell = tuple(line[path] for path in paths)
        found[line["metric"]].setdefault(cell, []).append(value)
    return dict(found)


def _label(paths: Sequence[str], cell: Cell) -> str:
    pairs = zip(paths, cell, strict=True)
    return ", ".join(f"{path} = {value}" for path, value in pairs if value) or "as configured"


def _spread(values: Sequence[float]) -> list[str]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    numbers = (statistics.fmean(values), spread, min(values), max(values))
    return [*(f"{x:.4g}" for x in numbers), str(len(values))]


def _figure(
    name: str, cells: Mapping[Cell, Sequence[float]], paths: Sequence[str]
) -> matplotlib.figure.Figure:
    """Means with a bar of one standard deviation each way, and every seed as a dot."""
    fig = matplotlib.figure.Figure(figsize=(6, 3.5))
    axis = fig.subplots()
    plain(axis)
    lines: dict[Cell, dict[str, Sequence[float]]] = {}
    for cell, values in cells.items():
        lines.setdefault(cell[1:], {})[cell[0] if cell else ""] = values
    ticks = list(dict.fromkeys(x for of in lines.values() for x in of))
    for number, (rest, of) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = [ticks.index(x) for x in of]
        means = [statistics.fmean(x) for x in of.values()]
        bars = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in of.values()]
        axis.errorbar(at, means, yerr=bars, marker="o", capsize=3, color=colour,
                      label=_label(paths[1:], rest))  # fmt: skip
        for place, values in zip(at, of.values(), strict=True):
            axis.scatter([place] * len(values), values, s=8, alpha=0.5, color=colour)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set(xlabel=paths[0] if paths else "", ylabel=name)
    if len(lines) > 1:
        axis.legend(fontsize=7)
    fig.tight_layout()
    return fig
