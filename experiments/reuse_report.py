"""The main job's table, report and figures."""

from collections.abc import Mapping

import matplotlib.figure
import rich.console
import rich.table

COLUMNS = (
    ("mode", "mode", "{}"),
    ("hit %", "candidate_rate", "{:.1%}"),
    ("resumed %", "resumable_rate", "{:.1%}"),
    ("right %", "right", "{:.1%}"),
    ("wrong", "wrong_requests", "{}"),
    ("bitwise", "bitwise_requests", "{}"),
    ("agree %", "token_agreement", "{:.1%}"),
    ("max |dlogit|", "max_logit_difference", "{:.2g}"),
    ("computed", "tokens_computed", "{}"),
    ("reused", "tokens_reused", "{}"),
    ("TTFT ms", "first_token_ms_median", "{:.1f}"),
    ("p95", "first_token_ms_p95", "{:.1f}"),
)
COLOURS = {  # Okabe and Ito's palette: safe for colour-blind readers
    "off": "#999999",
    "hash_only": "#D55E00",
    "hash_only_zeroed": "#E69F00",
    "validated": "#0072B2",
}


def _cells(row: Mapping) -> list[str]:
    return [form.format(row[field]) for _, field, form in COLUMNS]


def _title(cell: Mapping) -> str:
    return (
        f"{cell['scenario']}: {cell['requests']} requests, {cell['model']}, store "
        f"{cell['store_bytes'] / 1024:.0f} KiB = {cell['capacity']:.0%} of what all documents take"
    )


def show(cells: list[Mapping], console: rich.console.Console) -> None:
    """Prints a table per scenario and capacity."""
    for cell in cells:
        table = rich.table.Table(title=_title(cell), title_justify="left")
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="left" if name == "mode" else "right")
        for mode, row in cell["modes"].items():
            table.add_row(*_cells({"mode": mode, **row}))
        console.print(table)


def markdown(cells: list[Mapping], claims: list[str]) -> str:
    """The report: claims, then a table per cell, then what shortened hits."""
    lines = ["# Reuse: off, by hash only, validated", ""]
    lines += [f"- {claim}" for claim in claims]
    lines += [
        "",
        "hit: prompt tokens whose keys matched; resumed: prompt tokens really skipped; right: "
        "answers that are true (recall) or equal to the cold run's (text); wrong: requests with "
        "any answer token unlike the cold run's; bitwise: requests whose question logits equal "
        "the cold run's bit for bit; TTFT: lookup, restore, prefill and publishing on the way.",
        "",
        "![figure](reuse.png)",
    ]
    for cell in cells:
        lines += ["", f"## {_title(cell)}", ""]
        lines.append("| " + " | ".join(name for name, _, _ in COLUMNS) + " |")
        lines.append("|" + "---|" * len(COLUMNS))
        for mode, row in cell["modes"].items():
            lines.append("| " + " | ".join(_cells({"mode": mode, **row})) + " |")
        reasons = cell["modes"].get("validated", {}).get("shortened_by", {})
        if reasons:
            lines += ["", "What shortened validated hits:", ""]
            lines += [f"- {reason}: {count} times" for reason, count in reasons.items()]
    return "\n".join(lines) + "\n"


def claims(cells: list[Mapping]) -> list[str]:
    """What the tables show, computed from them (nothing here is known beforehand)."""
    found = []
    for cell in cells:
        modes = cell["modes"]
        if not {"off", "hash_only", "validated"} <= modes.keys():
            continue
        blind, checked = modes["hash_only"], modes["validated"]
        gap = 100 * (blind["resumable_rate"] - checked["resumable_rate"])
        found.append(
            f"{cell['scenario']} at {cell['capacity']:.0%}: hash_only resumed "
            f"{blind['resumable_rate']:.1%} of prompt tokens and answered "
            f"{blind['wrong_requests']} of {blind['requests']} requests wrongly; validated resumed "
            f"{checked['resumable_rate']:.1%} ({gap:+.1f} points less), answered "
            f"{checked['wrong_requests']} wrongly, and {checked['bitwise_requests']} of "
            f"{checked['requests']} bitwise as the cold run."
        )
    return found


def figure(cells: list[Mapping]) -> matplotlib.figure.Figure:
    """Resumed tokens and wrong answers per mode, a column of panels per cell."""
    fig = matplotlib.figure.Figure(figsize=(2.2 * len(cells) + 1, 5))
    axes = fig.subplots(2, len(cells), squeeze=False, sharey="row")
    for column, cell in enumerate(cells):
        names = list(cell["modes"])
        colours = [COLOURS.get(name, "#000000") for name in names]
        rows = list(cell["modes"].values())
        resumed = [100 * row["resumable_rate"] for row in rows]
        wrong = [100 * row["wrong_requests"] / row["requests"] for row in rows]
        for axis, values in ((axes[0, column], resumed), (axes[1, column], wrong)):
            bars = axis.bar(range(len(names)), values, color=colours)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
            axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
            axis.set_ylim(0, 110)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(f"{cell['scenario']}, {cell['capacity']:.0%}", fontsize=9)
        axes[0, column].set_xticks([])
    axes[0, 0].set_ylabel("prompt tokens resumed, %", fontsize=8)
    axes[1, 0].set_ylabel("requests answered wrongly, %", fontsize=8)
    fig.tight_layout()
    return fig
