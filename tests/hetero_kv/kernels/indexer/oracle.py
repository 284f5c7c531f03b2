"""The indexer from the equations, entry by entry in float64; and random cases.

`I_i = sum_h w_h * relu(q_h . k_i)`; the k highest, the lower index first among equals.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.pool import Paged
from hetero_kv.packing import Packed, Packing
from tests.hetero_kv.kernels import pools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and options of a random case; visible[r] entries of sequence r are seen."""

    visible: tuple[int, ...]
    k: int
    heads: int = 8
    dim: int = 16
    capacity: int = 256  # entries
    page: int = 8  # entries per page; 0: a contiguous pool
    shared: int = 0  # pages that all sequences share
    values: int = 0  # scores are exact, of integers up to this: many are equal. 0: normal
    dtype: str = "float32"
    packing: Packing | None = None  # of keys


@dataclasses.dataclass(frozen=True)
class Data:
    """What a case gives to the op, and the oracle's scores f64[N] of each sequence."""

    q: np.ndarray
    weights: np.ndarray
    keys: Paged | Packed | np.ndarray
    visible: np.ndarray
    layer: np.int32
    scores: list[np.ndarray]


def make(case: Case, seed: int = 0) -> Data:
    """Random data. Everything that nobody may read is NaN."""
    rng = np.random.default_rng(seed)
    batch, dtype = len(case.visible), np.dtype(jnp.dtype(case.dtype))

    def random(*shape: int) -> np.ndarray:
        if case.values:
            return rng.integers(-case.values, case.values + 1, shape).astype(np.float32)
        return rng.normal(size=shape).astype(np.float32)

    q = random(batch, case.heads, case.dim).astype(dtype)
    weights = random(batch, case.heads)
    rows = random(batch, case.capacity, case.dim).astype(dtype)
    for r in range(1, batch):
        rows[r, : case.shared * case.page] = rows[0, : case.shared * case.page]
    held, rows = pools.quantised(case.packing, rows)
    visible = np.array(case.visible, np.int32)
    if case.page:
        made = pools.paged(rng, held, visible, case.page, shared=case.shared)
        keys, layer = Paged(made.pages, made.table, made.table), made.layer
    else:
        keys, layer = pools.poison((2, *held.shape), held.dtype), np.int32(1)
        for r in range(batch):
            keys[layer, r, : visible[r]] = held[r, : visible[r]]
    scores = []
    for r in range(batch):
        dots = rows[r, : visible[r]].astype(np.float64) @ q[r].astype(np.float64).T
        scores.append(np.maximum(dots, 0) @ weights[r].astype(np.float64))
    return Data(q, weights, pools.packed(case.packing, keys), visible, layer, scores)


def pick(scores: np.ndarray, k: int) -> set[int]:
    """The k best; among equals the lower index."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return set(order[:k])


def compare(picked: np.ndarray, scores: np.ndarray, k: int, slack: float) -> None:
    """Asserts that i32[k] `picked` are the top k; a score within `slack` of the k-th may differ."""
    count = min(k, len(scores))
    real = picked[:count]
    assert (picked[count:] == -1).all()
    assert len(set(real.tolist())) == count
    assert (real >= 0).all() and (real < len(scores)).all()
    if not slack or count == len(scores):
        assert set(real.tolist()) == pick(scores, k)
        return
    bar = np.sort(scores)[-count]
    assert set(np.flatnonzero(scores > bar + slack)) <= set(real.tolist())
    assert (scores[real] >= bar - slack).all()
