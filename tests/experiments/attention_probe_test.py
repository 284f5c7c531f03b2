"""Where attention falls, against plain numpy."""

import jax
import numpy as np
import pytest

import models
from experiments import attention_probe
from models.config import DecoderConfig

T, W = 10, 3
CONFIG = DecoderConfig(
    vocab_size=16, d_model=8, d_ff=8, n_heads=2, n_kv_heads=1, head_dim=4, rope_dim=0,
    layer_types=("local", "full"), mlp_types=("dense",) * 2, window=W, qk_norm=False,
    init_scale=1.0,
)  # fmt: skip


def test_masses_of_a_first_layer_by_hand() -> None:
    model = models.build(CONFIG)
    params = model.init(jax.random.key(0))
    own = params["segments"]["0"]["0"]["attn"]
    own["sinks"] = own["sinks"] + np.array([0.5, -1.0], np.float32)
    tokens = np.random.default_rng(0).integers(0, 16, (2, T)).astype(np.int32)
    layer, shares, lost, _ = next(attention_probe._layers(model, params, tokens))
    assert layer.attention.kind == "local"
    x = np.asarray(params["embed"])[tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    q = (x @ np.asarray(own["q"][0])).reshape(2, T, 2, 4)
    k = x @ np.asarray(own["k"][0])
    logits = np.einsum("bthc,bkc->bthk", q, k) / 2.0
    place = np.arange(T)
    seen = (place[:, None] >= place) & (place[:, None] - place < W)
    weights = np.exp(logits) * seen[None, :, None]
    sink = np.exp([0.5, -1.0])
    total = weights.sum(-1) + sink
    np.testing.assert_allclose(shares[:, :, 0], weights / total[..., None], atol=1e-5)
    np.testing.assert_allclose(lost[:, :, 0], sink / total, atol=1e-5)


def test_means_over_layers() -> None:
    model = models.build(CONFIG.replace(sinks=False))
    params = model.init(jax.random.key(1))
    # All tokens are one: every layer sees equal rows, and attends all that it sees alike.
    tokens = np.zeros((1, T), np.int32)
    layers = list(attention_probe._layers(model, params, tokens))
    found = attention_probe.masses(model, params, tokens)
    assert found == pytest.approx({
        "first": np.mean([1 / n for n in range(2, T + 1)]), "sink_local": 0.0, "sink_full": 0.0,
        "largest": max(float(abs(x[3]).max()) for x in layers),
    }, rel=1e-5)  # fmt: skip
    # The stream behind the last layer gives the model's own logits.
    np.testing.assert_allclose(
        model.stack._head(params, layers[-1][3]),
        jax.jit(model.forward)(params, tokens),
        atol=1e-5,
    )


def test_other_layers_are_refused() -> None:
    model = models.build(DecoderConfig())
    with pytest.raises(ValueError, match="'swa' is neither"):
        attention_probe.masses(model, model.init(jax.random.key(0)), np.zeros((1, 4), np.int32))
