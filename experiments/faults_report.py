"""The fault matrix as tables, a report and heat maps."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.figure
import rich.console
import rich.table

from experiments.bench.report import Table
from experiments.exhibit import Exhibit
from experiments.faults_config import ALL_OFF, ALL_ON, GUARD
from hetero_kv.faults import kinds
from hetero_kv.faults.trial import REFUSED, SILENT, TOLD, UNNOTICED

Rows = Sequence[Mapping]

# Where faults happen: a table and a heat map each, with the checks that can find anything there.
PLACES = {
    "in the store, in a fetch, in a restored row": tuple(
        x for x in kinds.MOMENTS if x != kinds.DEVICE
    ),
    "resident in device pages and slots": (kinds.DEVICE,),
}


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
        token_trials: trials (of one request each) that changed a token.
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
            "token_trials": sum(x["token"] >= 0 for x in some),
        }
    return found


def _fault(row: Mapping) -> tuple:
    return tuple(row[x] for x in ("kind", "component", "moment", "seal", "guard", "extent"))


def _count(rows: Rows, status: str) -> int:
    return sum(x["status"] == status for x in rows)


def of_place(rows: Rows, place: str) -> Rows:
    """The trials of one of PLACES."""
    return [x for x in rows if x["moment"] in PLACES[place]]


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
    summary, outputs, rows = results["summary"], results["outputs"], results["trials"]
    on, off = summary[ALL_ON], summary[ALL_OFF]
    missed = off["wrong_tokens"] - off["first_token"]
    found = [
        f"With all checks on, {on['silent'] + on['told']} of {on['trials']} faults led to a wrong "
        f"answer; {on['refused']} were refused or found with a reason ({on['right_reason']} with "
        f"that of the check that is there for it), {on['right']} had no effect.",
        f"With all checks off, {off['bites']} of {off['faults']} faults "
        f"({_share(off['bites'], off['faults'])}) changed the answer's logits or a live row within "
        f"{outputs} tokens; {off['answers']} ({_share(off['answers'], off['faults'])}) the logits, "
        f"{off['tokens']} ({_share(off['tokens'], off['faults'])}) a token, on any of the "
        f"requests; of single trials {_share(off['token_trials'], off['trials'])} changed a token.",
        _without_tokens(rows),
        f"Of the {off['wrong_tokens']} answers with a wrong token, {off['first_token']} show it in "
        f"the first one: comparing first tokens misses {_share(missed, off['wrong_tokens'])}.",
        _audits(rows),
    ]
    for column, row in summary.items():
        if column not in (ALL_ON, GUARD, ALL_OFF):
            some = (x for x in rows if x["column"] == column and x["status"] == SILENT)
            names = ", ".join(dict.fromkeys(x["kind"] for x in some))
            told = f": {names}" if names else " (others find them)"
            found.append(f"{column}: {row['silent']} become silently wrong{told}.")
    if alone := summary.get(GUARD):
        found.append(
            f"With only the check that is there for a fault (and the rules that act on what a "
            f"fetch finds), {alone['refused']} of {alone['trials']} were found."
        )
    return [x for x in found if x]


def _without_tokens(rows: Rows) -> str:
    """Which faults have changed no token at all."""
    off = [x for x in rows if x["column"] == ALL_OFF]
    quiet = {_fault(x): x for x in off}
    for row in off:
        if row["token"] >= 0:
            quiet.pop(_fault(row), None)
    named = (f"{x['kind']} of {x['component']} ({x['moment']})" for x in quiet.values())
    names = ", ".join(dict.fromkeys(named))
    return f"Without effect on any token: {names}." if names else ""


def _audits(rows: Rows) -> str:
    on = [x for x in rows if x["column"] == ALL_ON]
    audits = [x for x in on if x["guard"] == kinds.AUDIT]
    return (
        f"{len(audits)} of {len(on)} faults only an audit can find: they were there before the "
        f"bytes were sealed, so that every checksum agrees with them."
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _cell(cell: tuple[int, int] | None) -> str:
    return f"{cell[0]}/{cell[1]}" if cell else ""


def _table(results: Mapping, place: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and lines; the last line is the sum."""
    rows = of_place(results["trials"], place)
    have = {x["column"] for x in rows}
    columns = [x for x in results["columns"] if x in have]
    lines = [(kind, [_cell(line.get(x)) for x in columns]) for kind, line in matrix(rows).items()]
    total = summarise(rows)
    last = [_cell((total[x]["silent"], total[x]["trials"])) for x in columns]
    return columns, [*lines, ("all", last)]


def _places(results: Mapping) -> list[str]:
    return [x for x in PLACES if of_place(results["trials"], x)]


def show(results: Mapping, console: rich.console.Console) -> None:
    """Prints the matrix and what it shows."""
    for place in _places(results):
        columns, lines = _table(results, place)
        title = f"silently wrong, of faults tried {place} ({results['model']} model)"
        table = rich.table.Table(title=title, title_justify="left")
        for name in ("fault", *columns):
            table.add_column(name, justify="left" if name == "fault" else "right")
        for name, cells in lines:
            table.add_row(name, *cells)
        console.print(table)
    for claim in claims(results):
        console.print(f"- {claim}", highlight=False)


def exhibit(results: Mapping) -> Exhibit:
    """What it shows, the matrix of each place, and which check found what."""
    intro = "\n".join(f"- {claim}" for claim in claims(results)) + (
        "\n\nEvery fault is put into the store, between lookup and restore, into the restored row, "
        "or into device pages and slots between two calls; then one request is served. Silently "
        "wrong: the answer's logits are not bit for bit those of a cold run, and nothing was "
        "reported. Faults that change values before the seal, or in a row that was just restored, "
        "can be found only by computing again: they are served in shadow mode, where the answer "
        "comes from the cold path; without audits they are silently wrong. Recall prompts ask for "
        "pairs from everywhere in the document; every other one ends between a key and its value."
    )
    tables = []
    for place in _places(results):
        columns, lines = _table(results, place)
        rows = [[name, *cells] for name, cells in lines]
        tables.append(Table(f"Faults {place}", ("fault", *columns), rows))
    found = []
    for row in results["trials"]:
        if row["column"] == ALL_ON:
            reason = row["reasons"][0] if row["reasons"] else row["status"]
            found.append([row["kind"], row["moment"], row["seal"], row["component"], reason])
    columns = ("fault", "moment", "sealed", "component", "reason")
    tables.append(Table("Under all checks", columns, found))
    figures = {"faults": figure(results)}
    return Exhibit(f"Faults and checks: {results['model']}", intro, (), tables, figures)


def figure(results: Mapping) -> matplotlib.figure.Figure:
    """Heat maps, one per place: share of a kind's faults that are silently wrong, per column."""
    places = _places(results)
    tables = {place: _table(results, place) for place in places}
    heights = [len(lines) + 4 for _, lines in tables.values()]
    most = max(len(columns) for columns, _ in tables.values())
    fig = matplotlib.figure.Figure(
        figsize=(2.8 + 0.75 * most, 0.6 + 0.34 * sum(heights)), layout="constrained"
    )
    axes = fig.subplots(len(places), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axis, (place, (columns, lines)) in zip(axes[:, 0], tables.items(), strict=True):
        image = _heat(axis, columns, lines)
        axis.set_title(f"Silently wrong answers, of faults {place}", fontsize=10)
    fig.colorbar(image, ax=axes, label="share", fraction=0.02, pad=0.01)
    return fig


def _heat(axis, columns: Sequence[str], lines: Iterable[tuple[str, list[str]]]):
    lines = list(lines)[:-1]  # without the sum
    shares = [[_ratio(cell) for cell in cells] for _, cells in lines]
    image = axis.imshow(shares, vmin=0, vmax=1, cmap="Reds", aspect="auto")
    for y, (_, cells) in enumerate(lines):
        for x, cell in enumerate(cells):
            colour = "white" if shares[y][x] > 0.6 else "black"
            axis.text(x, y, cell, ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(lines)), [x.replace("_", " ") for x, _ in lines], fontsize=8)
    return image


def _ratio(cell: str) -> float:
    silent, _, trials = cell.partition("/")
    return int(silent) / int(trials) if trials else 0.0
