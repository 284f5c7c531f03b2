"""Final parameters as one safetensors file beside a JSON configuration: small enough to ship."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

import models
from experiments import train_config


def export(
    params: dict,
    config: train_config.TrainConfig,
    path: str | os.PathLike,
    dtype: str = "float32",
) -> int:
    """Writes `<path>.safetensors` and `<path>.json`.

    Args:
      dtype: What floating-point parameters are stored as; `load` gives them back in the model's
        own dtype, so half precision costs digits, not changes elsewhere.

    Returns:
      The bytes of both files.
    """
    if dtype not in train_config.EXPORT_DTYPES:
        raise ValueError(f"{dtype=} is not one of {train_config.EXPORT_DTYPES}")
    weights, settings = _paths(path)
    weights.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, leaf in _flatten(params).items():
        array = np.asarray(leaf)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        tensors[name] = np.ascontiguousarray(array.astype(jnp.dtype(dtype)) if floating else array)
    safetensors.save_file(tensors, weights)
    defaults = train_config.TrainConfig()
    # Where it was trained is a fact of that machine, not of the model.
    shipped = dataclasses.replace(config, workdir=defaults.workdir, export=defaults.export)
    settings.write_text(json.dumps(train_config.to_dict(shipped), indent=2) + "\n")
    return weights.stat().st_size + settings.stat().st_size


def load_config(path: str | os.PathLike) -> train_config.TrainConfig:
    """The configuration that `export` wrote.

    Raises:
      ValueError: The file is damaged or of another program.
    """
    _, settings = _paths(path)
    try:
        return train_config.from_dict(json.loads(settings.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{settings} is not what `export` writes: {error!r}") from None


def load(path: str | os.PathLike) -> tuple[train_config.TrainConfig, dict]:
    """Reads what `export` wrote: (config, params).

    Raises:
      ValueError: A file is damaged or of another program; or a tensor is missing, unknown or of
        another shape. The message names it.
    """
    weights, _ = _paths(path)
    config = load_config(path)
    try:
        tensors = safetensors.load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged: {error}; export or copy it again") from None
    expected = jax.eval_shape(models.build(config.model).init, jax.random.key(0))
    wanted = _flatten(expected)
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"{weights}: missing tensors {missing}")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{weights}: unknown tensors {extra}")
    for name, leaf in wanted.items():
        if tensors[name].shape != leaf.shape:
            raise ValueError(f"{weights}: {name} has {tensors[name].shape=}, not {leaf.shape=}")
    leaves = [jnp.asarray(tensors[name], leaf.dtype) for name, leaf in wanted.items()]
    return config, jax.tree.unflatten(jax.tree.structure(expected), leaves)


def _paths(path: str | os.PathLike) -> tuple[pathlib.Path, pathlib.Path]:
    stem = os.fspath(path).removesuffix(".safetensors")
    return pathlib.Path(stem + ".safetensors"), pathlib.Path(stem + ".json")


def _flatten(params: dict) -> dict[str, jax.Array]:
    """Leaves by dotted path, in the order of the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
