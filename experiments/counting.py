"""Bytes of cache pytrees, and operations of a decode step or a prompt, by shapes alone."""

import dataclasses
import math

import jax
import numpy as np

from experiments import counting_rows
from hetero_kv import state
from hetero_kv.contract import CacheSpec, Window
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
    scores, attention over the rows that are visible and picked, and what recurrent layers do to
    their state. Norms, gates, softmax and top-k are not. indexer: weight of index scores, since FP4
    products cost less than others.
    """

    name: str
    indexer: float = 1.0


PLAIN = Convention("all products alike")
HALF_INDEXER = Convention("index scores count half", indexer=0.5)


def decode_flops(model: Decoder, length: int, convention: Convention = PLAIN) -> dict[str, float]:
    """Operations of the decode step whose token makes it `length` tokens, by part.

    Parts: "weights", "index", "attention", "state" (see `counting_rows.Rows`).

    Raises:
        ValueError: nothing is known of the row operations of a mechanism of the model.
    """
    found = _parts(model, np.asarray(length, np.int64), convention)
    return {name: float(x) for name, x in found.items()}


def prefill_flops(
    model: Decoder, start: int, stop: int, convention: Convention = PLAIN
) -> dict[str, float]:
    """Operations of running the tokens [start, stop) of a prompt, by part.

    Those of as many decode steps, but that the head gives logits of the last token alone.

    Raises:
        ValueError: there is no such range, or nothing is known of a mechanism.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"need 0 <= start <= stop, got {start=}, {stop=}")
    count = stop - start
    lengths = np.arange(start + 1, stop + 1, dtype=np.int64)
    found = _parts(model, lengths, convention)
    total = {name: float(np.sum(np.broadcast_to(x, count))) for name, x in found.items()}
    total["weights"] -= max(0, count - 1) * _head(model)
    return total


def _parts(
    model: Decoder, length: np.ndarray, convention: Convention
) -> dict[str, float | np.ndarray]:
    """By part, for each of i64[...] lengths."""
    found = {"weights": _head(model), "index": 0.0, "attention": 0.0, "state": 0.0}
    for group in model.stack.groups:
        for layer in group.layers:
            of = counting_rows.rows(layer.attention, length, layer.d_model)
            found["weights"] += group.repeats * 2 * _used_weights(layer)
            found["index"] += group.repeats * convention.indexer * of.index
            found["attention"] += group.repeats * of.attention
            found["state"] += group.repeats * of.state
    return found


def _head(model: Decoder) -> float:
    """Operations from the last layer's output to logits."""
    stack, hyper = model.stack, model.stack.groups[0].layers[0].hyper
    mixing = 2 * counting_rows.products(hyper.head_params()) if hyper else 0
    return 2.0 * stack.vocab * stack.d_model + mixing


def _used_weights(layer: Layer) -> float:
    """Elements of the weights that a token is multiplied with."""
    tree, mlp = dict(layer.params()), layer.mlp
    tree.pop("attn")
    attention = counting_rows.weights(layer.attention)
    if not isinstance(mlp, MoE):
        return attention + counting_rows.products(tree)
    own = dict(tree.pop("mlp"))
    picked = counting_rows.products({name: own.pop(name) for name in ("gate_up", "down")})
    rest = counting_rows.products(tree) + counting_rows.products(own)
    return attention + rest + picked * mlp.picks / mlp.experts
