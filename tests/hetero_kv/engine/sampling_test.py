"""Sampling row by row: the same draws as the models' sampler, alone or in a batch."""

import jax
import numpy as np
import pytest

from hetero_kv import Sampling
from hetero_kv.sampling import choose, stack
from models import Sampler

LOGITS = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32) * 3
CHOOSE = jax.jit(choose)


def draws(logits, index, samplings) -> list[int]:
    index = np.full(len(logits), index, np.int32)
    return np.asarray(CHOOSE(logits, index, stack(samplings))).tolist()


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.7, 1.0), (1.3, 0.8), (1.0, 0.05)])
def test_as_the_models_sampler(temperature: float, top_p: float) -> None:
    sampler = Sampler(temperature, top_p)
    for i in range(20):
        for row in LOGITS:
            key = jax.random.fold_in(jax.random.key(7), i)
            want = int(sampler(row[None], key)[0])
            assert draws(row[None], i, [Sampling(temperature, 0, top_p, 7)]) == [want]


def test_a_row_draws_the_same_in_any_batch() -> None:
    samplings = [Sampling(0.3 * i, top_k=i, top_p=0.9, seed=i) for i in range(6)]
    together = draws(LOGITS, 3, samplings)
    alone = [draws(LOGITS[i : i + 1], 3, samplings[i : i + 1])[0] for i in range(6)]
    assert together == alone
    order = [4, 2, 0, 5, 1, 3]
    assert draws(LOGITS[order], 3, [samplings[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_only_the_k_most_probable(top_k: int) -> None:
    allowed = np.argsort(-LOGITS, axis=-1)[:, :top_k]
    seen: list[set] = [set() for _ in LOGITS]
    for i in range(60):
        got = draws(LOGITS, i, [Sampling(5.0, top_k=top_k, seed=1)] * 6)
        for found, token in zip(seen, got, strict=True):
            found.add(token)
    assert all(found <= set(a.tolist()) for found, a in zip(seen, allowed, strict=True))
    assert top_k == 1 or any(len(found) > 1 for found in seen)


def test_seeds_and_indices_differ() -> None:
    found = {tuple(draws(LOGITS, i, [Sampling(2.0, seed=s)] * 6)) for i in (0, 1) for s in (0, 9)}
    assert len(found) == 4


def test_ties_go_to_the_lowest_token() -> None:
    assert draws(np.zeros((1, 9), np.float32), 0, [Sampling()]) == [0]


def test_the_largest_seed() -> None:
    assert not Sampling(seed=2**32 - 1).problem() and Sampling(seed=2**32).problem()
    assert draws(LOGITS, 0, [Sampling(1.0, seed=2**32 - 1)] * 6)
