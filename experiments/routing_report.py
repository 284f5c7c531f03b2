"""The routing experiment's table and figure."""

from collections.abc import Mapping

import matplotlib.figure

from experiments.bench.report import Table
from experiments.exhibit import Exhibit, plain


def exhibit(results: Mapping) -> Exhibit:
    """Hits, balance and time to the first token, by instances and way."""
    config = results["config"]
    rows = [
        [
            f"{count}, {way.replace('_', ' ')}",
            f"{x['hash_hit']:.1%}",
            f"{x['effective']:.1%}",
            f"{x['balance']:.2f}",
            f"{x['first_token_median']:.2f}",
            f"{x['first_token_p95']:.2f}",
        ]
        for count, ways in results["routes"].items()
        for way, x in ways.items()
    ]
    note = (
        f"{results['capacity_bytes'] / 1e9:,.1f} GB for all instances together, split evenly; "
        f"without reuse they would be busy {config['utilisation']:.0%} of the time. resumed: share "
        "of prompt tokens not computed; balance: the busiest instance's computed tokens over the "
        "mean; seconds: until a prompt is computed, queueing included."
    )
    columns = ("instances, way", "hash hit", "resumed", "balance", "median s", "p95 s")
    return Exhibit(
        f"Routing: {results['trace']}",
        tables=[Table("Which instance", columns, rows, note)],
        figures={"routing": _figure(results["routes"])},
    )


def _figure(routes: Mapping) -> matplotlib.figure.Figure:
    fig = matplotlib.figure.Figure(figsize=(9, 3.2))
    axes = fig.subplots(1, 3)
    plain(*axes)
    counts = [int(x) for x in routes]
    shown = (("effective", "resumed, % of prompt tokens", 100), ("balance", "busiest over mean", 1),
             ("first_token_p95", "p95 s until computed", 1))  # fmt: skip
    for axis, (field, label, scale) in zip(axes, shown, strict=True):
        for way in next(iter(routes.values())):
            values = [scale * ways[way][field] for ways in routes.values()]
            axis.plot(counts, values, marker="o", markersize=3, label=way.replace("_", " "))
        axis.set(xlabel="instances", ylabel=label)
        axis.set_xticks(counts)
    axes[-1].set_yscale("log")
    axes[0].legend(fontsize=7)
    fig.tight_layout()
    return fig
