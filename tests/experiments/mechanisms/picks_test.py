"""CSA with other picks: the oracle's are the attention's own, random ones are none's."""

import jax
import numpy as np
import pytest

import models
from experiments import recall_metrics, selection_probe
from models.config import DecoderConfig

T, RATIO, K = 24, 2, 3
CONFIG = DecoderConfig(
    vocab_size=16, d_model=16, d_ff=16, n_heads=1, head_dim=16, rope_dim=4, window=4,
    csa_ratio=RATIO, index_heads=2, index_dim=8, index_topk=K, init_scale=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def given() -> tuple[dict, np.ndarray]:
    params = models.build(CONFIG).init(jax.random.key(0))
    return params, np.random.default_rng(0).integers(0, 16, (2, T)).astype(np.int32)


def seen(config: DecoderConfig, params: dict, tokens: np.ndarray, select: str) -> tuple:
    model = models.build(config)
    forward = jax.jit(lambda p, t: model.forward(p, t, aux=True, select=select))
    logits, aux = forward(params, tokens)
    return np.asarray(logits), np.asarray(aux["targets"][0][0])


def test_the_oracle_attends_the_entries_that_dense_attention_weighs_most(given) -> None:
    params, tokens = given
    _, dense = seen(CONFIG, params, tokens, "all")
    _, shares = seen(selection_probe.picking(CONFIG, "oracle", K), params, tokens, "topk")
    visible = np.arange(T // RATIO) < (np.arange(1, T + 1) // RATIO)[:, None]
    wanted = recall_metrics.top(dense, np.broadcast_to(visible, dense.shape), K)
    np.testing.assert_array_equal(shares > 0, wanted & (dense > 0))
    # Of what it attends, the proportions are those of dense attention: there is one head.
    kept = np.where(wanted, dense, 0)
    kept = kept / np.maximum(kept.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(shares, kept, atol=1e-5)


@pytest.mark.full
def test_random_picks_are_as_many_and_others(given) -> None:
    params, tokens = given
    logits, shares = seen(selection_probe.picking(CONFIG, "random", K), params, tokens, "topk")
    again, _ = seen(selection_probe.picking(CONFIG, "random", K), params, tokens, "topk")
    np.testing.assert_array_equal(logits, again)
    visible = np.minimum(np.arange(1, T + 1) // RATIO, K)
    np.testing.assert_array_equal((shares > 0).sum(-1), np.broadcast_to(visible, (2, T)))
    plain, _ = seen(CONFIG, params, tokens, "topk")
    assert np.abs(logits - plain).max() > 1e-3


def test_every_way_is_dense_attention_where_all_are_picked(given) -> None:
    params, tokens = given
    dense, _ = seen(CONFIG, params, tokens, "all")
    for way in selection_probe.WAYS:
        logits, _ = seen(selection_probe.picking(CONFIG, way, T), params, tokens, "topk")
        np.testing.assert_allclose(logits, dense, atol=1e-5)


def test_a_layer_without_an_indexer_has_no_picks_to_replace() -> None:
    with pytest.raises(ValueError, match="no indexer"):
        models.build(selection_probe.picking(CONFIG, "oracle", -1))
