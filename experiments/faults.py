"""The fault matrix: which check finds which fault, and what happens without it.

    python -m experiments.faults [--config.sample=all] [--config.model=random]

Writes to the work directory: config.json, run.json, results.json (a row per trial, and the summary
of `faults_report.summarise`), report.md, faults.png.
"""

import dataclasses
import pathlib
import sys
import tempfile

import jax
import numpy as np
import rich.console

import models
from experiments import (
    checkpoint,
    cli,
    config_tools,
    faults_report,
    progress,
    run_record,
    train_config,
)
from experiments.faults_config import ALL_OFF, ALL_ON, AND, COVERING, GUARD, RANDOM, FaultsConfig
from experiments.tasks import Recall
from hetero_kv.faults import kinds
from hetero_kv.faults.trial import Bench, Outcome
from hetero_kv.params import Params


def random_config(chunk: int) -> models.DecoderConfig:
    """A tiny model with every kind of leaf that a decoder has."""
    return models.DecoderConfig(
        vocab_size=61,
        d_model=24,
        layer_types=("csa", "swa"),
        mlp_types=("dense", "dense"),
        n_heads=4,
        head_dim=12,
        rope_dim=8,
        window=6,
        index_heads=8,
        index_dim=8,
        index_topk=3,
        d_ff=16,
        init_scale=1.0,
        chunk=chunk,
        block=chunk,
    )


def other_weights(params: Params, seed: int) -> Params:
    """Weights of another epoch: noise of a tenth of each leaf's own spread on top."""
    rng = np.random.default_rng([13, seed])

    def draw(leaf: jax.Array) -> jax.Array:
        value = np.asarray(leaf)
        if not np.issubdtype(value.dtype, np.floating):
            return leaf
        noise = rng.normal(size=value.shape) * (0.1 * value.std() + 1e-3)
        return jax.numpy.asarray(value + noise, value.dtype)

    return jax.tree.map(draw, params)


def benches(config: FaultsConfig) -> list[Bench]:
    """One per request; compiled functions are shared."""
    rng = np.random.default_rng([11, config.seed])
    if config.model == RANDOM:
        model, task = models.build(random_config(config.chunk)), None
        params = model.init(jax.random.key(config.seed))
    else:
        recipe, params = checkpoint.load(config.checkpoint)
        model = models.build(recipe.model.replace(chunk=config.chunk, block=config.chunk))
        params, task = jax.device_put(params), _recall(recipe, config)
    other, found = other_weights(params, config.seed), []
    for _ in range(config.requests):
        prompt, donor = (_prompt(task, model, config, rng) for _ in range(2))
        found.append(
            Bench(
                model,
                params,
                other,
                prompt,
                donor,
                config.document_tokens,
                config=model.config,
                rows=(found[0].rows, found[0].blind) if found else None,
            )
        )
    return found


def _recall(recipe: train_config.TrainConfig, config: FaultsConfig) -> Recall:
    """The task the model was trained on, with its pairs within the document."""
    if not isinstance(recipe.task, Recall):
        raise ValueError(f"{config.checkpoint} was not trained on recall but on {recipe.task}")
    slots = min(recipe.task.slots, config.document_tokens // recipe.task.stride)
    return dataclasses.replace(recipe.task, slots=slots)


def _prompt(
    task: Recall | None, model: models.Decoder, config: FaultsConfig, rng: np.random.Generator
) -> np.ndarray:
    size = config.document_tokens + config.question_tokens
    if task is None:
        return rng.integers(0, model.config.vocab_size, size).astype(np.int32)
    document = task.document(rng, config.document_tokens)
    questions, _ = task.questions(rng, document, config.question_tokens)
    return np.concatenate([document.tokens, questions]).astype(np.int32)


def columns_of(config: FaultsConfig) -> list[str]:
    """Columns of the matrix."""
    return [ALL_ON, *(f"no {x}" for x in config.checks), GUARD, ALL_OFF]


def switched_off(column: str, case: kinds.Case) -> tuple[str, ...]:
    """The checks that are off in a column."""
    if column == GUARD:
        return kinds.all_but(case.guard)
    if column in (ALL_ON, ALL_OFF):
        return () if column == ALL_ON else kinds.CHECKS
    return tuple(column.removeprefix("no ").split(AND))


def row_of(outcome: Outcome, column: str, request: int) -> dict:
    """One trial as plain values."""
    case = dataclasses.asdict(outcome.case)
    about = dataclasses.asdict(outcome)
    del about["case"], about["off"]
    told = {"bites": outcome.bites, "right_reason": outcome.right_reason}
    return {"column": column, "request": request, **case, **about, **told}


def run(config: FaultsConfig) -> dict:
    """All trials; writes results, report and figure."""
    config.check()
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, config_tools.to_dict(config), seed=config.seed)
    made = benches(config)
    todo = [x for x in made[0].cases(config.extents) if x.kind in config.kinds]
    if config.sample == COVERING:
        todo = kinds.covering(todo)
    columns, rows, some = columns_of(config), [], range(len(made))
    trials = [
        (column, case, request)
        for column in columns
        for i, case in enumerate(todo)
        for request in (some if column == ALL_OFF else (i % len(made),))
    ]
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress.Progress(len(trials), title=f"{len(todo)} faults") as bar,
    ):
        for i, (column, case, request) in enumerate(trials):
            place = pathlib.Path(scratch) / str(i)
            outcome = made[request].run(case, switched_off(column, case), place)
            rows.append(row_of(outcome, column, request))
            bar.update(i + 1)
    results = {
        "model": config.model,
        "granularity": made[0].spec.granularity,
        "outputs": made[0].outputs,
        "columns": columns,
        "summary": faults_report.summarise(rows),
        "trials": rows,
    }
    run_record.write_results(workdir, results)
    (workdir / "report.md").write_text(faults_report.markdown(results))
    faults_report.figure(results).savefig(workdir / "faults.png", dpi=120)
    return results


def main(config: FaultsConfig) -> None:
    """Runs and shows the tables."""
    results = run(config)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 180)
    faults_report.show(results, console)
    console.print(f"\nreport: {pathlib.Path(config.workdir) / 'report.md'}")


if __name__ == "__main__":
    cli.run(main, default="configs/faults.py")
