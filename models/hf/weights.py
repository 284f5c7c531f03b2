"""The weights of a model as the leaves of its parameters, and the parts of files that fill them."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from hetero_kv.params import Params
from models.hf.parts import Layout, Part


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf of the parameter tree and the tensors that fill it, layer by layer."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    choices: tuple[tuple[Layout, ...], ...]  # per layer: the ways in which files hold it


def get(params: Params, path: tuple[str, ...]) -> jax.Array:
    """The leaf at a path."""
    for key in path:
        params = params[key]
    return params


def put(params: Params, path: tuple[str, ...], value: object) -> None:
    """Adds a leaf."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def pieces(parts: Iterable[Part]) -> dict[int, Part]:
    """One part of every piece that lies beside the others on a leaf's last axis, by its begin."""
    found: dict[int, Part] = {}
    for part in parts:
        found.setdefault(part.place[1], part)
    return found


def lead(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    """Axes of layers and experts of a leaf that a part has one index of."""
    return shape[: len(part.place[0])]
