"""The figures of the language-model rows."""

from collections.abc import Mapping

import matplotlib.axes
import matplotlib.figure

from experiments.exhibit import COLOURS
from experiments.trained_report import Arms, figure, points


def figures(results: Mapping, rows: Mapping[str, Arms]) -> dict[str, matplotlib.figure.Figure]:
    """By file stem, of the rows that were run."""
    made = {}
    for name in ("C1", "C2", "C4", "C6"):
        if name in rows:
            made[f"{name.lower()}_bits"] = _positions(rows[name], results["xz"])
    for name in ("C1", "C4", "C5", "C6"):
        if name in rows:
            made[f"{name.lower()}_needles"] = _needles(rows[name])
    if "C5" in rows:
        made["c5_pareto"] = _pareto(rows["C5"])
    return made


def _lines(axis: matplotlib.axes.Axes, xz: Mapping[str, float]) -> None:
    styles = (("stream", "xz -6, all text", ":"), ("windows", "xz -6, each window", "--"))
    for name, label, style in styles:
        axis.axhline(xz[name], color="grey", linewidth=0.9, linestyle=style, label=label)


def _positions(arms: Arms, xz: Mapping[str, float]) -> matplotlib.figure.Figure:
    """Bits a byte by stretch of positions."""
    fig, (axis,) = figure(width=6)
    for number, (arm, seeds) in enumerate(arms.found.items()):
        parts = [x for x in next(iter(seeds.values()))["bits"] if x != "all"]
        shift = 0.06 * (number - (len(arms.found) - 1) / 2)  # dots of arms lie side by side
        points(axis, [i + shift for i in range(len(parts))],
               [arms.values(arm, "bits", x) for x in parts], label=arm)  # fmt: skip
    _lines(axis, xz)
    axis.set_xticks(range(len(parts)), parts)
    axis.set(xlabel="position", ylabel="bits a byte")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig


def _needles(arms: Arms) -> matplotlib.figure.Figure:
    """Digits that are right, by depth and length."""
    fig, axes = figure(len(arms.found), width=2.6)
    for axis, (arm, seeds) in zip(axes, arms.found.items(), strict=True):
        of = next(iter(seeds.values()))["needle"]
        lengths, depths = list(of), list(next(iter(of.values())))
        shares = [[arms.mean(arm, "needle", n, d) for n in lengths] for d in depths]
        axis.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, values in enumerate(shares):
            for column, value in enumerate(values):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7,
                          color="black" if value > 0.5 else "white")  # fmt: skip
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), depths)
        axis.set_title(arm, fontsize=9)
        axis.set_xlabel("bytes")
    axes[0].set_ylabel("depth of the needle")
    fig.tight_layout()
    return fig


def _pareto(arms: Arms) -> matplotlib.figure.Figure:
    """Bits a byte against cache bytes."""
    fig, (axis,) = figure(width=5)
    for colour, arm in zip(COLOURS, arms.found, strict=False):
        points(axis, [arms.mean(arm, "cache_bytes") / 1024], [arms.values(arm, "bits", "all")],
               color=colour, label=arm, linestyle="none")  # fmt: skip
    ends = [(arms.mean(x, "cache_bytes") / 1024, arms.mean(x, "bits", "all"))
            for x in ("all CSA", "all HCA")]  # fmt: skip
    axis.plot(*zip(*ends, strict=True), color="grey", linewidth=0.8)
    axis.set(xlabel="cache of one sequence, KiB", ylabel="bits a byte")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig
