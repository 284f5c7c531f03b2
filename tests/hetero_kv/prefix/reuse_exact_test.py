"""Reuse equals recompute, bit by bit, with real models (DESIGN rule 3)."""

import math

import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.store import PrefixStore
from tests import variants
from tests.hetero_kv import validators
from tests.hetero_kv.prefix.benches import MATE, ROW, bench, reset
from tests.hetero_kv.prefix.stores import plain_metrics
from tests.models import families

POLICIES = ("full", "periodic:2", "end", "fork", "zero")
# Every family goes through the store in the engine's tests too.
MODELS = variants.some(("tiny", "full", "v4", "nsa", *families.names()), ("tiny",))
CASES = variants.some(
    [(name, policy) for name in ("tiny", "v4", *families.every()) for policy in POLICIES],
    [("tiny", policy) for policy in POLICIES],
)


@pytest.mark.parametrize("name", MODELS)
def test_every_multiple_of_g_resumes_exactly(name):
    b, n = bench(name), 89
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24)
    b.publish(store, seed=1, n=n)
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=70)
    boundaries = range(b.spec.granularity, n, b.spec.granularity)
    assert len(boundaries) == 5
    for at in boundaries:
        with store.lookup(tokens[: at + 1]) as lease:
            assert lease.resumable_length == at
            cache = store.restore(lease, cache, ROW)
        cache = reset(b, cache, MATE)
        logits, cache = b.finish(cache, tokens, b.prompt(60, 31))
        assert b.same_as_cold(1, n, at, logits, cache), at
    assert store.verify() == []


@pytest.mark.parametrize(
    "name",
    variants.some(("tiny", "v4", *families.every()), ("tiny",)),
)
def test_what_comes_from_disk_resumes_exactly(name, tmp_path):
    b, n = bench(name), 89

    def opened():
        return PrefixStore(
            b.spec, b.identity, host_bytes=1 << 24, disk_dir=tmp_path, disk_bytes=1 << 24
        )

    store = opened()
    b.publish(store, seed=1, n=n)
    assert store.flush().ok
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=70)
    for at in range(b.spec.granularity, n, b.spec.granularity):
        store.close()
        store = opened()
        with store.lookup(tokens[: at + 1]) as lease:
            assert lease.resumable_length == at and set(lease.routes.values()) == {"disk"}
            cache = store.restore(lease, cache, ROW)
        cache = reset(b, cache, MATE)
        logits, cache = b.finish(cache, tokens, b.prompt(60, 31))
        assert b.same_as_cold(1, n, at, logits, cache), at
        assert store.verify() == []
    store.close()


@pytest.mark.parametrize("name, policy", CASES)
def test_a_b_a_in_one_slot_of_a_small_store(name, policy):
    b = bench(name)
    if policy == "zero" and math.isinf(b.spec.replay_length):
        with pytest.raises(ValueError, match="nothing can be replayed"):  # a recurrent state
            PrefixStore(b.spec, b.identity, host_bytes=1 << 24, policy=policy)
        return
    transfer = PrefixStore(b.spec, b.identity, host_bytes=1 << 24).transfer
    block = transfer.history_layout(1).nbytes
    checkpoint = transfer.checkpoint_layout.nbytes
    # Room for two of the three prompts.
    room = 22 * block + {"full": 8, "periodic:2": 6}.get(policy, 3) * checkpoint
    store = PrefixStore(b.spec, b.identity, host_bytes=room, policy=policy)
    cache, resumed = b.used(seed=5, n=40), []
    for seed, n in [(1, 89), (2, 75), (1, 89), (3, 100), (1, 89), (1, 50), (2, 75), (1, 89)]:
        tokens = b.prompt(seed, n)
        cache = reset(b, cache, MATE)
        logits, cache, start = b.serve(store, cache, tokens)
        assert b.same_as_cold(seed, n, start, logits, cache), (seed, n, start)
        resumed.append(start)
        assert store.verify() == []
    # It cannot pass by never hitting.
    assert sum(x > 0 for x in resumed) >= 2
    assert plain_metrics(store)["restored_tokens_total"] > 0


@pytest.mark.parametrize("kind", ["stale", "zeroed"])
def test_hash_only_is_wrong_on_the_hybrid_and_seen_by_the_validator(kind):
    b, n = bench("tiny"), 89
    store = HashOnlyStore(b.spec, b.identity, host_bytes=1 << 24, kind=kind)
    b.publish(store, seed=1, n=n)
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=70)
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, ROW)
    assert int(cache.length[ROW]) == 80
    found = validate.describe(b.spec, validators.evidence(b.spec, cache), ROW)
    assert found == ["windows: positions", "tails: positions"]
    logits, cache = b.finish(reset(b, cache, MATE), tokens, b.prompt(60, 31))
    want, _ = b.cold(1, n)
    assert np.abs(logits - want[80:]).max() > 0.05


def test_hash_only_is_right_on_full_attention():
    b, n = bench("full"), 89
    store = HashOnlyStore(b.spec, b.identity, host_bytes=1 << 24)
    b.publish(store, seed=1, n=n)
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=70)
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, ROW)
    logits, cache = b.finish(reset(b, cache, MATE), tokens, b.prompt(60, 31))
    assert b.same_as_cold(1, n, 80, logits, cache)


@pytest.mark.full
def test_the_last_call_does_not_depend_on_batch_mates():
    b, n = bench("wide"), 64 + 9
    found = []
    for mate in (9, 20):
        _, cache = b.prefill(b.empty(), b.prompt(1, 64))
        logits, _ = b.prefill(cache, b.prompt(1, n)[64:], b.prompt(60, mate))
        found.append(logits)
    assert np.array_equal(*found)


def test_wide_resumes_exactly_and_off_the_grid_it_would_not():
    b, n = bench("wide"), 4 * 64 + 9
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 26)
    b.publish(store, seed=1, n=n)
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=150)
    for at in (256, 64, 192, 128):
        with store.lookup(tokens[: at + 1]) as lease:
            assert lease.resumable_length == at
            cache = store.restore(lease, cache, ROW)
        cache = reset(b, cache, MATE)
        logits, cache = b.finish(cache, tokens, b.prompt(60, 9))
        assert b.same_as_cold(1, n, at, logits, cache), at

    # The positive control: the same tokens in calls off the grid give other last bits, and such
    # state is not published.
    cache, parts = b.empty(), []
    for start in range(0, n, 40):
        logits, cache = b.prefill(cache, tokens[start : start + 40])
        parts.append(logits)
    want, _ = b.cold(1, n)
    logits = np.concatenate(parts)
    assert not np.array_equal(logits, want[:n])
    np.testing.assert_allclose(logits, want[:n], atol=1e-3)
    found = PrefixStore(b.spec, b.identity, host_bytes=1 << 26).publish(tokens, cache, ROW)
    assert (found.blocks, found.checkpoint) == (0, False)
