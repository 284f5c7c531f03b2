"""Training as a function: `run(config)` trains, resumes, evaluates, records.

Batches are a function of step and seed, the state is checkpointed whole, and metrics written after
the checkpoint that a run resumes from are dropped and written again. So a run that is killed at any
moment and started again ends with the same parameters and the same metrics files, bit for bit, as
one that was left alone.
"""

import dataclasses
import enum
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import optax

import models
from experiments import (
    checkpoint,
    metrics_writer,
    optimizer,
    progress,
    run_record,
    tasks,
    train_checkpoints,
    train_config,
    train_record,
)

Metrics = dict[str, jax.Array]  # name -> f32[]


class Model(Protocol):
    """What training needs of a model."""

    def init(self, key: jax.Array) -> dict:
        """Random parameters."""

    def forward(self, params: dict, tokens: jax.Array, *, aux: bool, select: str) -> tuple:
        """(logits f32[B, T, V], {"indexer_kl": f32[], ...})."""


class Phase(enum.Enum):
    """What the indexer does in a step; see `IndexerConfig`."""

    DENSE = "dense"
    FROZEN = "frozen"
    SPARSE = "sparse"

    @property
    def select(self) -> str:
        """The model's `select` argument."""
        return "topk" if self is Phase.SPARSE else "all"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "step", "key"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, eq=False)
class TrainState:
    """All that a step reads and writes."""

    params: dict
    opt_state: optax.OptState
    step: jax.Array  # i32[], steps done
    key: jax.Array  # for whatever draws random numbers; fold in the step


@dataclasses.dataclass(frozen=True, eq=False)
class TrainResult:
    """What `run` returns; `results` is also in `results.json`."""

    params: dict
    results: dict
    rows: list[dict[str, float]]  # the metrics


def phase_of(config: train_config.IndexerConfig, step: int) -> Phase:
    """The phase of the step with this number, from 0."""
    if step < config.dense_steps:
        return Phase.DENSE
    return Phase.FROZEN if step < config.dense_steps + config.frozen_steps else Phase.SPARSE


def init_state(config: train_config.TrainConfig, model: Model) -> TrainState:
    """The state before the first step."""
    key = jax.random.key(config.seed)
    if config.init_from:
        params = _exported(config, model)
    else:
        params = model.init(key)
    opt_state = optimizer.build(config).init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), key)


def _exported(config: train_config.TrainConfig, model: Model) -> dict:
    """The parameters of `init_from`; ValueError where there are none, or of another model."""
    try:
        _, params = checkpoint.load(config.init_from)
    except FileNotFoundError as error:
        raise ValueError(f"init_from={config.init_from!r}: no such export ({error})") from error
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    have, want = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (params, wanted)
    )
    if have != want:
        differ = sorted(name for name in {*have, *want} if have.get(name) != want.get(name))
        raise ValueError(
            f"init_from={config.init_from!r} holds weights of another model: {differ[0]} is "
            f"{have.get(differ[0])} there and {want.get(differ[0])} here, and {len(differ) - 1} "
            "more differ"
        )
    return params


def objective(
    model: Model, params: dict, batch: tasks.Batch, *, select: str, kl_weight: float
) -> tuple[jax.Array, Metrics]:
    """Cross-entropy over the asked positions, plus the indexer's divergence."""
    logits, aux = model.forward(params, batch["tokens"], aux=True, select=select)
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    right = jnp.argmax(logits, axis=-1) == batch["targets"]
    asked = batch["weights"].sum()
    metrics = {
        "loss": (loss * batch["weights"]).sum() / asked,
        "accuracy": (right * batch["weights"]).sum() / asked,
        "indexer_kl": jnp.asarray(aux["indexer_kl"], jnp.float32),
    }
    # Input and target of the divergence are detached, so it moves nothing but the indexer.
    return metrics["loss"] + kl_weight * metrics["indexer_kl"], metrics


def make_step(
    config: train_config.TrainConfig, model: Model
) -> Callable[[TrainState, tasks.Batch, Phase], tuple[TrainState, Metrics]]:
    """The jitted training step; it takes over the buffers of the state it is given."""
    transform = optimizer.build(config)

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    def step(state: TrainState, batch: tasks.Batch, phase: Phase) -> tuple[TrainState, Metrics]:
        def scalar_loss(floats: dict) -> tuple[jax.Array, Metrics]:
            return objective(
                model,
                _merge(floats, state.params),
                batch,
                select=phase.select,
                kl_weight=config.indexer.kl_weight,
            )

        floats = jax.tree.map(lambda p: p if _is_float(p) else None, state.params)
        grads, metrics = jax.grad(scalar_loss, has_aux=True)(floats)
        metrics["grad_norm"] = optax.tree.norm(grads)
        grads = _merge(grads, jax.tree.map(jnp.zeros_like, state.params))
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        if phase is Phase.FROZEN:
            opt_state, updates = optimizer.freeze_base(state.opt_state, opt_state, updates)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    return step


def _is_float(leaf: jax.Array) -> bool:
    """Whether a parameter has a gradient; tables of expert numbers have none."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _merge(floats: dict, others: dict) -> dict:
    """`floats`, and `others` wherever it has None."""
    return jax.tree.map(
        lambda f, other: other if f is None else f, floats, others, is_leaf=lambda x: x is None
    )


def make_evaluate(model: Model) -> Callable[[dict, Iterable[tasks.Batch]], dict[str, float]]:
    """Evaluation of parameters on batches, with top-k as in inference whatever the phase."""

    @jax.jit
    def one(params: dict, batch: tasks.Batch) -> tuple[Metrics, jax.Array]:
        _, metrics = objective(model, params, batch, select="topk", kl_weight=0.0)
        return metrics, batch["weights"].sum()

    def evaluate(params: dict, batches: Iterable[tasks.Batch]) -> dict[str, float]:
        """Means over the asked positions of all batches."""
        sums, asked = {}, 0.0
        for batch in batches:
            metrics, weight = one(params, batch)
            asked += float(weight)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value) * float(weight)
        return {name: value / asked for name, value in sums.items()}

    return evaluate


def run(config: train_config.TrainConfig, model: Model | None = None) -> TrainResult:
    """Trains, or goes on with the run that `config.workdir` holds.

    Args:
      model: Instead of the model that `config.model` describes.

    Raises:
      ValueError: The configuration is inconsistent, or the directory holds another run.
      FloatingPointError: The loss, or a weight, is no number any more.
    """
    config.check()
    workdir = pathlib.Path(config.workdir)
    train_record.begin(config)
    model = model or models.build(config.model)
    state = init_state(config, model)
    step_fn, evaluate = make_step(config, model), make_evaluate(model)
    with train_checkpoints.TrainCheckpoints(workdir / "checkpoints", keep=config.keep) as saved:
        data = {"position": 0, "seconds": 0.0, "stopped": ""}
        if (latest := saved.latest_step) is not None:
            state, data = saved.restore(latest, state)
        position = data["position"]
        clock = _Clock(data["seconds"])
        with (
            metrics_writer.MetricsWriter(
                workdir, resume_step=position, tensorboard=config.tensorboard
            ) as writer,
            progress.Progress(
                config.steps, start=position, title=tasks.name_of(config.task)
            ) as shown,
        ):
            while not data["stopped"]:
                phase = phase_of(config.indexer, position)
                state, metrics = step_fn(state, config.task.batch(position, config.seed), phase)
                position += 1
                last = position == config.steps
                row = {}
                # A row holds one step, no mean since the row before: a mean would need to survive
                # a kill as well.
                if position % config.log_every == 0 or last:
                    row = {name: float(value) for name, value in metrics.items()}
                if position % config.eval_every == 0 or last:
                    scores = evaluate(state.params, config.task.evaluate())
                    row |= {f"eval_{name}": value for name, value in scores.items()}
                    if 0 < config.target_accuracy <= scores["accuracy"]:
                        data["stopped"] = "target"
                if last:
                    data["stopped"] = data["stopped"] or "steps"
                saves = bool(data["stopped"]) or position % config.checkpoint_every == 0
                _check_finite(row, state.params if saves else {}, position, config)
                if row:
                    writer.write(position, row)
                shown.update(position, {k: v for k, v in row.items() if k in _SHOWN} or None)
                if saves:
                    writer.flush()  # a checkpoint vouches for the rows before it
                    data |= {"position": position, "seconds": clock.seconds()}
                    saved.save(position, state, data)
    results = _results(config, state, data, writer.rows)
    run_record.write_results(workdir, results)
    if config.export:
        checkpoint.export(state.params, config, config.export, config.export_dtype)
    return TrainResult(state.params, results, writer.rows)


_SHOWN = ("loss", "accuracy", "eval_loss", "eval_accuracy", "indexer_kl")


def _check_finite(
    row: Mapping[str, float], params: dict, position: int, config: train_config.TrainConfig
) -> None:
    """Of what is written or saved now, so that no checkpoint holds what cannot go on."""
    wrong = [f"{name} {x}" for name, x in row.items() if "loss" in name and not math.isfinite(x)]
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params)):
        wrong.append("weights that are no numbers")
    if wrong:
        raise FloatingPointError(
            f"step {position}: {', '.join(wrong)}. Nothing of this step is saved; take another "
            "workdir with an optimizer.learning_rate below "
            f"{config.optimizer.learning_rate}, or run with JAX_DEBUG_NANS=true, which stops where "
            "the first one comes from"
        )


class _Clock:
    """Seconds of a run over all the processes that worked on it."""

    def __init__(self, before: float):
        self._before, self._began = before, time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began


def _results(
    config: train_config.TrainConfig,
    state: TrainState,
    data: dict,
    rows: list[dict[str, float]],
) -> dict:
    evaluated = [row for row in rows if "eval_accuracy" in row]
    last = evaluated[-1]
    learnt = [row["step"] for row in evaluated if row["eval_accuracy"] >= 0.95]
    return {
        "steps": data["position"],
        "stopped": data["stopped"],
        "eval_loss": last["eval_loss"],
        "eval_bits_per_token": last["eval_loss"] / float(jnp.log(2.0)),
        "eval_accuracy": last["eval_accuracy"],
        "chance": config.task.chance,
        "steps_to_95": learnt[0] if learnt else None,  # first evaluation at 0.95 or better
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "seconds": data["seconds"],  # compilation and evaluation included
        "seconds_per_step": data["seconds"] / data["position"],
    }
