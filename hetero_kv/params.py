"""Parameters as declarations: shapes, initialisers and logical axes, built from a spec tree."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Union

import jax
import jax.numpy as jnp
import numpy as np

ParamTree = Mapping[str, Union["ParamSpec", "ParamTree"]]
Params = dict  # nested dict of jax.Array, the shape of a ParamTree

INITS = ("normal", "fan_in", "zeros", "ones", "slopes", "expert_table")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One weight. `x @ w` orientation: matrices are [in, out].

    init: "fan_in" = normal with std 1/sqrt(in), "normal" = normal with std `scale`, "zeros",
        "ones", "slopes" = see `slopes`, "expert_table" = per row a random choice of distinct
        integers below `scale`.
    axes: one logical name per axis, for sharding rules.
    product: only ever read by `linear.linear` or `linear.grouped`, so that it may lie as they like.
    reads: a name for what it is multiplied with: weights of a layer's attention that have the same
        name are multiplied with the same array, so that they may lie side by side. "": its own.
    """

    shape: tuple[int, ...]
    init: str = "fan_in"
    scale: float = 1.0
    dtype: str = ""  # "": the model's param_dtype
    axes: tuple[str | None, ...] = ()
    product: bool = False
    reads: str = ""

    def __post_init__(self):
        if self.init not in INITS:
            raise ValueError(f"unknown init {self.init!r}; use one of {INITS}")

    def make(self, key: jax.Array, dtype: str) -> jax.Array:
        """The initial value."""
        dtype = jnp.dtype(self.dtype or dtype)
        if self.init == "zeros":
            return jnp.zeros(self.shape, dtype)
        if self.init == "ones":
            return jnp.ones(self.shape, dtype)
        if self.init == "slopes":
            return jnp.asarray(slopes(*self.shape), dtype)
        if self.init == "expert_table":
            rows, picks = self.shape
            choose = jax.vmap(
                lambda k: jax.random.choice(k, int(self.scale), (picks,), replace=False)
            )
            return choose(jax.random.split(key, rows)).astype(dtype)
        std = self.scale
        if self.init == "fan_in":
            std = self.scale / math.sqrt(self.shape[-2] if len(self.shape) > 1 else self.shape[-1])
        return (std * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)


def matrix(*shape: int, reads: str = "") -> ParamSpec:
    """A weight [..., in, out] of products alone."""
    return ParamSpec(shape, product=True, reads=reads)


def slopes(heads: int) -> np.ndarray:
    """f64[heads], `2^(-8 (i + 1) / heads)` (ALiBi, arXiv 2108.12409)."""
    return 2.0 ** (-8.0 * (1 + np.arange(heads)) / heads)


def map_tree(
    fn: Callable[[str, ParamSpec], object], tree: ParamTree, prefix: str = ""
) -> dict[str, object]:
    """Applies `fn(path, spec)` to every spec; paths look like `attn/compressor/norm`."""
    return {
        name: fn(prefix + name, item)
        if isinstance(item, ParamSpec)
        else map_tree(fn, item, f"{prefix}{name}/")
        for name, item in tree.items()
    }


def init(tree: ParamTree, key: jax.Array, dtype: str) -> Params:
    """Initial values; each weight's key is folded in from its path, so order does not matter."""

    def make(path: str, spec: ParamSpec) -> jax.Array:
        return spec.make(jax.random.fold_in(key, zlib.crc32(path.encode())), dtype)

    return map_tree(make, tree)


def init_stacked(tree: ParamTree, key: jax.Array, dtype: str, repeats: int) -> Params:
    """As `init`, with a leading axis of `repeats` independent layers."""
    layers = [init(tree, jax.random.fold_in(key, i), dtype) for i in range(repeats)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def abstract(tree: ParamTree, dtype: str, repeats: int = 0) -> Params:
    """`jax.ShapeDtypeStruct` leaves; with `repeats` a leading layer axis."""
    lead = (repeats,) if repeats else ()
    return map_tree(
        lambda _, s: jax.ShapeDtypeStruct(lead + s.shape, jnp.dtype(s.dtype or dtype)), tree
    )


def difference(params: Params, wanted: Params) -> str:
    """Where names or shapes first differ from those wanted; "" if they agree."""
    have, want = _shapes(params), _shapes(wanted)
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            found, needed = (f"{x[name]}" if name in x else "nothing" for x in (have, want))
            return f"at {name} there is {found}, and the model has {needed}"
    return ""


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
