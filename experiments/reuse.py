"""The main job: the same requests with reuse off, by hash only, and validated.

    python -m experiments.reuse --config=configs/reuse.py [--train] [--config.workdir=…]

Writes to the work directory: config.json, run.json, results.json (a list of cells, one per scenario
and store size; fields in `reuse_metrics.summarise`), report.md, reuse.png. Finished cells are kept
and skipped when the same configuration is run again.
"""

import math
import pathlib
import sys

import jax
import rich.console

import models
from experiments import (
    checkpoint,
    cli,
    config_tools,
    progress,
    reuse_metrics,
    reuse_report,
    reuse_requests,
    run_record,
    training,
)
from experiments.reuse_arms import Arm, published_bytes
from experiments.reuse_config import ReuseConfig, Scenario
from experiments.train_config import TrainConfig
from hetero_kv.params import Params
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.selftest import shortest_resumable

Made = tuple[TrainConfig, models.Decoder]


def made_for(scenario: Scenario, config: ReuseConfig) -> Made:
    """How the scenario's model is or was trained, and the model; no weights are looked at.

    Raises:
        ValueError: there is no such checkpoint or recipe, or its requests cannot be drawn.
    """
    if config.train:
        recipe = config_tools.load(scenario.train_config)
        recipe.workdir = str(pathlib.Path(config.workdir) / "train" / scenario.name)
        recipe.check()
    else:
        try:
            recipe = checkpoint.load_config(scenario.checkpoint)
        except FileNotFoundError as error:
            raise ValueError(
                f"no checkpoint {scenario.checkpoint!r} for scenario {scenario.name!r} ({error}); "
                "give another with --config.<scenario>.checkpoint, or make it anew with --train"
            ) from error
    model = models.build(recipe.model.replace(chunk=scenario.chunk, block=scenario.chunk))
    granularity = model.cache_spec.granularity
    if scenario.document_tokens % granularity:
        raise ValueError(
            f"{scenario.name}: document_tokens={scenario.document_tokens} is not a multiple of the "
            f"granularity {granularity}, so the ends of documents could not be resumed"
        )
    reuse_requests.draw(scenario, recipe, config.seed)
    _check_store(scenario, model, config)
    return recipe, model


def _check_store(scenario: Scenario, model: models.Decoder, config: ReuseConfig) -> None:
    """Raises ValueError where the store of the validated mode could keep nothing to resume."""
    if "validated" not in config.modes:
        return
    spec, policy = model.cache_spec, Policy.named(config.policy)
    geometry = Geometry.of(spec)
    shortest = shortest_resumable(geometry, policy)
    if not shortest:
        raise ValueError(
            f"policy={config.policy!r}: under it nothing of {scenario.name!r} can be resumed; give "
            "one that takes checkpoints, as end"
        )
    all_bytes = published_bytes(model, scenario.documents, scenario.document_tokens)
    least = spec.blocks_in(shortest) * spec.block_bytes()
    if math.isinf(policy.replay_tokens(geometry)):
        least += spec.checkpoint_bytes()
    for share in config.capacities:
        if int(share * all_bytes) < max(1, least):
            raise ValueError(
                f"capacities={config.capacities}: {share:g} of the {all_bytes:,} bytes of "
                f"{scenario.name!r} cannot hold its shortest resumable prefix, {least:,} bytes"
            )


def trained_params(scenario: Scenario, recipe: TrainConfig, config: ReuseConfig) -> Params:
    """The weights: shipped, or trained anew into the work directory."""
    if config.train:
        return jax.device_put(training.run(recipe).params)
    return jax.device_put(checkpoint.load(scenario.checkpoint)[1])


def run_cell(
    scenario: Scenario, made: Made, params: Params, capacity: float, config: ReuseConfig
) -> dict:
    """One scenario under one store size: every mode serves every request, request by request."""
    recipe, model = made
    requests = reuse_requests.draw(scenario, recipe, config.seed)
    store_bytes = int(
        capacity * published_bytes(model, scenario.documents, scenario.document_tokens)
    )
    room = len(requests[0].prompt) + 1 + scenario.answer_tokens
    arms = {
        mode: Arm(model, params, mode, store_bytes, config.policy, room)
        for mode in dict.fromkeys(("off", *config.modes))
    }
    for arm in arms.values():  # compile outside the measured requests: a cold and a warm one
        for request in requests[:1] * 2:
            arm.serve(request, scenario.question_tokens, scenario.answer_tokens)
        if arm.store is not None:
            arm.store.clear()
    served: dict[str, list] = {mode: [] for mode in arms}
    title = f"{scenario.name} at {capacity:.0%}"
    with progress.Progress(len(requests), title=title) as bar:
        for i, request in enumerate(requests, 1):
            for mode, arm in arms.items():
                served[mode].append(
                    arm.serve(request, scenario.question_tokens, scenario.answer_tokens)
                )
            bar.update(i)
    counters = {mode: arm.close() for mode, arm in arms.items()}
    size = sum(x.size for x in jax.tree.leaves(params))
    return {
        "scenario": scenario.name,
        "capacity": capacity,
        "store_bytes": store_bytes,
        "requests": len(requests),
        "model": f"{'+'.join(model.config.layer_types)} {size / 1e3:.0f}k parameters",
        "granularity": model.cache_spec.granularity,
        "modes": {
            mode: reuse_metrics.summarise(rows, served["off"], requests)
            for mode, rows in served.items()
        },
        "store_metrics": counters,
    }


def run(config: ReuseConfig) -> list[dict]:
    """All cells; writes results as they come and the report at the end.

    Raises:
        ValueError: the configuration makes no sense; nothing has run then.
    """
    config.check()
    workdir = pathlib.Path(config.workdir)
    values = config_tools.to_dict(config)
    digest = run_record.digest(values)
    old = run_record.read_json(workdir / "results.json") or {}
    cells = old.get("cells", []) if old.get("config_digest") == digest else []
    done = {(cell["scenario"], cell["capacity"]) for cell in cells}
    todo = [
        (scenario, left, made_for(scenario, config))
        for scenario in config.chosen.values()
        if (left := [x for x in config.capacities if (scenario.name, x) not in done])
    ]
    run_record.write(workdir, values, seed=config.seed)
    for scenario, left, made in todo:
        params = trained_params(scenario, made[0], config)
        for capacity in left:
            cells.append(run_cell(scenario, made, params, capacity, config))
            run_record.write_results(workdir, {"config_digest": digest, "cells": cells})
    claims = reuse_report.claims(cells)
    (workdir / "report.md").write_text(reuse_report.markdown(cells, claims))
    reuse_report.figure(cells).savefig(workdir / "reuse.png", dpi=120)
    return cells


def main(config: ReuseConfig) -> None:
    """Runs and shows the tables."""
    cells = run(config)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 140)
    reuse_report.show(cells, console)
    for claim in reuse_report.claims(cells):
        console.print(f"- {claim}", highlight=False)
    console.print(f"\nreport: {pathlib.Path(config.workdir) / 'report.md'}")


if __name__ == "__main__":
    sys.argv = ["--config.train=true" if arg == "--train" else arg for arg in sys.argv]
    cli.run(main, default="configs/reuse.py")
