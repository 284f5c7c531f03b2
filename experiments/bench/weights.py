"""Random weights that both implementations load, and caches that are filled without a prefill."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import models
from hetero_kv import contract
from hetero_kv.params import Params
from hetero_kv.state import Cache
from models import hf
from models.config import DecoderConfig

NOISE = 0.3  # standard deviation added to weights that start constant


def save_random(config: DecoderConfig, directory: str | pathlib.Path, seed: int) -> None:
    """Writes a Hugging Face directory with random weights.

    What starts as zeros or ones (norms, sinks, biases, position biases) is random too: otherwise
    equal outputs would say nothing about it.
    """
    model = models.build(config)
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(model.init(jax.random.key(seed)))
    for i, leaf in enumerate(leaves):
        value = np.asarray(leaf)
        if np.issubdtype(value.dtype, np.floating) and (value == value.flat[0]).all():
            leaves[i] = value + _normal(rng, value.shape, value.dtype, NOISE)
    hf.save_pretrained(model, structure.unflatten(leaves), directory)


def load(config: DecoderConfig, directory: str | pathlib.Path) -> tuple[models.Decoder, Params]:
    """Model and weights of a directory; what it does not say is taken from `config`."""
    return hf.from_pretrained(
        directory, chunk=config.chunk, block=config.block, scan_layers=config.scan_layers
    )


def parameter_count(config: DecoderConfig) -> int:
    """All weights of a model."""
    leaves = jax.tree.leaves(models.build(config).abstract_params())
    return sum(int(np.prod(leaf.shape)) for leaf in leaves)


def filled_cache(model: models.Decoder, batch: int, length: int, capacity: int, seed: int) -> Cache:
    """A cache whose rows stand at `length`, with random values and true evidence.

    It costs no prefill, and no tokens lead to it: for timing only.
    """
    spec, cache = model.cache_spec, model.init_cache(batch, capacity)
    rng, filled = np.random.default_rng(seed), {}
    for slot in spec.slots():
        shape, dtype = cache.leaf(slot).shape, cache.leaf(slot).dtype
        declared = slot.leaf.contract
        if isinstance(declared, contract.Evidence):
            of = dict(spec.segments[slot.segment].layers[slot.layer].leaves)[declared.of]
            if declared.kind == "positions":
                value = np.broadcast_to(of.ring_positions(length), shape)
            else:
                value = np.full(shape, int(of.contract.count(length)))
            filled[slot] = jnp.array(value, dtype)
        elif jnp.issubdtype(dtype, jnp.floating):
            filled[slot] = jnp.array(_normal(rng, shape, dtype))
    return cache.with_leaves(filled).replace(length=jnp.full(batch, length, jnp.int32))


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale: float = 1.0
) -> np.ndarray:
    return (scale * rng.standard_normal(shape, np.float32)).astype(dtype)
