"""Reuse equals recompute where prompts part, and with several threads on one store."""

import numpy as np
import pytest

from hetero_kv.prefix.store import PrefixStore
from tests import variants
from tests.hetero_kv.prefix.benches import MATE, Bench, bench, reset
from tests.hetero_kv.prefix.threads import in_threads

POLICIES = ("full", "periodic:2", "end", "fork", "zero")
LONG = 300.0  # seconds that no test waits for


def around(*multiples: int) -> list[int]:
    return sorted({x + d for x in multiples for d in (-1, 0, 1)})


# Tiny: ratios 4 and 8, window 8, B = 8, C = 16. Wide: ratios 4 and 32, window 32, B = 32, C = 64.
QUICK = around(4, 8, 16, 24, 48)
EVERY = range(1, 82)
WIDE = around(4, 32, 64, 96, 128, 192)


def forks(b: Bench, policy: str, offsets, n: int, more: int) -> list[int]:
    """Serves A, then for every offset a prompt that leaves A there, twice, and A again."""
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 28, policy=policy)
    base, cache, starts = b.prompt(1, n), b.used(seed=5, n=40), []
    _, cache, _ = b.serve(store, reset(b, cache, MATE), base)
    for offset in offsets:
        own = b.prompt(1000 + offset, more)
        own[0] = (base[offset] + 1) % b.model.config.vocab_size  # it does leave there
        tokens = np.concatenate([base[:offset], own])
        for again in (tokens, tokens, base):
            logits, cache, start = b.serve(store, reset(b, cache, MATE), again)
            assert b.same(again, start, logits, cache), (offset, start)
            if again is not base:
                starts.append(start)
                assert start <= b.spec.largest_boundary(len(tokens))
    assert store.verify() == []
    return starts


@pytest.mark.parametrize("policy", variants.some(POLICIES, ("full", "zero")))
def test_forks_around_every_kind_of_boundary(policy):
    starts = forks(bench("tiny"), policy, QUICK, n=89, more=20)
    first, second = starts[::2], starts[1::2]
    # It cannot pass by never hitting: the second time at the latest.
    assert all(second) or policy == "zero"
    if policy in ("full", "zero"):
        assert any(first)
    if policy == "full":
        assert first == [x // 16 * 16 for x in QUICK]


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_forks_at_every_offset(policy):
    assert any(forks(bench("tiny"), policy, EVERY, n=89, more=20))


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_forks_where_it_is_not_trivial(policy):
    assert any(forks(bench("wide"), policy, WIDE, n=4 * 64 + 9, more=40))


@pytest.mark.parametrize("policy", variants.some(POLICIES, ("full", "fork", "zero")))
def test_concurrent_cold_prefills_on_one_store(policy):
    b = bench("tiny")
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24, policy=policy)
    base = b.prompt(1, 89)
    shared = [np.concatenate([base[:x], b.prompt(1000 + x, 20)]) for x in (31, 48, 65)]
    prompts = [base, *shared]
    for tokens in prompts:
        b.cold_of(tokens)
    starts = []

    def requests(turn):
        cache = b.used(seed=5 + turn, n=40)
        for i in range(len(prompts)):
            tokens = prompts[(i + turn) % len(prompts)]
            logits, cache, start = b.serve(store, reset(b, cache, MATE), tokens)
            assert b.same(tokens, start, logits, cache), (turn, i, start)
            starts.append(start)

    in_threads([lambda turn=turn: requests(turn) for turn in (0, 0, 1, 2)], LONG)
    assert any(starts) and store.verify() == []
    assert store.catalog.leases == 0


def test_identical_cold_requests_prefill_once():
    b = bench("tiny")
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24)
    tokens, starts = b.prompt(1, 89), []
    b.cold_of(tokens)

    def request():
        logits, cache, start = b.serve(store, b.empty(), tokens, wait=LONG)
        assert b.same(tokens, start, logits, cache), start
        starts.append(start)

    in_threads([request] * 64, LONG)
    assert sorted(starts) == [0] + [80] * 63
    assert store.counters.get("resumable_tokens_total") == 63 * 80
