"""Prepared weights compute what the plain ones do; scanned layers keep theirs in one array."""

import jax
import numpy as np

import models
from tests.models import tiny


def test_prepared_weights_give_the_same_logits() -> None:
    config = tiny.model("v4")[0].config.replace(
        layer_types=("swa",), mlp_types=("moe",), hc_streams=0
    )
    apart = models.build(config.replace(scan_layers=False))
    params = apart.init(jax.random.key(0))
    prepared = apart.prepare(params)
    tokens = tiny.tokens()[:, :21]

    def run(weights) -> tuple[np.ndarray, np.ndarray]:
        logits, cache = apart.prefill(weights, tokens, apart.init_cache(tiny.ROWS, tiny.CAPACITY))
        step, _ = apart.decode_step(weights, tokens[:, 0], cache)
        return np.asarray(logits), np.asarray(step)

    for found, want in zip(run(prepared), run(params), strict=True):
        np.testing.assert_allclose(found, want, atol=3e-5, rtol=0)
    assert any(isinstance(x["0"]["mlp"]["down"], tuple) for x in prepared["segments"].values())
    # Nothing but the experts is copied.
    assert prepared["embed"] is params["embed"]
    assert jax.tree.structure(apart.prepare(prepared)) == jax.tree.structure(prepared)
    repeated = config.replace(layer_types=("swa",) * 3, mlp_types=("moe",) * 3, scan_layers=True)
    scanned = models.build(repeated)
    weights = scanned.init(jax.random.key(0))
    same = jax.tree.map(lambda a, b: a is b, weights, scanned.prepare(weights))
    assert all(jax.tree.leaves(same))
