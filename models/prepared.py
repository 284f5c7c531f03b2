"""A layer's weights as inference reads them fastest, and back to what the layer computes with.

What a step costs beside its products is, first of all, how many arrays it is given: a layer has a
dozen vectors, so they become one.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.linear import FEW, Blocks, can_block
from hetero_kv.params import Params, ParamSpec, ParamTree

VECTORS = "vectors"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A model's weights for calls of `linear.FEW` rows or fewer, and for all others."""

    few: Params
    many: Params

    def tree_flatten_with_keys(self) -> tuple[list, None]:
        """Both."""
        key = jax.tree_util.GetAttrKey
        return [(key("few"), self.few), (key("many"), self.many)], None

    @classmethod
    def tree_unflatten(cls, static: None, parts: Sequence[Any]) -> "Prepared":
        """The inverse."""
        return cls(*parts)


def for_rows(params: Params | Prepared, rows: int) -> Params:
    """The weights that a call of so many rows reads."""
    if not isinstance(params, Prepared):
        return params
    return params.few if rows <= FEW else params.many


def prepare(tree: ParamTree, params: Params) -> Params:
    """Weights `params` of one layer, declared by `tree`; each has a leading axis more.

    All float32 vectors become one array `vectors`, in the order of the tree. The rest is shared.
    """
    if VECTORS in params:
        return params
    vectors = [x for spec, x in _pairs(tree, params) if _is_vector(spec, x)]
    new = _others(tree, params)
    return {**new, VECTORS: jnp.concatenate(vectors, axis=-1)} if vectors else new


def blocked(tree: ParamTree, params: Params) -> Params:
    """Weights declared by `tree` with matrices of products as `linear.Blocks` where that helps."""
    new = dict(params)
    for name, spec in tree.items():
        if name not in params:
            continue
        if not isinstance(spec, ParamSpec):
            new[name] = blocked(spec, params[name])
        elif spec.product:
            new[name] = _blocks(spec, params[name])
    return new


def plain(tree: ParamTree, params: Params) -> Params:
    """The weights with their vectors in their places, without the leading axis."""
    if VECTORS not in params:
        return params
    whole, start = params[VECTORS], 0

    def fill(tree: ParamTree, held: Params) -> Params:
        nonlocal start
        new = dict(held)
        for name, spec in tree.items():
            if not isinstance(spec, ParamSpec):
                new[name] = fill(spec, held.get(name, {}))
            elif name not in held:
                (size,) = spec.shape
                new[name] = whole[start : start + size]
                start += size
        return new

    new = fill(tree, params)
    del new[VECTORS]
    return new


def _is_vector(spec: ParamSpec, x: Any) -> bool:
    array = isinstance(x, jax.Array | np.ndarray)
    return len(spec.shape) == 1 and array and x.dtype == jnp.float32


def _pairs(tree: ParamTree, params: Params) -> Iterator[tuple[ParamSpec, Any]]:
    for name, spec in tree.items():
        if isinstance(spec, ParamSpec):
            yield spec, params[name]
        else:
            yield from _pairs(spec, params[name])


def _others(tree: ParamTree, params: Params) -> Params:
    new = {}
    for name, spec in tree.items():
        if not isinstance(spec, ParamSpec):
            new[name] = _others(spec, params[name])
        elif not _is_vector(spec, params[name]):
            new[name] = params[name]
    return new


def _blocks(spec: ParamSpec, x: Any) -> Any:
    """A matrix, or each of a tuple of experts' matrices."""
    if isinstance(x, tuple):
        return tuple(Blocks.of(y) if can_block(y, spec.shape[1:]) else y for y in x)
    return Blocks.of(x) if can_block(x, spec.shape) else x
