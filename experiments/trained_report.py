"""What reports of trained rows share: values over seeds, claims about them, points with bars."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib.axes
import matplotlib.figure

from experiments.bench.report import Table
from experiments.exhibit import Claim, plain


@dataclasses.dataclass(frozen=True, eq=False)
class Arms:
    """A row's results: arm → seed → metrics."""

    found: Mapping[str, Mapping[str, Mapping]]

    @property
    def example(self) -> Mapping:
        """The metrics of one cell: which there are is the same for all."""
        return next(iter(next(iter(self.found.values())).values()))

    def has(self, *arms: str) -> bool:
        """Whether all of the arms were run."""
        return all(arm in self.found for arm in arms)

    def values(self, arm: str, *path: str) -> list[float]:
        """A metric's value at every seed that has it."""
        values = []
        for metrics in self.found[arm].values():
            for name in path:
                metrics = None if metrics is None else metrics.get(name)
            if metrics is not None:
                values.append(metrics)
        return values

    def mean(self, arm: str, *path: str) -> float:
        """Over seeds."""
        return statistics.fmean(self.values(arm, *path))

    def cell(self, arm: str, *path: str, digits: int = 3) -> str:
        """Mean and standard deviation over seeds, as text."""
        values = self.values(arm, *path)
        return spread(values, digits) if values else "–"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± standard deviation`; one value stands alone."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def each(values: Sequence[float], digits: int = 3) -> str:
    """Every seed's value, for a claim's note."""
    return "seeds " + ", ".join(f"{x:.{digits}f}" for x in values)


def at_least(name: str, published: float, values: Sequence[float], source: str, **more) -> Claim:
    """A claim about the mean over seeds, a number that should not be smaller."""
    more = {"margin": 0.0, "absolute": True, "relation": "at least", **more}
    return _claim(name, published, values, source, more)


def near(
    name: str, published: float, values: Sequence[float], margin: float, source: str, **more
) -> Claim:
    """A claim about the mean over seeds, a number that should not lie further off than `margin`."""
    return _claim(name, published, values, source, {"margin": margin, "absolute": True, **more})


def _claim(
    name: str, published: float, values: Sequence[float], source: str, more: Mapping
) -> Claim:
    note = each(values) if len(values) > 1 else "one seed"
    if "note" in more:
        note = f"{note}; {more['note']}"
    return Claim(name=name, published=published, found=statistics.fmean(values), source=source,
                 **{**more, "note": note})  # fmt: skip


def differences(
    arms: Arms, left: str, right: str, *path: str, other: Sequence[str] = ()
) -> list[float]:
    """left - right of a metric by seed; `other` is the path on the right where it differs."""
    a, b = arms.values(left, *path), arms.values(right, *(other or path))
    return [x - y for x, y in zip(a, b, strict=True)]


def table(title: str, arms: Arms, columns: Mapping[str, Callable[[str], str]], note: str) -> Table:
    """A line an arm; a column's text is a function of the arm's name."""
    rows = [[arm, *(text(arm) for text in columns.values())] for arm in arms.found]
    seeds = max(len(x) for x in arms.found.values())
    about = f"Mean ± standard deviation over {seeds} seeds. " if seeds > 1 else "One seed. "
    return Table(title, ("arm", *columns), rows, about + note)


def figure(panels: int = 1, width: float = 4.5) -> tuple[matplotlib.figure.Figure, list]:
    """A figure with panels side by side."""
    fig = matplotlib.figure.Figure(figsize=(width * panels, 3.4))
    axes = list(fig.subplots(1, panels, squeeze=False)[0])
    plain(*axes)
    return fig, axes


def points(
    axis: matplotlib.axes.Axes, xs: Sequence[float], values: Sequence[Sequence[float]], **style
) -> None:
    """Means over seeds with bars of one standard deviation, and every seed as a dot."""
    means = [statistics.fmean(v) for v in values]
    bars = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    style = {"marker": "o", "markersize": 4, "capsize": 3, **style}
    drawn = axis.errorbar(xs, means, yerr=bars, **style)
    colour = drawn.lines[0].get_color()
    for x, of in zip(xs, values, strict=True):
        axis.scatter([x] * len(of), of, s=8, alpha=0.5, color=colour)
