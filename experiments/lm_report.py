"""What `lm` shows: claims with verdicts, a table and a figure for each row."""

from collections.abc import Callable, Mapping

from experiments import lm_claims, lm_figures
from experiments.bench.report import Table
from experiments.exhibit import Exhibit
from experiments.trained_report import Arms, spread, table

TITLES = {
    "B6": "B6: CSA on text, with its window branch and without",
    "C1": "C1: windows between full layers",
    "C2": "C2: learned sinks",
    "C3": "C3: full attention cut to a window at evaluation",
    "C4": "C4: sparse against full attention",
    "C5": "C5: CSA and HCA, alone and in turns",
    "C6": "C6: longer than in training",
    "C7": "C7: one needle against several",
}


def exhibit(results: Mapping) -> Exhibit:
    """Claims, tables and figures of the rows that were run."""
    rows = {name: Arms(found) for name, found in results["rows"].items()}
    config, xz = results["config"], results["xz"]
    base = config["base"]
    task, model = base["task"], base["model"]
    intro = (
        f"Byte models of Python's standard library: {len(model['layer_types'])} layers, d = "
        f"{model['d_model']}, {task['length']} bytes a sequence, batches of {task['batch_size']}, "
        f"{base['steps']:,} steps, windows of {model['window']}; {config['seeds']} seed(s). "
        f"Training text holds {task['needles']} needles of {task['digits']} digit(s) and "
        f"{task['questions']} questions a sequence, whose digits weigh 1 and other bytes "
        f"{task['text_weight']:g}{_short(task)}; bits a byte are of plain held-out files, needles "
        "are asked for one at a time, where blind guesses are right in 0.1 of the cases (and where "
        "it is enough to know a needle by its form: whether its name is looked at, C7 tells). "
        f"`xz -6` needs {xz['stream']:.2f} bits a byte for all held-out text as one stream (a "
        f"context of the whole split), and {xz['windows']:.2f} where every scored window of "
        f"{task['length']} bytes is compressed by itself (LZMA2 of preset 6 without headers, the "
        "context that a model here has, but nothing known from training text)."
    )
    tables = [_TABLES.get(name, _both)(name, arms) for name, arms in rows.items()]
    return Exhibit(
        "Trained: bytes of source text",
        intro,
        lm_claims.claims(results, rows),
        tables,
        lm_figures.figures(results, rows),
    )


def _short(task: Mapping) -> str:
    """What the first steps of a training are."""
    if not task["short_steps"]:
        return ""
    return f" (the first {task['short_steps']} steps are on {task['short_length']} bytes)"


def _stretches(arms: Arms, *path: str) -> dict[str, Callable[[str], str]]:
    """A column for every stretch of positions."""
    metrics = arms.example
    for name in path:
        metrics = metrics[name]
    return {f"bits {name}": lambda arm, name=name: arms.cell(arm, *path, name) for name in metrics}


def _both(name: str, arms: Arms) -> Table:
    columns = _stretches(arms, "bits")
    first = arms.example
    for length in first["needle"]:
        columns[f"needle {length}"] = lambda arm, n=length: _mean_depth(arms, arm, n)
    columns["cache bytes"] = lambda arm: f"{arms.mean(arm, 'cache_bytes'):,.0f}"
    note = "Bits a byte by position; digits of needles that are right, by bytes of the sequence."
    return table(TITLES[name], arms, columns, note)


def _mean_depth(arms: Arms, arm: str, length: str) -> str:
    return spread(lm_claims.needles(arms, arm, length), 2)


def _sinks(name: str, arms: Arms) -> Table:
    columns = _stretches(arms, "bits")
    for metric, title in (
        ("first", "on token 0, full"),
        ("sink_full", "on the sink, full"),
        ("sink_local", "on the sink, local"),
        ("largest", "largest activation"),
    ):
        columns[title] = lambda arm, m=metric: arms.cell(arm, "attention", m)
    return table(TITLES[name], arms, columns, "Attention: mean over heads and queries.")


def _streams(name: str, arms: Arms) -> Table:
    (arm,) = arms.found
    kinds = {"full": "full attention", "window": "window only", "first": "window and first tokens"}
    stretches = next(iter(arms.found[arm].values()))["bits"]["full"]
    rows = [
        [title, *(arms.cell(arm, "bits", kind, x) for x in stretches)]
        for kind, title in kinds.items()
    ]
    columns = ("evaluated with", *(f"bits {x}" for x in stretches))
    return Table(TITLES[name], columns, rows, "One model, trained with full attention.")


def _longer(name: str, arms: Arms) -> Table:
    columns = _stretches(arms, "bits")
    first = arms.example
    for length in first["needle"]:
        columns[f"needle {length}"] = lambda arm, n=length: _mean_depth(arms, arm, n)
    note = "Bits a byte by position; digits of needles that are right, a mean over depths."
    return table(TITLES[name], arms, columns, note)


def _keys(name: str, arms: Arms) -> Table:
    first = arms.example
    columns = {
        f"{count} needle(s)": lambda arm, n=count: arms.cell(arm, "needle", n, digits=2)
        for count in first["needle"]
    }
    blind = ", ".join(f"{lm_claims.blind_pick(int(n)):.2f} of {n}" for n in first["needle"])
    note = (
        "Digits that are right; needles lie anywhere. A model that copies a needle without a look "
        f"at its name is right in: {blind}."
    )
    return table(TITLES[name], arms, columns, note)


_TABLES = {"C2": _sinks, "C3": _streams, "C6": _longer, "C7": _keys}
