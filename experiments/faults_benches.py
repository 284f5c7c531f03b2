"""The models and prompts that faults are tried on."""

import dataclasses

import jax
import numpy as np

import models
from experiments import checkpoint, train_config
from experiments.faults_config import RANDOM, FaultsConfig
from experiments.tasks import Recall
from hetero_kv.faults.paged import PagedBench
from hetero_kv.faults.trial import Bench
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


def other_weights(params: Params, seed: int, noise: float) -> Params:
    """Weights of another epoch or tenant: noise of `noise` times each leaf's own spread on top."""
    rng = np.random.default_rng([13, seed])

    def draw(leaf: jax.Array) -> jax.Array:
        value = np.asarray(leaf)
        if not np.issubdtype(value.dtype, np.floating):
            return leaf
        added = rng.normal(size=value.shape) * (noise * value.std() + 1e-3)
        return jax.numpy.asarray(value + added, value.dtype)

    return jax.tree.map(draw, params)


def benches(config: FaultsConfig) -> list[Bench]:
    """One per request; compiled functions are shared."""
    rng = np.random.default_rng([11, config.seed])
    if config.model == RANDOM:
        model, task = models.build(random_config(config.chunk)), None
        params = model.init(jax.random.key(config.seed))
    else:
        try:
            recipe, params = checkpoint.load(config.checkpoint)
        except FileNotFoundError as error:
            raise ValueError(
                f"no checkpoint {config.checkpoint!r} ({error}); give another with "
                "--config.checkpoint, or --config.model=random"
            ) from error
        model = models.build(recipe.model.replace(chunk=config.chunk, block=config.chunk))
        params, task = jax.device_put(params), _recall(recipe, config)
    other, found = other_weights(params, config.seed, config.weight_noise), []
    for i in range(config.requests):
        prompt, donor = (_prompt(task, model, config, rng, bool(i % 2)) for _ in range(2))
        found.append(
            (PagedBench if config.paged else Bench)(
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
    task: Recall | None,
    model: models.Decoder,
    config: FaultsConfig,
    rng: np.random.Generator,
    split: bool,
) -> np.ndarray:
    """i32[n]. A prompt of recall asks for pairs from everywhere in the document, the last first.

    split: the last pair's key is the last token that is resumed, and its value the first that is
    not: then the answer hangs on the tail. Otherwise the pair ends the document.
    """
    length, size = config.document_tokens, config.document_tokens + config.question_tokens
    if task is None:
        return rng.integers(0, model.config.vocab_size, size).astype(np.int32)
    facts = task.document(rng, length).facts
    keys, values = (np.fromiter(x, np.int32) for x in (facts, facts.values()))
    last = length - 1 if split else length - 2
    slots = np.arange(0, last - 1, task.stride)
    places = np.append(rng.choice(slots, len(keys) - 1, replace=False), last)
    low, high = (
        (task.vocab, task.vocab_size) if task.noise_symbols else (task.vocab // 2, task.vocab)
    )
    tokens = rng.integers(low, high, size).astype(np.int32)
    tokens[places], tokens[places + 1] = keys, values
    asked = np.append(keys[-1:], rng.permutation(keys[:-1]))
    tokens[last + 2 :] = np.resize(asked, size - last - 2)
    return tokens
