"""Prefill lowers with kernels for TPU, and training with a named kernel has the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.config import DecoderConfig
from tests.hetero_kv.kernels import strict

CONFIG = DecoderConfig(
    layer_types=("swa", "csa", "hca"),
    mlp_types=("dense",) * 3,
    d_model=64,
    n_heads=8,
    head_dim=128,
    window=16,
    hca_ratio=16,
    index_heads=8,
    index_dim=128,
    index_topk=2,
)


def test_prefill_lowers_with_kernels_for_tpu() -> None:
    model = models.build(CONFIG)
    of = jax.ShapeDtypeStruct
    arguments = (
        model.abstract_params(),
        of((2, 64), jnp.int32),
        of((2,), jnp.int32),
        model.abstract_cache(2, 512),
        of((2,), jnp.int32),
    )

    def call(params, tokens, count, cache, first):
        return model.stack.call(params, tokens, count, cache, first, "last", jnp.bool_(False))

    # Attention of three layers, the stores of entries of two and of index keys of one.
    assert strict.kernels_in(strict.lowered(call, "tpu", *arguments), "tpu") == 6
    assert "tpu_custom_call" not in strict.lowered(call, "cpu", *arguments)


@pytest.mark.full
@pytest.mark.parametrize("kinds", [("swa", "csa"), ("hca",)])
def test_gradients_with_a_named_kernel(kinds: tuple[str, ...]) -> None:
    config = CONFIG.replace(
        layer_types=kinds, mlp_types=("dense",) * len(kinds), head_dim=16, index_dim=16
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 32))
    params = models.build(config).init(jax.random.key(0))

    def grads(kernels: str):
        model = models.build(config.replace(kernels=kernels))

        def loss(params):
            logits = model.forward(params, tokens)
            return jnp.mean(jnp.square(logits[0] if isinstance(logits, tuple) else logits))

        return jax.jit(jax.grad(loss, allow_int=True))(params)

    got, want = strict.tpu(lambda: grads("interpret")), grads("reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, atol=1e-4 * max(1, float(np.abs(b).max())))
