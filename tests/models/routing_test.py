"""Routers against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.routing import Router

TOKENS, EXPERTS, PICKS = 9, 8, 3


def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(TOKENS, EXPERTS))


def bias(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=EXPERTS)


def by_loops(made: Router, x: np.ndarray) -> list[dict[int, float]]:
    """Per token, weights by expert, float64."""
    out = []
    for row in x + (bias(2) if made.logit_bias else 0):
        score = {
            "sqrt_softplus": np.sqrt(np.log1p(np.exp(row))),
            "sigmoid": 1 / (1 + np.exp(-row)),
            "softmax": np.exp(row) / np.exp(row).sum(),
            "logits": row,
        }[made.score]
        ranked = score + (bias(1) if made.choice_bias else 0)
        size = EXPERTS // made.groups
        worth = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(made.groups)]
        kept = np.argsort(worth)[::-1][: made.groups_kept]
        allowed = [e for e in range(EXPERTS) if e // size in kept]
        best = sorted(allowed, key=lambda e: -ranked[e])[:PICKS]
        weight = np.exp(row[best]) if made.score == "logits" else score[best]
        if made.normalise or made.score == "logits":
            weight = weight / weight.sum()
        out.append(dict(zip(best, weight, strict=True)))
    return out


@pytest.mark.parametrize(
    "made",
    [
        Router(),
        Router("sigmoid", groups=4, groups_kept=2),
        Router("sigmoid", groups=2, groups_kept=1, normalise=False),
        Router("softmax", choice_bias=False),
        Router("logits", choice_bias=False, logit_bias=True),
    ],
    ids=str,
)
def test_picks_and_weights(made: Router) -> None:
    params = {"bias": jnp.asarray(bias(1)), "logit_bias": jnp.asarray(bias(2))}
    assert set(made.params(EXPERTS)) <= set(params)
    index, weights = made.pick(params, jnp.asarray(logits(), jnp.float32), PICKS, None)
    for t, want in enumerate(by_loops(made, logits())):
        assert set(np.asarray(index)[t].tolist()) == set(want)
        for e, w in zip(np.asarray(index)[t].tolist(), np.asarray(weights)[t], strict=True):
            assert w == pytest.approx(want[e], abs=1e-6)


def test_experts_that_are_fixed_are_taken() -> None:
    chosen = jnp.asarray([[5, 0]] * TOKENS)
    index, weights = Router(choice_bias=False).pick({}, jnp.asarray(logits()), 2, chosen)
    np.testing.assert_array_equal(index, chosen)
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    "made, picks, match",
    [
        (Router("magic"), 1, "magic"),
        (Router(groups=3), 1, "must divide"),
        (Router(groups=8), 1, "groups of 2"),
        (Router(groups=2, groups_kept=3), 1, "groups_kept"),
        (Router(groups=4, groups_kept=1), 3, "cannot be in"),
    ],
)
def test_what_cannot_be_is_refused(made: Router, picks: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made.check(EXPERTS, picks)
