"""Top-k selection: exact, ties to the lower index, the same in prefill and decode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hetero_kv.attention import selection
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.indexer import Indexer
from hetero_kv.attention.rope import Rope
from hetero_kv.kernels.indexer import api

QUERIES, ENTRIES, TILE = 3, 24, 8


def top_k(scores: np.ndarray, visible: int, k: int) -> set[int]:
    """Indices of the k largest of the first `visible`; the lower index wins a tie (-0 ties 0)."""
    order = np.lexsort((np.arange(visible), -scores[:visible].astype(np.float64)))
    return set(order[:k].tolist())


@jax.jit
def select(scores: jax.Array, visible: jax.Array, k: jax.Array, tiles: jax.Array) -> jax.Array:
    index = jnp.arange(ENTRIES, dtype=jnp.int32)
    keys = selection.order_keys(scores, index < visible[..., None])
    low, cut = selection.thresholds(keys, k, tiles, TILE)
    return selection.chosen(keys, index, low, cut)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2e-38, -3e38, 3e38])


@given(
    scores=hnp.arrays(np.float32, (1, QUERIES, ENTRIES), elements=st.one_of(few, finite)),
    visible=hnp.arrays(np.int32, (1, QUERIES), elements=st.integers(0, ENTRIES)),
    k=st.integers(1, ENTRIES + 5),
)
def test_selection_equals_a_sort(scores: np.ndarray, visible: np.ndarray, k: int) -> None:
    tiles = -(-int(visible.max()) // TILE)  # what lies beyond is not looked at
    chosen = np.asarray(select(scores, visible, k, tiles))
    for query in range(QUERIES):
        want = top_k(scores[0, query], visible[0, query], k)
        assert set(np.flatnonzero(chosen[0, query])) == want


@given(pair=st.tuples(finite, finite))
def test_keys_keep_the_order(pair: tuple[float, float]) -> None:
    scores = jnp.array(pair, jnp.float32)
    a, b = np.asarray(selection.order_keys(scores, jnp.array([True, True])))
    assert a > selection.HIDDEN
    assert b > selection.HIDDEN
    assert (a < b, a == b) == (pair[0] < pair[1], pair[0] == pair[1])


# -- the indexer's two ways ------------------------------------------------------------------------

HEADS, DIM, K = 2, 2, 5
ROPE = Rope(0, 10.0)
INDEXER = Indexer(4, 4, HEADS, DIM, K, Compressor(4, DIM, 2, False, ROPE, 1e-6, "float32"))


@functools.partial(jax.jit, static_argnums=(4,))
def both_ways(
    q: jax.Array, weights: jax.Array, keys: jax.Array, visible: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(scores, chosen by prefill, indices picked by decode, which are live)."""
    tiles = -(-jnp.max(visible) // size)
    pool, seen = keys[None], visible[:, None]
    order, low, cut = INDEXER.select_many(q, weights, pool, 0, seen, tiles, size)
    chosen = selection.chosen(order, jnp.arange(keys.shape[1], dtype=jnp.int32), low, cut)
    picked = api.select(q[:, 0], weights[:, 0], pool, layer=0, visible=visible, k=K, tile=size)
    index, live = jnp.maximum(picked, 0), picked >= 0
    return INDEXER.scores(q, weights, keys), chosen, index, live


def small_integers(rows: int, entries: int, seed: int) -> tuple[np.ndarray, ...]:
    """Queries, head weights and keys of which many scores tie, zeros among them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)  # noqa: E731
    return draw(rows, 1, HEADS, DIM), draw(rows, 1, HEADS), draw(rows, entries, DIM)


def test_prefill_and_decode_pick_the_same() -> None:
    rows = 12
    visible = np.array([0, 1, 4, 5, 6, 7, 8, 9, 13, 16, 16, 11], np.int32)
    ties = 0
    for seed in range(5):
        q, weights, keys = small_integers(rows, 16, seed)
        scores, chosen, index, live = map(np.asarray, both_ways(q, weights, keys, visible, TILE))
        for row, count in enumerate(visible):
            want = top_k(scores[row, 0], count, K)
            assert set(np.flatnonzero(chosen[row, 0])) == want
            picked = index[row][live[row]]
            assert len(picked) == len(want) and set(picked) == want
            assert not index[row][~live[row]].any()  # unused places are within the pool
            ranked = np.sort(scores[row, 0, :count])[::-1]
            ties += count > K and ranked[K - 1] == ranked[K]
    assert ties > 10


def test_selection_does_not_depend_on_capacity() -> None:
    q, weights, keys = small_integers(4, 8, 0)
    visible = np.array([3, 5, 8, 7], np.int32)
    small = [np.asarray(x) for x in both_ways(q, weights, keys, visible, TILE)]
    wide = np.concatenate([keys, np.full((4, 16, DIM), np.nan, np.float32)], axis=1)
    large = [np.asarray(x) for x in both_ways(q, weights, wide, visible, TILE)]
    np.testing.assert_array_equal(small[1], large[1][..., :8])
    assert not large[1][..., 8:].any()
    np.testing.assert_array_equal(small[2], large[2])
    np.testing.assert_array_equal(small[3], large[3])


def test_fewer_rows_than_k() -> None:
    q, weights, keys = small_integers(2, 4, 1)
    _, chosen, index, live = both_ways(q, weights, keys, np.array([2, 4], np.int32), 4)
    assert index.shape == live.shape == (2, K)
    assert [
        set(np.asarray(i)[np.asarray(m)].tolist()) for i, m in zip(index, live, strict=True)
    ] == [
        {0, 1},
        {0, 1, 2, 3},
    ]
    assert np.asarray(chosen).sum(-1).tolist() == [[2], [4]]


def test_scores_by_loops() -> None:
    q, weights, keys = small_integers(2, 4, 2)
    scores = np.asarray(INDEXER.scores(q, weights, keys))
    for row in range(2):
        for entry in range(4):
            want = sum(
                weights[row, 0, h] * max(0.0, q[row, 0, h] @ keys[row, entry]) for h in range(HEADS)
            )
            assert scores[row, 0, entry] == want
