"""The allocator simulator: ledgers, known cases, and the two published directions."""

import numpy as np
import pytest

import models
from experiments import allocation, tables_rows
from experiments.allocation import Form, Pool, simulate

FULL = Form("full kv", 100, 16, 2)
LOCAL = Form("windows", 40, 16, 6, window=32)


def test_pages_of_a_form() -> None:
    assert [FULL.pages(n) for n in (1, 16, 17, 160)] == [2, 2, 4, 20]
    # A window of 32 may touch three pages of 16.
    assert [LOCAL.pages(n) for n in (1, 32, 33, 1_000)] == [6, 12, 18, 18]
    assert LOCAL.row_bytes(1_000) == 6 * 32 * 40 / 16


@pytest.mark.parametrize("arm", allocation.ARMS)
def test_what_is_given_back_can_be_taken_again(arm: str) -> None:
    lengths = [int(x) for x in np.random.default_rng(1).integers(1, 400, 60)]
    pool = Pool(arm, (FULL, LOCAL), 200_000, lengths)
    before = repr((pool.free, getattr(pool, "left", None), pool.large_free))
    rng, held = np.random.default_rng(2), []
    for length in lengths * 3:
        got = pool.take(length)
        if got is not None:
            held.append(got)
        if arm == "lcm":
            used = sum(n for h in held for kind in h for number, n in kind.items() if not number)
            partial = {(k, x) for h in held for k, kind in enumerate(h) for x in kind if x}
            assert pool.large_free + used + len(partial) == 200_000 // 200
            assert pool.room == [sum(x.values()) for x in pool.partial]
        if got is None or rng.integers(3) == 0:
            pool.give(held.pop(int(rng.integers(len(held)))))
    for holding in held:
        pool.give(holding)
    assert repr((pool.free, getattr(pool, "left", None), pool.large_free)) == before
    assert pool.partial == [{}, {}] and pool.room == [0, 0]


def test_equal_sequences_fill_what_fits() -> None:
    # One page of each of two layers: 200 bytes; 1,000 bytes hold five.
    usage = simulate("uniform", (FULL,), 1_000, [16] * 80)
    assert usage.concurrency == 5 and usage.waste == 0
    half = simulate("uniform", (FULL,), 1_000, [8] * 80)
    assert half.concurrency == 5 and half.waste == pytest.approx(0.5)


def test_directions() -> None:
    lengths = [int(x) for x in np.random.default_rng(0).integers(4_000, 30_000, 200)]
    gains = {}
    for local in (0, 5):
        spec = models.build(tables_rows.interleaved(local, 12, 1_024)).cache_spec
        forms = allocation.forms_of(spec, 128)
        capacity = 12 * Pool("uniform", forms, 0, lengths).need(16_000)
        arms = {arm: simulate(arm, forms, capacity, lengths) for arm in ("uniform", "lcm")}
        gains[local] = arms["lcm"].concurrency / arms["uniform"].concurrency
    assert gains[0] == pytest.approx(1.0) and gains[5] > 3


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="arm"):
        Pool("best", (FULL,), 100, [1])
    with pytest.raises(ValueError, match="do not fit"):
        simulate("lcm", (FULL,), 100, [1_000])
    with pytest.raises(ValueError, match="everything fits"):
        simulate("lcm", (FULL,), 10**6, [10])
    with pytest.raises(ValueError, match="stride"):
        allocation.forms_of(models.build(models.DecoderConfig()).cache_spec, 6)
