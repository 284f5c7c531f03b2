"""The three ways to run a mixture of experts agree, whatever the load of the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.params import Params
from models import mlp
from models.mlp import Dense, MoE, Unit
from tests import variants

D, F, VOCAB = 6, 5, 11


@functools.cache
def build(experts: int, picks: int, hashed: bool = False) -> tuple[MoE, Params]:
    made = MoE(D, F, VOCAB, experts, picks, 1, 1.5, 0.8, hashed, 1.0)
    rng = np.random.default_rng([experts, picks])

    def draw(tree) -> Params:
        return {
            name: draw(spec) if isinstance(spec, dict)
            else jnp.asarray(rng.integers(0, experts, spec.shape), jnp.int32)
            if spec.init == "expert_table"
            else jnp.asarray(rng.normal(size=spec.shape), jnp.float32)
            for name, spec in tree.items()
        }  # fmt: skip

    return made, draw(made.params())


def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, D)).astype(np.float32), rng.integers(0, VOCAB, n)


def by_loops(params: Params, x: np.ndarray, index: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Token by token and choice by choice, float64."""
    gate_up, down = (np.asarray(params[name], np.float64) for name in ("gate_up", "down"))
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for e, w in zip(index[t], weights[t], strict=True):
            gate, up = np.split(row @ gate_up[e], 2)
            gate, up = np.minimum(gate, 0.8), np.clip(up, -0.8, 0.8)
            out[t] += w * (gate / (1 + np.exp(-gate)) * up) @ down[e]
    return out


@functools.partial(jax.jit, static_argnums=0)
def three_forms(made: MoE, params: Params, x: jax.Array, index: jax.Array, weights: jax.Array):
    return [form(params, x, index, weights) for form in (made._all, made._each, made._sorted)]


@pytest.mark.parametrize(
    "n, experts, picks",
    variants.some([(1, 4, 2), (5, 4, 2), (70, 3, 2), (3, 20, 2)], [(1, 4, 2), (70, 3, 2)]),
)
def test_experts_apart_are_the_same_experts(n: int, experts: int, picks: int) -> None:
    made, params = build(experts, picks)
    x, tokens = (jnp.asarray(a) for a in draw(n))
    index, weights = route(made, params, x, tokens)
    apart = made.apart(params)
    assert len(apart["gate_up"]) == experts and apart["gate_up"][0].shape == (D, 2 * F)
    want = three_forms(made, params, x, index, weights)
    for found, expected in zip(three_forms(made, apart, x, index, weights), want, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_many_experts_stay_in_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    made, params = build(4, 2)
    monkeypatch.setattr(mlp, "APART", 3)
    assert made.apart(params) is params


@functools.partial(jax.jit, static_argnums=0)
def route(made: MoE, params: Params, x: jax.Array, tokens: jax.Array):
    return made.route(params, x, tokens)


LOADS = ("random", "one expert", "few experts")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("n, experts, picks", [(1, 4, 2), (3, 16, 2), (70, 4, 2), (40, 3, 3)])
def test_the_forms_agree(n: int, experts: int, picks: int, load: str) -> None:
    made, params = build(experts, picks)
    x, tokens = draw(n)
    index, weights = map(np.asarray, route(made, params, x, tokens))
    if load == "one expert":  # every token has the same choice
        index = np.broadcast_to(index[:1], index.shape)
    elif load == "few experts":  # and some experts none
        index = np.sort(index, axis=-1) % (picks + 1)
    want = by_loops(params, x, index, weights)
    for found in three_forms(made, params, x, index, weights):
        np.testing.assert_allclose(found, want, atol=1e-5)


# Tokens and experts for which each form is taken, in the order below.
SIZES = ((1, 8), (4, 4), (5, 32), (40, 4))


@pytest.mark.parametrize("n, experts, hashed", [(*size, False) for size in SIZES] + [(40, 4, True)])
def test_whatever_form_is_taken_the_answer_is_that_of_training(
    n: int, experts: int, hashed: bool
) -> None:
    made, params = build(experts, 2, hashed)
    x, tokens = draw(n)
    one, two = jax.jit(
        lambda p, x, t: [made(p, x, t, differentiable) for differentiable in (True, False)]
    )(params, x[None], tokens[None])
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_each_form_is_taken_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for form in ("_all", "_each", "_sorted"):
        real = getattr(MoE, form)

        def spy(self, *args, real=real, form=form):
            taken.append(form)
            return real(self, *args)

        monkeypatch.setattr(MoE, form, spy)
    for n, experts in SIZES:
        made, params = build(experts, 2)
        shape = jax.ShapeDtypeStruct((1, n, D), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, n), jnp.int32)
        jax.eval_shape(lambda x, t, m=made, p=params: m(p, x, t, False), shape, ids)
    assert taken == ["_each", "_all", "_each", "_sorted"]
    assert mlp.DENSE < 40


def test_bias_acts_on_the_choice_only() -> None:
    made, params = build(4, 2)
    x, tokens = draw(20)
    index, weights = map(np.asarray, route(made, params, x, tokens))
    scores = np.sqrt(np.logaddexp(0, x.astype(np.float64) @ np.asarray(params["router"])))
    for t in range(20):
        biased = scores[t] + np.asarray(params["bias"])
        assert set(index[t]) == set(np.argsort(-biased)[:2])
        picked = scores[t, index[t]]
        np.testing.assert_allclose(weights[t], 1.5 * picked / picked.sum(), rtol=1e-5)


def test_hashed_layers_choose_by_token() -> None:
    made, params = build(4, 2, hashed=True)
    x, tokens = draw(20)
    index, _ = route(made, params, x, tokens)
    np.testing.assert_array_equal(index, np.asarray(params["table"])[tokens])
    assert "bias" not in params


def test_unit_clamps_the_gate_above_only() -> None:
    gate_up = jnp.array([[1.0, 1.0]])
    down = jnp.array([[1.0]])

    def run(x: float, limit: float) -> float:
        return float(Unit(limit)(jnp.array([[x]]), gate_up, down)[0, 0])

    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    assert run(9.0, 2.0) == pytest.approx(silu(2.0) * 2.0, rel=1e-5)
    assert run(-9.0, 2.0) == pytest.approx(silu(-9.0) * -2.0, rel=1e-5)
    assert run(9.0, 0.0) == pytest.approx(silu(9.0) * 9.0, rel=1e-5)


def test_dense_is_one_expert() -> None:
    params = {"gate_up": jnp.ones((D, 2 * F)), "down": jnp.ones((F, D))}
    x = draw(3)[0]
    found = Dense(D, F, 0.0)(params, x[None], np.zeros((1, 3), int), False)
    np.testing.assert_array_equal(found[0], Unit()(x, params["gate_up"], params["down"]))


@pytest.mark.parametrize("picks", [0, 5])
def test_bad_sizes_are_refused(picks: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.n_experts=4"):
        MoE(D, F, VOCAB, 4, picks, 1, 1.0, 0.0, False, 1.0)
