"""Optimisers by configuration: one for the indexer's parameters, one for all others."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from experiments import train_config

BASE, INDEXER, CONSTANT = "base", "indexer", "constant"


def label_of(path: jax.tree_util.KeyPath, leaf: jax.Array) -> str:
    """The group of a parameter."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return CONSTANT  # tables of expert numbers are not trained
    return INDEXER if INDEXER in _names(path) else BASE


def labels(params: dict) -> dict:
    """The group of every parameter."""
    return jax.tree_util.tree_map_with_path(label_of, params)


def build(config: train_config.TrainConfig) -> optax.GradientTransformation:
    """The optimiser of a run.

    The indexer's group is clipped by itself: its gradient comes from another loss, and a shared
    norm would let the weight of that loss change how everything else learns.
    """
    options = config.optimizer
    kinds = {"adamw": _adamw, "muon": _muon}
    indexer_rate = config.indexer.learning_rate or options.learning_rate
    return optax.partition(
        {
            BASE: _clipped(options, kinds[options.name](options, schedule(config))),
            INDEXER: _clipped(options, _adamw(options, schedule(config, indexer_rate))),
            CONSTANT: optax.set_to_zero(),
        },
        labels,
    )


def schedule(
    config: train_config.TrainConfig, peak: float = 0.0
) -> Callable[[jax.Array], jax.Array]:
    """Learning rate by step; a `peak` of 0 is the optimiser's own."""
    options = config.optimizer
    peak = peak or options.learning_rate
    warmup = min(options.warmup_steps, config.steps - 1)
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup else peak, peak, warmup, config.steps, peak * options.final_scale
    )


def freeze_base(
    old: optax.OptState, new: optax.OptState, updates: dict
) -> tuple[optax.OptState, dict]:
    """Keeps only the indexer's share of an update: frozen parameters keep their moments too."""
    kept = {**new.inner_states, BASE: old.inner_states[BASE]}
    updates = jax.tree_util.tree_map_with_path(
        lambda path, u: u if label_of(path, u) == INDEXER else jnp.zeros_like(u), updates
    )
    return new._replace(inner_states=kept), updates


def _clipped(
    options: train_config.OptimizerConfig, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    if not options.clip_norm:
        return inner
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), inner)


def _adamw(options: train_config.OptimizerConfig, rate: Callable) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay)


def _muon(options: train_config.OptimizerConfig, rate: Callable) -> optax.GradientTransformation:
    return contrib.muon(
        rate,
        weight_decay=options.weight_decay,
        adam_b1=options.b1,
        adam_b2=options.b2,
        adam_weight_decay=options.weight_decay,
        # Updates of the size AdamW makes, so that both can share a learning rate.
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_matrices,
    )


def _matrices(params: dict) -> dict:
    """Muon orthogonalises the matrices inside layers, the last two axes of stacked weights."""

    def numbers(
        path: jax.tree_util.KeyPath, leaf: jax.Array
    ) -> contrib.MuonDimensionNumbers | None:
        names = _names(path)
        # Every weight of a layer has a leading axis of repeats, so a vector has two axes.
        if names[0] != "segments" or leaf.ndim < 3 or names[-1].endswith("bias"):
            return None
        return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(numbers, params)


def _names(path: jax.tree_util.KeyPath) -> list[str]:
    return [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
