"""The admission experiment's claims, table and figure."""

from collections.abc import Mapping

import matplotlib.figure

from experiments.bench.report import Table
from experiments.exhibit import Claim, Exhibit, plain

MARCONI = "Marconi (MLSys'25), direction of figs. 7 and 12"


def _hit(cell: Mapping) -> float:
    return cell["resumable_tokens"] / max(cell["prompt_tokens"], 1)


def _saved(cell: Mapping) -> float:
    return cell["saved_flops"] / max(cell["prompt_flops"], 1)


def exhibit(results: Mapping) -> Exhibit:
    """Hits by state size, capacity, placement and order."""
    rows = []
    for name, cell in results["cells"].items():
        dim, share, placement, order = name.split("/")
        rows.append(
            [
                f"{dim}, {float(share):.0%}, {placement}, {order}",
                f"{_hit(cell):.1%}",
                f"{_saved(cell):.1%}",
                f"{cell['checkpoints']:,}",
                f"{cell['evicted_bytes'] / 1e9:,.1f}",
            ]
        )
    sizes = "; ".join(
        f"state {dim}: {x['checkpoint'] / 1e6:,.1f} MB a checkpoint, {x['block'] / 1e6:,.1f} MB a "
        "block"
        for dim, x in results["sizes"].items()
    )
    note = (
        "Capacity: share of the bytes of all distinct blocks' keys and values. full: a checkpoint "
        f"at every block; fork: where requests part, and at the end. {sizes}."
    )
    columns = ("state, capacity, checkpoints, order", "token hit", "FLOPs saved", "stored",
               "GB evicted")  # fmt: skip
    return Exhibit(
        f"Admission: {results['trace']}",
        claims=_claims(results),
        tables=[Table("Checkpoints of large state", columns, rows, note)],
        figures={"admission": _figure(results)},
    )


def _claims(results: Mapping) -> list[Claim]:
    """Per capacity below that of all keys and values."""
    cells, config = results["cells"], results["config"]
    found, largest = [], max(config["state_dims"])
    for share in (x for x in config["capacities"] if x < 1 and largest):
        full, fork, flop = (
            cells.get(f"{largest}/{share:g}/{x}")
            for x in ("full/lru", "fork/lru", "fork/flop+flops")
        )
        where = f"state {largest}, capacity {share:.0%}"
        if full and fork:
            text = f"D3: token hits, checkpoints at forks over every block, {where}"
            ratio = _hit(fork) / max(_hit(full), 1e-3)
            found.append(
                Claim(name=text, published=2, found=ratio, margin=0.0, source=MARCONI,
                      relation="at least", neutral=1)
            )  # fmt: skip
        if fork and flop:
            text = f"D3: FLOPs saved, FLOP-aware eviction over LRU, {where}"
            ratio = _saved(flop) / max(_saved(fork), 1e-9)
            found.append(
                Claim(name=text, published=1, found=ratio, margin=0.0, source=MARCONI,
                      relation="at least")
            )  # fmt: skip
    share = min(config["capacities"])
    full, fork = (cells.get(f"0/{share:g}/{x}/lru") for x in ("full", "fork"))
    if full and fork:
        found.append(
            Claim(name="D3: the same without recurrent layers: no gap", published=1,
                  found=_hit(fork) / max(_hit(full), 1e-3), margin=0.02, source=MARCONI)
        )  # fmt: skip
    return found


def _figure(results: Mapping) -> matplotlib.figure.Figure:
    fig = matplotlib.figure.Figure(figsize=(6, 3.5))
    axis = fig.subplots()
    plain(axis)
    lines: dict[str, dict[float, float]] = {}
    for name, cell in results["cells"].items():
        dim, share, placement, order = name.split("/")
        if order == results["config"]["orders"][0]:
            lines.setdefault(f"state {dim}, {placement}", {})[float(share)] = 100 * _hit(cell)
    for label, of in lines.items():
        style = "-" if label.endswith("fork") else "--"
        axis.plot(list(of), list(of.values()), style, marker="o", markersize=3, label=label)
    axis.set(xscale="log", xlabel="capacity, share of all keys and values", ylabel="token hits, %")
    axis.legend(fontsize=7)
    fig.tight_layout()
    return fig
