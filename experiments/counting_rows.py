"""Operations of a layer's attention for one token, by mechanism: what its weights alone do not say.

A new mechanism is counted here, or refused by name: a wrong figure looks like any other.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.grouped_heads import GroupedHeads
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.mla import Mla
from hetero_kv.attention.nsa import Nsa
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.contract import History, Window
from hetero_kv.params import ParamSpec, ParamTree

Count = float | np.ndarray


class Rows(NamedTuple):
    """Operations on what is cached, for tokens that make it i64[...] `length` tokens long.

    index: scores by which rows are picked. attention: scores and weighted sums over rows that are
    visible and picked. state: of a recurrent layer's matrix: its decay, what the token adds to it,
    and what is read of it.
    """

    index: Count
    attention: Count
    state: Count


def products(tree: ParamTree) -> float:
    """Elements of the float weights of two axes and more, biases aside."""
    total = 0.0
    for name, x in tree.items():
        if not isinstance(x, ParamSpec):
            total += products(x)
        elif len(x.shape) > 1 and x.dtype != "int32" and "bias" not in name:
            total += math.prod(x.shape)
    return total


def weights(mechanism: object) -> float:
    """Elements of a mechanism's weights that a token is multiplied with, on average.

    What NSA does once a block of `stride` tokens, and for each head alike, counts so often.
    """
    tree = dict(mechanism.params())
    if not isinstance(mechanism, Nsa):
        return products(tree)
    compressors = (tree.pop("compress_k"), tree.pop("compress_v"))
    once = sum(products({name: x[name] for name in ("up", "down")}) for x in compressors)
    return products(tree) + once * mechanism.kv_heads / mechanism.blocks.stride


def rows(mechanism: object, length: np.ndarray, d_model: int) -> Rows:
    """Operations on what a layer has cached.

    Raises:
        ValueError: nothing is known of the mechanism.
    """
    if isinstance(mechanism, Recurrent):
        return Rows(0.0, 0.0, _state(mechanism, d_model))
    if isinstance(mechanism, Nsa):
        return _nsa(mechanism, length)
    index = attention = np.zeros(np.shape(length))
    each, indexer = _per_row(mechanism), getattr(mechanism, "indexer", None)
    for name, leaf in mechanism.spec().leaves:
        contract = leaf.contract
        if isinstance(contract, Window):
            attention = attention + each * np.minimum(length, contract.width)
        elif isinstance(contract, History) and name == "index_keys":
            width = leaf.packing.width if leaf.packing else math.prod(leaf.width)
            each_key = 2 * indexer.heads * width
            index = index + each_key * contract.count(length)
        elif isinstance(contract, History):
            seen = contract.count(length)
            seen = np.minimum(seen, indexer.topk) if indexer else seen
            attention = attention + each * seen
    return Rows(index, attention, 0.0)


def _per_row(mechanism: object) -> float:
    """Operations of attention for a row: scores and weighted sum, every head."""
    if isinstance(mechanism, Mla):  # absorbed: a row is key and value of all heads
        return 4.0 * mechanism.heads * (mechanism.latent + mechanism.shared)
    heads = getattr(mechanism, "heads", None)
    if isinstance(heads, LatentHeads | GroupedHeads):
        return 4.0 * heads.heads * heads.dim
    raise ValueError(f"operations of {type(mechanism).__name__} are not known; add them here")


def _nsa(mechanism: Nsa, length: np.ndarray) -> Rows:
    """Scores over compressed blocks are needed twice: the shares that pick are known only at the
    end of the softmax, when they are not at hand any more."""
    each, blocks = 4.0 * mechanism.heads * mechanism.dim, mechanism.blocks
    compressed = mechanism.entries.contract.count(length)
    # A picked block is whole, but for the one that the token stands in.
    last = (length - 1) % blocks.select + 1
    picked = np.minimum(length, (blocks.top - 1) * blocks.select + last)
    near = np.minimum(length, mechanism.window.width)
    return Rows(each / 2 * compressed, each * (compressed + picked + near), 0.0)


@functools.cache
def _state(mechanism: Recurrent, d_model: int) -> float:
    """Decay, key by value and its sum, the read; a delta rule also reads what it replaces."""
    heads, keys, values = mechanism.form.state
    return (7.0 if _replaces(mechanism, d_model) else 5.0) * heads * keys * values


def _replaces(mechanism: Recurrent, d_model: int) -> bool:
    """Whether the layer's rule is the delta rule; its form says so by the operands it makes."""
    form, shape = mechanism.form, jax.ShapeDtypeStruct
    params = jax.tree.map(
        lambda x: shape(x.shape, jnp.float32),
        dict(mechanism.params()),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    x = shape((1, 1, d_model), jnp.float32)
    mixed = jax.eval_shape(form.raw, params, x)
    return jax.eval_shape(form.operands, params, x, mixed).beta is not None
