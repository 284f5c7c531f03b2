"""Samplers, and decoding many tokens in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Sampler
from tests.models import tiny

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
DRAWS = 4000


def frequencies(sampler: Sampler, logits: np.ndarray) -> np.ndarray:
    wide = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, logits.size))
    tokens = np.asarray(jax.jit(sampler.__call__)(wide, jax.random.key(0)))
    assert tokens.dtype == np.int32
    return np.bincount(tokens, minlength=logits.size) / DRAWS


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    logits = jnp.array([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, 0.0]])
    assert Sampler()(logits, jax.random.key(0)).tolist() == [1, 0, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    want = np.exp(LOGITS / temperature)
    found = frequencies(Sampler(temperature), LOGITS)
    np.testing.assert_allclose(found, want / want.sum(), atol=0.03)


@pytest.mark.parametrize(
    "top_p, kept", [(0.01, [1]), (0.39, [1]), (0.45, [1, 3]), (0.66, [1, 3, 4]), (0.96, range(5))]
)
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, kept) -> None:
    want = np.zeros(5)
    want[list(kept)] = np.exp(LOGITS)[list(kept)]
    found = frequencies(Sampler(1.0, top_p), LOGITS)
    np.testing.assert_allclose(found, want / want.sum(), atol=0.03)
    assert not found[want == 0].any()


def test_top_p_acts_after_temperature() -> None:
    cold = frequencies(Sampler(0.25, 0.8), LOGITS)  # 0.4 holds more than 0.8 by then
    assert np.flatnonzero(cold).tolist() == [1]


@pytest.mark.parametrize("arguments", [(-0.1, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_bad_settings_are_refused(arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Sampler(*arguments)


NAME, STEPS = "full", 7


def prefilled():
    made, params = tiny.model(NAME)
    _, cache = made.prefill(params, tiny.tokens()[:, :10], tiny.empty(made), np.array([10, 4]))
    return made, params, cache


def test_many_tokens_equal_as_many_steps() -> None:
    made, params, cache = prefilled()
    token = first = jnp.array([3, 8], jnp.int32)
    want = []
    for _ in range(STEPS):
        logits, cache = made.decode_step(params, token, cache, np.ones(2, bool))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        want.append(token)
    found, many = made.decode_many(params, first, prefilled()[2], STEPS)
    np.testing.assert_array_equal(found, np.stack(want, axis=1))
    assert found.shape == (2, STEPS)
    assert list(many.length) == list(cache.length) == [10 + STEPS, 4 + STEPS]
    tiny.assert_same_state(made, cache, many, atol=1e-5)


def test_sampled_tokens_follow_the_key_and_idle_rows_stay() -> None:
    made, params, _ = prefilled()
    first, sampler = jnp.array([3, 8], jnp.int32), Sampler(1.5, 0.9)

    def run(seed: int):
        return made.decode_many(
            params, first, prefilled()[2], STEPS, sampler, jax.random.key(seed),
            active=jnp.array([True, False]),
        )  # fmt: skip

    (one, cache), (same, _), (other, _) = run(0), run(0), run(1)
    np.testing.assert_array_equal(one[0], same[0])
    assert (np.asarray(one[0]) != np.asarray(other[0])).any()
    assert list(cache.length) == [10 + STEPS, 4]
