"""A layer's weights as inference reads them fastest, and back to what the layer computes with.

What a step costs beside its products is, first of all, how many arrays it is given: a layer has a
dozen vectors, so they become one.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.linear import Blocks, can_block
from hetero_kv.params import Params, ParamSpec, ParamTree

VECTORS = "vectors"


def prepare(tree: ParamTree, params: Params, blocks: bool) -> Params:
    """Weights `params` of one layer, declared by `tree`; each has a leading axis more.

    All float32 vectors become one array `vectors`, in the order of the tree; with `blocks` matrices
    of products become `linear.Blocks` where that helps. The rest is shared with `params`.
    """
    if VECTORS in params:
        return params
    vectors = [x for spec, x in _pairs(tree, params) if _is_vector(spec, x)]
    new = _laid_out(tree, params, blocks)
    return {**new, VECTORS: jnp.concatenate(vectors, axis=-1)} if vectors else new


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


def _laid_out(tree: ParamTree, params: Params, blocks: bool) -> Params:
    new = {}
    for name, spec in tree.items():
        x = params[name]
        if not isinstance(spec, ParamSpec):
            new[name] = _laid_out(spec, x, blocks)
        elif not _is_vector(spec, x):
            new[name] = blocked(spec, x) if blocks and spec.product else x
    return new


def blocked(spec: ParamSpec, x: Any) -> Any:
    """A matrix, or each of a tuple of experts' matrices, in blocks where that helps."""
    if isinstance(x, tuple):
        return tuple(Blocks.of(y) if can_block(y, spec.shape[1:]) else y for y in x)
    return Blocks.of(x) if can_block(x, spec.shape) else x
