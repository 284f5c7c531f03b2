"""The results as tables, for a terminal and as Markdown."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import rich.box
import rich.table

BUSY = 0.2  # cores that others used, above which a cell should be measured again

# HF's time over ours, at a context of 512: (size, batch) to what is wanted at least.
GOALS: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("small", 1): {"decode": 15, "scanned": 40, "prefill": 3},
    ("medium", 1): {"decode": 8, "scanned": 11, "prefill": 1.5},
    ("large", 1): {"decode": 3, "scanned": 4, "prefill": 1},
    ("small", 8): {"decode": 10},
    ("medium", 8): {"decode": 4.5},
    ("large", 8): {"decode": 2},
}
GOAL_CONTEXT = 512
GOAL_LAYERS = 43
GOAL_COMPILE_SECONDS = 6.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, columns, rows of text, and a sentence or two below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> rich.table.Table:
        """For a terminal."""
        table = rich.table.Table(title=self.title, caption=self.note, box=rich.box.SIMPLE_HEAD)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """A section."""
        lines = [f"## {self.title}", "", _line(self.columns)]
        lines.append(_line(["---", *["---:"] * (len(self.columns) - 1)]))
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


def tables(results: Mapping) -> list[Table]:
    """All tables that have rows."""
    cells = results["cells"]
    of = {
        part: {name: cell for name, cell in cells.items() if cell["part"] == part}
        for part in ("model", "growth", "compile")
    }
    found = [
        _speed(of["model"]),
        _agreement(of["model"]),
        _growth(of["growth"]),
        _compile(of["compile"]),
        _goals(of["model"], of["compile"]),
        _conditions(results),
    ]
    return [table for table in found if table.rows]


def markdown(results: Mapping) -> str:
    """The whole report."""
    versions, machine = results["versions"], results["platform"]
    head = [
        "# Times of the model",
        "",
        f"{machine['cpus']} cores, {machine['system']}, backend {machine['backend']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "Every figure is a median over rounds; in a round all implementations run in turns (ours, "
        "HF, ours, HF, …), each from the same state. HF is `DeepseekV4ForCausalLM`, eager, "
        "float32, with a dynamic cache, as many threads as cores, and the fastest of the ways that "
        "were tried. Both have the same random weights.",
        "",
    ]
    return "\n".join(head) + "\n" + "\n".join(table.markdown() for table in tables(results))


def _layouts(cells: Mapping[str, Mapping]) -> Iterator[tuple[Mapping, str]]:
    for cell in cells.values():
        for layout in cell["arms"]:
            if layout != "hf":
                yield cell, layout


def _where(cell: Mapping, layout: str) -> list[str]:
    size = f"{cell['size']} {cell['parameters'] / 1e6:.2f}M"
    return [size, str(cell["batch"]), f"{cell['context']:,}", layout]


def _speed(cells: Mapping[str, Mapping]) -> Table:
    rows = []
    for cell, layout in _layouts(cells):
        ours, theirs = cell["arms"][layout], cell["arms"].get("hf", {})
        over = cell.get("over_hf", {}).get(layout, {})
        row = _where(cell, layout)
        for what, beside in (("decode", "decode"), ("scanned", ""), ("prefill", "prefill")):
            row.append(number(ours[f"{what}_ms"]))
            if beside:
                row.append(number(theirs.get(f"{beside}_ms")))
            row.append(times(over.get(what)))
        rows.append([*row, _others(cell)])
    return Table(
        "Decode and prefill, ms",
        (
            *("size", "batch", "context", "layout"),
            *(
                "decode",
                "HF",
                "HF/ours",
                "scanned",
                "HF/ours",
                "prefill",
                "HF",
                "HF/ours",
                "others",
            ),
        ),
        rows,
        "decode: a step with the token chosen on the host; scanned: a step inside decode_many, "
        "against HF's decode; prefill: the whole context; others: cores used by other "
        f"processes. Above {BUSY} a ratio says little: HF's threads wait for each other.",
    )


def _agreement(cells: Mapping[str, Mapping]) -> Table:
    rows = []
    for cell, layout in _layouts(cells):
        if "difference" in cell:
            found, hf = cell["difference"][layout], cell["hf"]
            way = hf["prefill"]
            rows.append(
                [
                    *_where(cell, layout),
                    f"{found['prefill']:.1e}",
                    f"{found['decode']:.1e}",
                    number(cell["logit_size"]),
                    f"{100 * found['same_tokens']:.0f} %",
                    "yes" if cell["scan_agrees"] else "NO",
                    f"{hf['self_difference']:.1e}",
                    f"{way['experts']}, {way['call_tokens'] or 'one call'}; "
                    f"{hf['decode']['experts']}",
                ]
            )
    return Table(
        "The outputs agree",
        (
            *("size", "batch", "context", "layout", "prefill", "decode", "of", "same tokens"),
            *("scan = steps", "HF itself", "HF ran as"),
        ),
        rows,
        "Largest difference of logits from HF's: at the last token of the prefill, and over the "
        "first greedy steps, of logits as large as stated. HF itself: between its own ways to "
        "prefill; where index scores nearly tie, both exceed rounding.",
    )


def _growth(cells: Mapping[str, Mapping]) -> Table:
    rows = []
    for cell in cells.values():
        for point in cell["points"]:
            rows.append(
                [
                    cell["kind"],
                    f"{point['context']:,}",
                    f"{point['capacity']:,}",
                    number(point["decode_ms"]),
                    number(point["scanned_ms"]),
                    times(point["growth"]),
                ]
            )
    return Table(
        "Decode by context, ms of a step per layer",
        ("layers", "context", "capacity", "decode", "scanned", "growth"),
        rows,
        "Models whose layers are all alike; embedding, head and a small MLP are in the figure. "
        "Caches are filled with random rows, since only the time matters. A capacity beyond the "
        "context shows what padding costs.",
    )


def _compile(cells: Mapping[str, Mapping]) -> Table:
    seconds = ("trace", "lower", "compile", "total", "processor")
    rows = [
        [
            f"{cell['program']}, {cell['layers']} layers",
            cell["layout"],
            *(
                number(cell[f"{name}_s"])
                for name in ("trace", "lower", "compile", "total", "processor")
            ),
        ]
        for cell in cells.values()
    ]
    return Table(
        "Compilation, seconds",
        ("program", "layout", *seconds),
        rows,
        "In fresh processes, without a compilation cache; processor: seconds of all cores.",
    )


def _goals(model: Mapping[str, Mapping], compiled: Mapping[str, Mapping]) -> Table:
    rows = []
    for cell, layout in _layouts(model):
        goals = GOALS.get((cell["size"], cell["batch"]), {})
        if cell["context"] == GOAL_CONTEXT and "over_hf" in cell:
            for what, goal in goals.items():
                ratio = cell["over_hf"][layout][what]
                name = f"{cell['size']}, batch {cell['batch']}: {what}, HF/ours"
                rows.append([name, layout, f"≥ {goal:g}", number(ratio), _met(ratio >= goal)])
    for cell in compiled.values():
        wanted = (cell["program"], cell["layout"]) == ("decode_step", "stacked")
        if wanted and cell["layers"] == GOAL_LAYERS:
            seconds = cell["total_s"]
            name = f"compile a step of {cell['layers']} layers, s"
            goal = f"< {GOAL_COMPILE_SECONDS:g}"
            met = _met(seconds < GOAL_COMPILE_SECONDS)
            rows.append([name, "stacked", goal, number(seconds), met])
    return Table(
        f"Goals, context {GOAL_CONTEXT}", ("goal", "layout", "wanted", "measured", "met"), rows
    )


def _conditions(results: Mapping) -> Table:
    rows = []
    for name, cell in results["cells"].items():
        changed = [k for k, v in cell["versions"].items() if results["versions"].get(k, v) != v]
        rows.append(
            [
                name,
                number(cell["seconds"]),
                str(len(next(iter(cell["samples"].values())))),
                _others(cell),
                cell["commit"][:9],
                ", ".join(f"{k} {cell['versions'][k]}" for k in changed),
            ]
        )
    return Table(
        "Conditions",
        ("cell", "seconds", "rounds", "others", "commit", "other versions"),
        rows,
        "others: cores that other processes kept busy; where it says BUSY, measure again.",
    )


def number(value: float | None) -> str:
    """Three digits, without an exponent; "–" for None."""
    if value is None:
        return "–"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def times(value: float | None) -> str:
    """A ratio."""
    return "–" if value is None else f"{number(value)}x"


def _others(cell: Mapping) -> str:
    """Cores that other processes used."""
    other = cell["other_cores"]
    if other is None:
        return "unknown"
    return f"{other:.2f}{' BUSY' if other > BUSY else ''}"


def _met(met: bool) -> str:
    return "yes" if met else "no"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
