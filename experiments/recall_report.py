"""What `recall` shows: claims with verdicts, a table and a figure for each row."""

from collections.abc import Mapping

from experiments import recall_claims, recall_figures
from experiments.bench.report import Table
from experiments.exhibit import Exhibit
from experiments.trained_report import Arms, table

TITLES = {
    "B1": "B1: recall of kinds of layers",
    "B2": "B2: several facts in an entry",
    "B3": "B3: entries picked at evaluation",
    "B4": "B4: warm-up of the indexer",
    "B5": "B5: facts across a border of groups",
    "B6": "B6: the window branch of the CSA layer",
    "B7": "B7: copying over a distance",
}


def exhibit(results: Mapping) -> Exhibit:
    """Claims, tables and figures of the rows that were run."""
    rows = {name: Arms(found) for name, found in results["rows"].items()}
    base = results["config"]["base"]
    task, model = base["task"], base["model"]
    intro = (
        f"Dense associative recall: {task['pairs']} facts of {task['stride']} tokens, a gap of "
        f"{task['gap']}, then queries up to token {task['length']}; d = {model['d_model']}, "
        f"{len(model['layer_types'])} layers, windows of {model['window']}, batches of "
        f"{task['batch_size']}, at most {base['steps']:,} steps, stopped at an accuracy of "
        f"{base['target_accuracy']:g}; {results['config']['seeds']} seeds. Chance: "
        f"1/{task['vocab'] // 2}, and 1/{task['pairs']} for a model that knows only which values "
        "were there. Published margins are directions, "
        "not the papers' own numbers."
    )
    return Exhibit(
        "Trained: recall",
        intro,
        recall_claims.claims(results, rows),
        [_TABLES.get(name, _trained)(name, arms) for name, arms in rows.items()],
        recall_figures.figures(results, rows),
    )


def _trained(name: str, arms: Arms) -> Table:
    columns = {
        "accuracy": lambda arm: arms.cell(arm, "eval_accuracy"),
        "steps": lambda arm: arms.cell(arm, "steps", digits=0),
        "steps to .95": lambda arm: _reached(arms, arm),
        "parameters": lambda arm: f"{arms.mean(arm, 'parameters'):,.0f}",
    }
    first = arms.example
    if "facts_per_entry" in first:
        columns["facts an entry"] = lambda arm: f"{arms.mean(arm, 'facts_per_entry'):.2f}"
    if "cache_bytes" in first:
        columns["cache bytes"] = lambda arm: f"{arms.mean(arm, 'cache_bytes'):,.0f}"
    note = (
        "Bytes: of the cache pytree of one sequence, whose pools hold whole tiles of rows. "
        "Steps to .95: the first evaluation there, of the seeds that came so far. An arm at chance "
        "cannot learn, or has not begun to; of a fixed state B1 claims something only where it has."
    )
    return table(TITLES[name], arms, columns, note)


def _reached(arms: Arms, arm: str) -> str:
    values = arms.values(arm, "steps_to_95")
    seeds = len(arms.found[arm])
    if not values:
        return f"none of {seeds}"
    return f"{arms.cell(arm, 'steps_to_95', digits=0)} ({len(values)} of {seeds})"


def _picked(name: str, arms: Arms) -> Table:
    """A line a k, not an arm."""
    (arm,) = arms.found
    counts = list(next(iter(arms.found[arm].values()))["picks"])
    rows = [
        [f"k = {k}",
         *(arms.cell(arm, "accuracy", way, k) for way in ("indexer", "oracle", "random")),
         *(arms.cell(arm, "picks", k, x) for x in ("recall", "mass", "oracle_mass", "found"))]
        for k in counts
    ]  # fmt: skip
    rows.append(["all", arms.cell(arm, "accuracy", "all"), *["–"] * 6])
    columns = ("picked", "indexer", "oracle", "random", "recall@k", "attention covered",
               "by the oracle", "fact among them")  # fmt: skip
    trained = arms.mean(arm, "trained_with")
    note = (
        f"Accuracy of one model, trained with k = {trained:.0f}, when k entries are picked at "
        "evaluation by its indexer, by the attention's own shares (oracle), or at random. "
        "recall@k: share of the oracle's k entries that the indexer picks."
    )
    return Table(TITLES[name], columns, rows, note)


def _warmed(name: str, arms: Arms) -> Table:
    columns = {
        "dense, before the switch": lambda arm: arms.cell(arm, "dense_accuracy"),
        "indexer's picks": lambda arm: arms.cell(arm, "accuracy"),
        "all entries": lambda arm: arms.cell(arm, "accuracy_all"),
        "random picks": lambda arm: arms.cell(arm, "accuracy_random"),
        "divergence": lambda arm: arms.cell(arm, "kl"),
    }
    note = "Accuracies after the last step, but for the first (a training batch). No early stop."
    return table(TITLES[name], arms, columns, note)


def _copied(name: str, arms: Arms) -> Table:
    first = arms.example
    columns = {
        f"d = {d}": lambda arm, d=d: arms.cell(arm, "accuracy", d, digits=2)
        for d in first["accuracy"]
    }
    return table(TITLES[name], arms, columns, "Accuracy by distance in tokens.")


_TABLES = {"B3": _picked, "B4": _warmed, "B7": _copied}
