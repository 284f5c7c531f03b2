"""A layer's weights as inference reads them fastest, and back to what the layer computes with.

What a step costs beside its products is, first of all, how many arrays it is given, and in how
deep a tree: a layer has a dozen small ones, so they become one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.linear import (
    FEW,
    Blocks,
    Part,
    Turned,
    can_block,
    can_join,
    laid,
    whole_blocks,
    width,
)
from hetero_kv.params import Params, ParamSpec, ParamTree

SMALL = "small"
JOINED = "joined"
ODD = ", odd"  # after what joined weights read, where their columns make no blocks
MOST = 4096  # numbers of a weight that is copied out of `small` at every call


class Structure:
    """That of a tree, compared in no time with itself."""

    def __init__(self, treedef: jax.tree_util.PyTreeDef):
        self.treedef = treedef
        self._hash = hash(treedef)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.treedef == other.treedef

    def __hash__(self) -> int:
        return self._hash


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("structure",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A tree of weights as its arrays alone: a call that is given it has no tree to walk."""

    arrays: tuple[jax.Array, ...]
    structure: Structure

    @classmethod
    def of(cls, params: Params) -> "Flat":
        """From the tree."""
        arrays, treedef = jax.tree.flatten(params)
        return cls(tuple(arrays), Structure(treedef))

    @property
    def tree(self) -> Params:
        """The tree."""
        return jax.tree.unflatten(self.structure.treedef, self.arrays)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("few", "many"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A model's weights for calls of `linear.FEW` rows or fewer, and for all others."""

    few: Params
    many: Params

    def read(self, rows: int) -> Flat:
        """Those for a call of so many rows."""
        return self._few if rows <= FEW else self._many

    @functools.cached_property
    def _few(self) -> Flat:
        return Flat.of(self.few)

    @functools.cached_property
    def _many(self) -> Flat:
        return Flat.of(self.many)


def prepare(tree: ParamTree, params: Params) -> Params:
    """Weights `params` of one layer, declared by `tree`; each has a leading axis more.

    All small ones of float32 become one array `small`, in the order of the tree; the rest is
    shared.
    """
    if SMALL in params:
        return params
    left, small = _parted(tree, params, _is_small)
    if not small:
        return params
    rows = [x.reshape(x.shape[0], -1) for _, x in small]
    return {**left, SMALL: jnp.concatenate(rows, axis=-1)}


def laid_out(tree: ParamTree, params: Params) -> Params:
    """Weights declared by `tree`, those of products as `linear.laid` lays them."""
    new = dict(params)
    for name, spec in tree.items():
        if name not in params:
            continue
        if not isinstance(spec, ParamSpec):
            new[name] = laid_out(spec, params[name])
        elif isinstance(params[name], tuple):  # of experts
            new[name] = tuple(map(laid, params[name])) if spec.product else params[name]
        elif spec.product:
            new[name] = laid(params[name])
    return new


def few(tree: ParamTree, params: Params) -> Params:
    """Prepared weights of one layer for few rows: each as `linear.laid` lays it.

    Of its attention's, those that read the same become one of `joined`.
    """
    attn, joined = _joined(tree["attn"], params["attn"])
    new = laid_out(tree, {**params, "attn": attn})
    return {**new, "attn": {**new["attn"], JOINED: joined}} if joined else new


def _joined(tree: ParamTree, params: Params) -> tuple[Params, dict[str, Any]]:
    """The weights that stay apart, and the others by what they read, in the order of the tree."""
    read: dict[str, list[jax.Array]] = {}
    for spec, x in _parted(tree, params, _can_join)[1]:
        read.setdefault(_read(spec), []).append(x)
    joined = {}
    for name, each in read.items():
        if can_block(each[0]):
            n = width(each[0].shape[-2], *(x.shape[-1] for x in each))
            columns = [Blocks.of(x, n).columns for x in each]
            joined[name] = Blocks(jnp.concatenate(columns, axis=-3))
        elif len(each) > 1:
            joined[name] = laid(jnp.concatenate(each, axis=-1))

    left, _ = _parted(tree, params, lambda spec, x: _can_join(spec, x) and _read(spec) in joined)
    return left, joined


def _can_join(spec: ParamSpec, x: Any) -> bool:
    return bool(spec.reads) and can_join(x)


def _read(spec: ParamSpec) -> str:
    """What a weight has in common with those it is joined with."""
    return spec.reads if whole_blocks(spec.shape) else spec.reads + ODD


def declared(tree: ParamTree, params: Params) -> Params:
    """Shapes of one layer's weights in the places that `tree` has for them, prepared or not.

    A layer's weights have a leading axis more. What fits no place stays as it is.
    """
    whole, joined = params.get(SMALL), params.get("attn", {}).get(JOINED, {})
    held = {**joined, SMALL: whole} if whole is not None else dict(joined)
    left = {name: x.shape[-1] for name, x in held.items()}

    def taken(spec: ParamSpec) -> jax.ShapeDtypeStruct | None:
        kind, size = _held_in(spec, joined)
        if left.get(kind, 0) < size:
            return None
        left[kind] -= size
        lead = held[kind].shape[: -1 if kind == SMALL else -2]
        return jax.ShapeDtypeStruct((*lead, *spec.shape), held[kind].dtype)

    def fill(tree: ParamTree, part: Params) -> Params:
        new = {k: v for k, v in part.items() if k not in tree}
        for name, spec in tree.items():
            if not isinstance(spec, ParamSpec):
                new[name] = fill(spec, part.get(name, {}))
            elif (x := _shape(part[name]) if name in part else taken(spec)) is not None:
                new[name] = x
        return new

    new = fill(tree, params)
    if not any(left.values()):
        new.pop(SMALL, None)
        new.get("attn", {}).pop(JOINED, None)
    return new


def _shape(x: Any) -> Any:
    """Of a weight, however it is laid, or of experts' weights that are apart."""
    if isinstance(x, Blocks | Turned):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(x, tuple):
        one = _shape(x[0])
        return jax.ShapeDtypeStruct((one.shape[0], len(x), *one.shape[1:]), one.dtype)
    return x


def plain(tree: ParamTree, params: Params) -> Params:
    """The weights of a layer with all in their places, without the leading axis."""
    whole, joined = params.get(SMALL), params.get("attn", {}).get(JOINED, {})
    if whole is None and not joined:
        return params
    start = dict.fromkeys((SMALL, *joined), 0)

    def taken(spec: ParamSpec) -> jax.Array | Part:
        kind, size = _held_in(spec, joined)
        first = start[kind]
        start[kind] += size
        if kind == SMALL:
            return whole[first : first + size].reshape(spec.shape)
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


def _held_in(spec: ParamSpec, joined: Params) -> tuple[str, int]:
    """Which array holds a weight that is not in its place, and how much of its last axis."""
    if spec.reads and _read(spec) in joined:
        return _read(spec), spec.shape[-1]
    return SMALL, math.prod(spec.shape)


def _is_small(spec: ParamSpec, x: Any) -> bool:
    array = isinstance(x, jax.Array | np.ndarray)
    return array and x.dtype == jnp.float32 and not spec.product and math.prod(spec.shape) <= MOST


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
