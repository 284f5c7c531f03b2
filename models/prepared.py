"""A layer's weights as inference reads them fastest, and back to what the layer computes with.

What a step costs beside its products is, first of all, how many arrays it is given: a layer has a
dozen vectors, so they become one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.linear import Blocks, Part, can_block
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


def prepare(tree: ParamTree, params: Params) -> Params:
    """Weights `params` of one layer, declared by `tree`; each has a leading axis more.

    All float32 vectors become one array `vectors`, in the order of the tree. The rest is shared.
    """
    if VECTORS in params:
        return params
    left, vectors = _parted(tree, params, _is_vector)
    if not vectors:
        return params
    return {**left, VECTORS: jnp.concatenate([x for _, x in vectors], axis=-1)}


def blocked(tree: ParamTree, params: Params) -> Params:
    """Weights declared by `tree` with matrices of products as `linear.Blocks` where that helps."""
    new = dict(params)
    for name, spec in tree.items():
        if name not in params:
            continue
        if not isinstance(spec, ParamSpec):
            new[name] = blocked(spec, params[name])
        elif spec.product:
            new[name] = _blocks(params[name])
    return new


def few(tree: ParamTree, params: Params) -> Params:
    """Prepared weights of one layer for few rows: in blocks where that helps.

    Of its attention's, blocks of weights that read the same become one array of `joined`.
    """
    params = blocked(tree, params)
    return {**params, "attn": _joined(tree["attn"], params["attn"])}


def _joined(tree: ParamTree, params: Params) -> Params:
    left, parts = _parted(tree, params, lambda spec, x: spec.reads and isinstance(x, Blocks))
    columns: dict[str, list[jax.Array]] = {}
    for spec, x in parts:
        columns.setdefault(spec.reads, []).append(x.columns)
    joined = {name: Blocks(jnp.concatenate(each, axis=-3)) for name, each in columns.items()}
    return {**left, JOINED: joined} if joined else params


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


def _parted(
    tree: ParamTree, params: Params, takes: Callable[[ParamSpec, Any], bool]
) -> tuple[Params, list[tuple[ParamSpec, Any]]]:
    """The weights that it does not take, and those that it takes in the order of the tree."""
    left, taken = {}, []
    for name, spec in tree.items():
        if name not in params:
            continue
        if not isinstance(spec, ParamSpec):
            left[name], more = _parted(spec, params[name], takes)
            taken += more
        elif takes(spec, params[name]):
            taken.append((spec, params[name]))
        else:
            left[name] = params[name]
    return left, taken


def _blocks(x: Any) -> Any:
    """A matrix, or each of a tuple of experts' matrices."""
    if isinstance(x, tuple):
        return tuple(map(_blocks, x))
    return Blocks.of(x) if can_block(x) else x
