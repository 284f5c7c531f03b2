"""Weights that stay in their files' quantised layout, as leaves of the parameters.

They are dequantised where they are used, inside of the compiled call, one layer (of experts: one
expert) at a time. The weights are bit by bit those that dequantising on load would have given, and
on the CPU so are their products.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.forms import Form
from models.quantised.blocks import Blocks


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What the bytes of a packed weight are: part of the paths of its arrays, so of its digest.

    form: from the files' order to ours. dtype: of the weight when dequantised. apart: so many of
    the first axes (layers, experts) have a tensor of their own in the files for every index.
    """

    blocks: Blocks
    form: Form
    dtype: str
    apart: int = 1


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A weight in one or more pieces, side by side on its last axis.

    codes: u8[*lead, rows, columns (e2m1: / 2)] of each piece, in the files' order; scales: u8 or
    f32, see `Blocks`. `lead` are axes of layers and experts, which may be indexed or scanned away
    by `jax.tree.map`.
    """

    meaning: Meaning
    codes: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight in our order."""
        return self._abstract.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight when dequantised."""
        return jnp.dtype(self.meaning.dtype)

    @property
    def nbytes(self) -> int:
        """In memory, packed."""
        return sum(x.nbytes for x in (*self.codes, *self.scales))

    @property
    def _abstract(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(Packed.dequantise, self)

    def dequantise(self) -> jax.Array:
        """The weight in our order."""
        pieces = [
            self.meaning.form.ours(self.meaning.blocks.dequantise(codes, scales))
            for codes, scales in zip(self.codes, self.scales, strict=True)
        ]
        whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)
        return whole.astype(self.meaning.dtype)

    def tree_flatten_with_keys(self) -> tuple[list, tuple[Meaning, int]]:
        """The arrays, and what is static; every key says what its array means."""
        arrays = {"codes": self.codes, "scales": self.scales}
        keyed = [
            (jax.tree_util.GetAttrKey(f"{name}[{i}] of {self.meaning}"), x)
            for name, held in arrays.items()
            for i, x in enumerate(held)
        ]
        return keyed, (self.meaning, len(self.codes))

    @classmethod
    def tree_unflatten(cls, static: tuple[Meaning, int], arrays: Sequence[Any]) -> "Packed":
        """The inverse."""
        meaning, count = static
        return cls(meaning, tuple(arrays[:count]), tuple(arrays[count:]))


def is_packed(leaf: object) -> bool:
    """Whether a leaf is one of these."""
    return isinstance(leaf, Packed)


def any_packed(tree: object) -> bool:
    """Whether a tree of weights has one of these."""
    return any(is_packed(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_packed))


def logical(tree: Any) -> Any:
    """The tree with shapes and dtypes of the weights in place of packed leaves."""
    return jax.tree.map(
        lambda leaf: leaf._abstract if is_packed(leaf) else leaf, tree, is_leaf=is_packed
    )


def plain(tree: Any, x: jax.Array) -> Any:
    """The tree with its packed leaves dequantised, not before `x` is there, into arrays.

    Without that order a compiler is free to dequantise all layers first, or once before a loop over
    decode steps: both would hold the model in full. And what it fuses with a product it may sum in
    another order than a product with an argument of the call. A tree without packed leaves is
    returned as it is.
    """
    if not any_packed(tree):
        return tree
    never = x[(0,) * x.ndim].astype(jnp.float32) > jnp.inf

    def one(leaf: Any) -> Any:
        if not is_packed(leaf):
            return leaf
        return jax.lax.platform_dependent(never, leaf, cpu=_branched, default=_barred)

    return jax.tree.map(one, tree, is_leaf=is_packed)


def _branched(never: jax.Array, leaf: Packed) -> jax.Array:
    """XLA drops barriers on the CPU before it orders and fuses; nothing is fused with a branch."""
    whole = leaf._abstract
    return jax.lax.cond(never, lambda: jnp.zeros(whole.shape, whole.dtype), leaf.dequantise)


def _barred(never: jax.Array, leaf: Packed) -> jax.Array:
    """Elsewhere a branch may wait for the host, so what is read depends on a bit never set."""

    def late(held: jax.Array) -> jax.Array:
        if held.dtype == jnp.uint8:
            return held ^ never.astype(jnp.uint8)
        bits = jax.lax.bitcast_convert_type(held, jnp.uint32) ^ never.astype(jnp.uint32)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    return jax.lax.optimization_barrier(jax.tree.map(late, leaf).dequantise())
