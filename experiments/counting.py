"""Bytes of cache pytrees and operations of a decode step, by shapes: nothing is allocated."""

import dataclasses
import math

import jax

from hetero_kv import state
from hetero_kv.attention.grouped_heads import GroupedHeads
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.mla import Mla
from hetero_kv.contract import CacheSpec, History, Window
from hetero_kv.params import ParamSpec, ParamTree
from models.decoder import Decoder
from models.layers import Layer
from models.mlp import MoE


def cache_bytes(spec: CacheSpec, length: int) -> dict[str, int]:
    """Bytes by component of the cache pytree of one sequence that holds `length` tokens.

    Summed over the arrays of `state.abstract`, which are those of `state.init`; "lengths" are the
    pytree's own counters.
    """
    cache = state.abstract(spec, 1, length)
    found: dict[str, int] = {"lengths": _nbytes(cache.length) + _nbytes(cache.grid_length)}
    for slot in spec.slots():
        name = slot.leaf.component
        found[name] = found.get(name, 0) + _nbytes(cache.leaf(slot))
    return found


def _nbytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def window_bytes_per_token(spec: CacheSpec) -> int:
    """Bytes a token if the window rows of every token were kept, evidence aside."""
    return sum(
        x.repeats * x.leaf.row_bytes for x in spec.slots() if isinstance(x.leaf.contract, Window)
    )


@dataclasses.dataclass(frozen=True)
class Convention:
    """How operations are counted: a multiplication and an addition are two.

    Counted are products with weights (of experts those that a token picks; no lookups), index
    scores and attention over the rows that are visible and picked. Norms, gates, softmax and top-k
    are not. indexer: weight of index scores, since FP4 products cost less than others.
    """

    name: str
    indexer: float = 1.0


PLAIN = Convention("all products alike")
HALF_INDEXER = Convention("index scores count half", indexer=0.5)


def decode_flops(model: Decoder, length: int, convention: Convention = PLAIN) -> dict[str, float]:
    """Operations of the decode step whose token makes it `length` tokens, by part.

    Raises:
        ValueError: nothing is known of the row operations of a mechanism of the model.
    """
    stack = model.stack
    found = {"weights": 2.0 * stack.vocab * stack.d_model, "index": 0.0, "attention": 0.0}
    hyper = stack.groups[0].layers[0].hyper
    found["weights"] += 2 * _products(hyper.head_params()) if hyper else 0
    for group in stack.groups:
        for layer in group.layers:
            found["weights"] += group.repeats * 2 * _used_weights(layer)
            index, attention = _rows(layer.attention, length)
            found["index"] += group.repeats * convention.indexer * index
            found["attention"] += group.repeats * attention
    return found


def _products(tree: ParamTree) -> float:
    """Elements of the float weights of two axes and more, biases aside."""
    total = 0.0
    for name, x in tree.items():
        if not isinstance(x, ParamSpec):
            total += _products(x)
        elif len(x.shape) > 1 and x.dtype != "int32" and "bias" not in name:
            total += math.prod(x.shape)
    return total


def _used_weights(layer: Layer) -> float:
    """Elements of the weights that a token is multiplied with."""
    tree, mlp = dict(layer.params()), layer.mlp
    if not isinstance(mlp, MoE):
        return _products(tree)
    own = dict(tree.pop("mlp"))
    picked = _products({name: own.pop(name) for name in ("gate_up", "down")})
    return _products(tree) + _products(own) + picked * mlp.picks / mlp.experts


def _rows(mechanism: object, length: int) -> tuple[float, float]:
    """Operations on cached rows: index scores, and attention."""
    index = attention = 0.0
    each, indexer = _per_row(mechanism), getattr(mechanism, "indexer", None)
    for name, leaf in mechanism.spec().leaves:
        contract = leaf.contract
        if isinstance(contract, Window):
            attention += each * min(length, contract.width)
        elif isinstance(contract, History) and name == "index_keys":
            width = leaf.packing.width if leaf.packing else math.prod(leaf.width)
            index += 2 * indexer.heads * width * contract.count(length)
        elif isinstance(contract, History):
            rows = contract.count(length)
            attention += each * (min(rows, indexer.topk) if indexer else rows)
    return index, attention


def _per_row(mechanism: object) -> float:
    """Operations of attention for a row: scores and weighted sum, every head."""
    if isinstance(mechanism, Mla):  # absorbed: a row is key and value of all heads
        return 4.0 * mechanism.heads * (mechanism.latent + mechanism.rope.dim)
    heads = getattr(mechanism, "heads", None)
    if isinstance(heads, LatentHeads | GroupedHeads):
        return 4.0 * heads.heads * heads.dim
    raise ValueError(f"operations of {type(mechanism).__name__} are not known; add them here")
