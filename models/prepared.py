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

from hetero_kv.linear import FEW, Blocks, Part, can_block
from hetero_kv.params import Params, ParamSpec, ParamTree

VECTORS = "vectors"
JOINED = "joined"


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


def few(tree: ParamTree, params: Params) -> Params:
    """Prepared weights of one layer for few rows: in blocks where that helps.

    Of its attention's, blocks of weights that read the same become one array of `joined`.
    """
    params = blocked(tree, params)
    return {**params, "attn": _joined(tree["attn"], params["attn"])}


def _joined(tree: ParamTree, params: Params) -> Params:
    names: dict[str, list[jax.Array]] = {}
    left = _unjoined(tree, params, names)
    joined = {x: Blocks(jnp.concatenate(each, axis=-3)) for x, each in names.items()}
    return {**left, JOINED: joined} if joined else params


def _unjoined(tree: ParamTree, params: Params, names: dict[str, list[jax.Array]]) -> Params:
    """What is left of the weights, after the blocks of others were added to `names`."""
    left = {}
    for name, spec in tree.items():
        x = params.get(name)
        if name not in params:
            continue
        if not isinstance(spec, ParamSpec):
            left[name] = _unjoined(spec, x, names)
        elif spec.reads and isinstance(x, Blocks):
            names.setdefault(spec.reads, []).append(x.columns)
        else:
            left[name] = x
    return left


def plain(tree: ParamTree, params: Params) -> Params:
    """The weights of a layer with all in their places, without the leading axis."""
    whole, joined = params.get(VECTORS), params.get("attn", {}).get(JOINED, {})
    if whole is None and not joined:
        return params
    start = dict.fromkeys((VECTORS, *joined), 0)

    def taken(spec: ParamSpec) -> jax.Array | Part:
        kind = spec.reads if spec.reads in joined else VECTORS
        first, size = start[kind], spec.shape[-1]
        if kind == VECTORS:
            start[kind] += size
            return whole[first : first + size]
        size //= joined[kind].columns.shape[-1]
        start[kind] += size
        return Part(joined[kind], first, size)

    def fill(tree: ParamTree, held: Params) -> Params:
        new = {}
        for name, spec in tree.items():
            if not isinstance(spec, ParamSpec):
                new[name] = fill(spec, held.get(name, {}))
            else:
                new[name] = held[name] if name in held else taken(spec)
        return new

    return fill(tree, params)


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
