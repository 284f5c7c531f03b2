"""Bad configs and inputs are refused with the value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_heads", 0),
        ("n_heads", 2.5),
        ("d_model", 0),
        ("window", "8"),
        ("vocab_size", 0),
        ("norm_eps", -1.0),
        ("yarn_factor", -2.0),
        ("cache_dtype", "int8"),
        ("dtype", "bfloat"),
    ],
)
def test_a_senseless_field_is_named(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        models.build(models.DecoderConfig(**{field: value}))


@pytest.fixture(scope="module")
def small() -> tuple[models.Decoder, dict]:
    model = models.build(models.DecoderConfig(layer_types=("swa",), mlp_types=("dense",)))
    return model, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract_params())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[256]]), "0..255"),
        (np.array([[-1]]), "0..255"),
        (np.array([[0.7]]), "integers"),
        (np.array([1]), "shape"),
        (np.zeros((1, 0), int), "shape"),
    ],
)
def test_bad_tokens_are_refused(small, tokens, message):
    model, params = small
    cache = model.init_cache(batch=1, capacity=8)
    with pytest.raises(ValueError, match=message):
        model.forward(params, tokens)
    with pytest.raises(ValueError, match=message):
        model.prefill(params, tokens, cache)


def test_steps_refuse_wrong_shapes_and_full_caches(small):
    model, params = small
    cache = model.init_cache(batch=1, capacity=8)
    for token in (np.zeros((1, 1), int), np.int32(0), np.zeros(2, int)):
        with pytest.raises(ValueError, match="shape"):
            model.decode_step(params, token, cache)
    with pytest.raises(ValueError, match="would not fit"):
        model.decode_many(params, np.zeros(1, np.int32), cache, 9)
    tokens, _ = model.decode_many(params, np.zeros(1, np.int32), cache, 8)
    assert tokens.shape == (1, 8)
