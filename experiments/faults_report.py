"""The fault matrix as a table, a report and a heat map."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.figure
import rich.console
import rich.table

from experiments.faults_config import ALL_OFF, ALL_ON, GUARD
from hetero_kv.faults.trial import REFUSED, SILENT, TOLD, UNNOTICED

Rows = Sequence[Mapping]


def summarise(rows: Rows) -> dict:
    """Per column, over its trials.

    Fields:
        trials, right, refused, told, silent: how many; the last four by `Outcome.status` (right:
            served right without a word).
        right_reason: the check on guard has said so, with the component where it can tell.
        wrong_tokens: silently wrong with another token among the outputs that were compared.
        first_token: of those, how many show it in the first output.
        faults: different ones. bites, answers, tokens: of them, how many have on any request
            changed the answer's logits or a live row; the logits; a token.
    """
    found = {}
    for column in dict.fromkeys(x["column"] for x in rows):
        some = [x for x in rows if x["column"] == column]
        silent = [x for x in some if x["status"] == SILENT]
        wrong = [x for x in silent if x["token"] >= 0]
        found[column] = {
            "trials": len(some),
            "right": _count(some, UNNOTICED),
            "refused": _count(some, REFUSED),
            "told": _count(some, TOLD),
            "silent": len(silent),
            "right_reason": sum(x["right_reason"] for x in some),
            "wrong_tokens": len(wrong),
            "first_token": sum(x["token"] == 0 for x in wrong),
            "faults": len({_fault(x) for x in some}),
            "bites": len({_fault(x) for x in some if x["bites"]}),
            "answers": len({_fault(x) for x in some if x["logit"] >= 0}),
            "tokens": len({_fault(x) for x in some if x["token"] >= 0}),
        }
    return found


def _fault(row: Mapping) -> tuple:
    return tuple(row[x] for x in ("kind", "component", "moment", "seal", "guard", "extent"))


def _count(rows: Rows, status: str) -> int:
    return sum(x["status"] == status for x in rows)


def matrix(rows: Rows) -> dict[str, dict[str, tuple[int, int]]]:
    """kind -> column -> (silently wrong, trials)."""
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for row in rows:
        line = table.setdefault(row["kind"], {})
        silent, trials = line.get(row["column"], (0, 0))
        line[row["column"]] = silent + (row["status"] == SILENT), trials + 1
    return table


def claims(results: Mapping) -> list[str]:
    """What the trials show, computed from them (nothing here is known beforehand)."""
    summary, outputs = results["summary"], results["outputs"]
    on, off = summary[ALL_ON], summary[ALL_OFF]
    missed = off["wrong_tokens"] - off["first_token"]
    found = [
        f"With all checks on, {on['silent'] + on['told']} of {on['trials']} faults led to a wrong "
        f"answer; {on['refused']} were refused or found with a reason ({on['right_reason']} with "
        f"that of the check that is there for it), {on['right']} had no effect.",
        f"With all checks off, {off['bites']} of {off['faults']} faults "
        f"({_share(off['bites'], off['faults'])}) changed the answer's logits or a live row within "
        f"{outputs} tokens; {off['answers']} ({_share(off['answers'], off['faults'])}) the logits, "
        f"{off['tokens']} ({_share(off['tokens'], off['faults'])}) a token.",
        f"Of the {off['wrong_tokens']} answers with a wrong token, {off['first_token']} show it in "
        f"the first one: comparing first tokens misses {_share(missed, off['wrong_tokens'])}.",
    ]
    for column, row in summary.items():
        if column not in (ALL_ON, GUARD, ALL_OFF):
            kinds = dict.fromkeys(
                x["kind"]
                for x in results["trials"]
                if x["column"] == column and x["status"] == SILENT
            )
            names = f": {', '.join(kinds)}" if kinds else " (others find them)"
            found.append(f"{column}: {row['silent']} become silently wrong{names}.")
    alone = summary[GUARD]
    found.append(
        f"With only the check that is there for a fault (and the rules that act on what a fetch "
        f"finds), {alone['refused']} of {alone['trials']} were found."
    )
    return found


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _cell(cell: tuple[int, int] | None) -> str:
    return f"{cell[0]}/{cell[1]}" if cell else ""


def _lines(results: Mapping) -> Iterable[tuple[str, list[str]]]:
    table, columns = matrix(results["trials"]), results["columns"]
    for kind, line in table.items():
        yield kind, [_cell(line.get(x)) for x in columns]
    summary = results["summary"]
    yield "all", [_cell((summary[x]["silent"], summary[x]["trials"])) for x in columns]


def show(results: Mapping, console: rich.console.Console) -> None:
    """Prints the matrix and what it shows."""
    title = f"faults that are silently wrong, of those tried ({results['model']} model)"
    table = rich.table.Table(title=title, title_justify="left")
    for name in ("fault", *results["columns"]):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for name, cells in _lines(results):
        table.add_row(name, *cells, end_section=False)
    console.print(table)
    for claim in claims(results):
        console.print(f"- {claim}", highlight=False)


def markdown(results: Mapping) -> str:
    """The report: what it shows, the matrix, and which check found what."""
    lines = ["# Faults and checks", ""]
    lines += [f"- {claim}" for claim in claims(results)]
    lines += [
        "",
        "Every fault is put into the store, between lookup and restore, or into the restored row; "
        "then one request is served. Silently wrong: the answer's logits are not bit for bit those "
        "of a cold run, and nothing was reported. Faults that change values before the seal, "
        "or in a row, can be found only by computing again: they are served in shadow mode, where "
        "the answer comes from the cold path; without audits they are silently wrong.",
        "",
        "![silently wrong, per fault and per check switched off](faults.png)",
        "",
        "| fault | " + " | ".join(results["columns"]) + " |",
        "|---" * (1 + len(results["columns"])) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in _lines(results)]
    lines += ["", "## Under all checks", "", "| fault | moment | sealed | component | reason |"]
    lines.append("|---|---|---|---|---|")
    for row in results["trials"]:
        if row["column"] == ALL_ON:
            reason = row["reasons"][0] if row["reasons"] else row["status"]
            about = (row["kind"], row["moment"], row["seal"], row["component"], reason)
            lines.append("| " + " | ".join(about) + " |")
    return "\n".join(lines) + "\n"


def figure(results: Mapping) -> matplotlib.figure.Figure:
    """Heat map: share of a kind's faults that are silently wrong, per column."""
    table, columns = matrix(results["trials"]), results["columns"]
    names = list(table)
    fig = matplotlib.figure.Figure(figsize=(1.8 + 0.75 * len(columns), 1.6 + 0.34 * len(names)))
    axis = fig.subplots()
    shares = [[_ratio(table[kind].get(x)) for x in columns] for kind in names]
    image = axis.imshow(shares, vmin=0, vmax=1, cmap="Reds", aspect="auto")
    for y, kind in enumerate(names):
        for x, column in enumerate(columns):
            colour = "white" if shares[y][x] > 0.6 else "black"
            text = _cell(table[kind].get(column))
            axis.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(names)), [x.replace("_", " ") for x in names], fontsize=8)
    axis.set_title("Silently wrong answers, of faults tried", fontsize=10)
    fig.colorbar(image, ax=axis, label="share", fraction=0.03, pad=0.01)
    fig.tight_layout()
    return fig


def _ratio(cell: tuple[int, int] | None) -> float:
    return cell[0] / cell[1] if cell else 0.0
