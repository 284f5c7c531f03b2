"""The figures of the recall rows."""

from collections.abc import Mapping

import matplotlib.axes
import matplotlib.figure

from experiments.exhibit import COLOURS
from experiments.trained_report import Arms, figure, points


def figures(results: Mapping, rows: Mapping[str, Arms]) -> dict[str, matplotlib.figure.Figure]:
    """By file stem, of the rows that were run."""
    made = {
        "B1": ("recall_pareto", _pareto),
        "B2": ("facts_per_entry", _crowding),
        "B3": ("picks", _picks),
        "B4": ("warm_up", _warm_up),
        "B5": ("borders", _borders),
        "B7": ("distances", _distances),
    }
    return {made[name][0]: made[name][1](arms) for name, arms in rows.items() if name in made}


def _pareto(arms: Arms) -> matplotlib.figure.Figure:
    """Accuracy against cache bytes."""
    fig, (axis,) = figure(width=6)
    for colour, arm in zip(COLOURS, arms.found, strict=False):
        points(axis, [arms.mean(arm, "cache_bytes") / 1024], [arms.values(arm, "eval_accuracy")],
               color=colour, label=arm, linestyle="none")  # fmt: skip
    axis.axhline(arms.mean(arm, "chance"), color="grey", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", xlabel="cache of one sequence, KiB", ylabel="accuracy")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig


def _crowding(arms: Arms) -> matplotlib.figure.Figure:
    fig, (axis,) = figure(width=6)
    for label, wanted in (("no overlap", False), ("overlap", True)):
        names = [arm for arm in arms.found if arm.endswith("overlap") == wanted]
        names.sort(key=lambda arm: arms.mean(arm, "facts_per_entry"))
        if names:
            points(axis, [arms.mean(x, "facts_per_entry") for x in names],
                   [arms.values(x, "eval_accuracy") for x in names], label=label)  # fmt: skip
    xs = sorted({arms.mean(arm, "facts_per_entry") for arm in arms.found})
    axis.plot(xs, [1 / x for x in xs], linestyle="--", color="grey", label="1 / facts")
    axis.set(xscale="log", xlabel="facts in the entry of a fact", ylabel="accuracy")
    axis.set_xticks(xs, [f"{x:.3g}" for x in xs])
    axis.minorticks_off()
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig


def _picks(arms: Arms) -> matplotlib.figure.Figure:
    fig, (left, right) = figure(2)
    (arm,) = arms.found
    counts = list(next(iter(arms.found[arm].values()))["picks"])
    xs = [int(k) for k in counts]
    for way in ("indexer", "oracle", "random"):
        points(left, xs, [arms.values(arm, "accuracy", way, k) for k in counts], label=way)
    left.axhline(arms.mean(arm, "accuracy", "all"), color="grey", linestyle=":", label="all")
    shown = (("recall", "recall@k of the oracle set"), ("found", "the fact is picked"),
             ("mass", "attention covered"), ("oracle_mass", "covered by the oracle"))  # fmt: skip
    for metric, label in shown:
        points(right, xs, [arms.values(arm, "picks", k, metric) for k in counts], label=label)
    left.set_ylabel("accuracy")
    right.set_ylabel("share")
    for axis in (left, right):
        axis.set(xscale="log", xlabel="entries picked, k")
        axis.set_xticks(xs, counts)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    fig.tight_layout()
    return fig


def _bars(axis: matplotlib.axes.Axes, arms: Arms, metrics: Mapping[str, tuple[str, ...]]) -> None:
    """Groups of bars: an arm each, a bar for every metric, a dot for every seed."""
    share = 0.8 / len(metrics)
    names = list(arms.found)
    for number, (label, path) in enumerate(metrics.items()):
        for place, arm in enumerate(names):
            values = arms.values(arm, *path)
            at = place + (number - (len(metrics) - 1) / 2) * share
            if values:
                axis.bar(at, sum(values) / len(values), share, color=COLOURS[number],
                         label=None if place else label)  # fmt: skip
                axis.scatter([at] * len(values), values, s=8, color="black", zorder=3)
    axis.set_xticks(range(len(names)), [x.replace(", ", "\n") for x in names])
    axis.tick_params(axis="x", labelsize=8)


def _warm_up(arms: Arms) -> matplotlib.figure.Figure:
    fig, (axis,) = figure(width=7)
    metrics = {
        "dense, before the switch": ("dense_accuracy",),
        "indexer's picks": ("accuracy",),
        "all entries": ("accuracy_all",),
        "random picks": ("accuracy_random",),
    }
    _bars(axis, arms, metrics)
    axis.set_ylabel("accuracy")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig


def _borders(arms: Arms) -> matplotlib.figure.Figure:
    fig, (axis,) = figure(width=5)
    _bars(axis, arms, {"accuracy": ("eval_accuracy",)})
    axis.set_ylabel("accuracy")
    fig.tight_layout()
    return fig


def _distances(arms: Arms) -> matplotlib.figure.Figure:
    fig, (axis,) = figure(width=6)
    for arm, seeds in arms.found.items():
        distances = list(next(iter(seeds.values()))["accuracy"])
        points(axis, [int(d) for d in distances],
               [arms.values(arm, "accuracy", d) for d in distances], label=arm)  # fmt: skip
        if "swa" in arm:
            axis.axvline(arms.mean(arm, "reach"), color="grey", linestyle=":",
                         label=f"reach of {arm}")  # fmt: skip
    axis.set(xlabel="distance, tokens", ylabel="accuracy")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig
