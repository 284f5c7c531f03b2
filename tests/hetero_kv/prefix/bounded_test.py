"""Bounded replay: approximate, said to be so, never published, and closer the longer it is."""

import numpy as np
import pytest

from experiments.replay_error import replay_errors
from hetero_kv.prefix.plan import REPLAY
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv.prefix.benches import MATE, ROW, bench, reset

N = 100  # tokens of a prompt; it can resume at 96


def stored(policy, n=N):
    """A store that knows the prompt's history."""
    b = bench("tiny")
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24, policy=policy)
    _, cache, _ = b.serve(store, b.empty(), b.prompt(1, n))
    return b, store, cache


def test_it_is_labelled_and_different():
    b, store, cache = stored("bounded:5")
    tokens, chunk = b.prompt(1, N), b.spec.chunk
    with store.lookup(tokens) as lease:
        assert lease.approximate and lease.replay == (96 - chunk, 96)
        assert lease.routes["windows"] == lease.routes["tails"] == REPLAY
        cache = store.restore(lease, reset(b, cache, MATE), ROW)
        cache = b.replayed(cache, tokens, lease.replay)
    assert int(cache.length[ROW]) == 96 and int(cache.grid_length[ROW]) == 0
    logits, cache = b.finish(cache, tokens)
    want, _ = b.cold(1, N)
    assert not np.array_equal(logits, want[96:])
    assert store.counters.get("approximate_restores_total") == 1
    assert "approximate" in str(store.explain(tokens))
    assert store.explain(tokens).plan.approximate


def test_enough_tokens_are_exact_and_not_labelled():
    exact = int(bench("tiny").spec.replay_length)
    for n in (exact, exact + 1, 10 * exact):
        b, store, cache = stored(f"bounded:{n}")
        tokens = b.prompt(1, N)
        with store.lookup(tokens) as lease:
            assert lease.replay == (96 - exact, 96) and not lease.approximate
        logits, cache, start = b.serve(store, reset(b, cache, MATE), tokens)
        assert start == 96 and b.same(tokens, start, logits, cache)
        assert store.counters.get("approximate_restores_total") == 0


def test_what_follows_is_never_published():
    b, store, cache = stored("bounded:16", n=112)
    tokens = b.prompt(1, 112)
    longer = np.concatenate([tokens, b.prompt(2, 16)])
    before = {x.label for x in store.catalog.groups()}
    with store.lookup(longer) as lease:
        assert lease.approximate and lease.resumable_length == 112
        cache = store.restore(lease, reset(b, cache, MATE), ROW)
        # Before the replay nothing vouches for windows; after it, for exactness.
        for points in (None, (112,)):
            found = store.publish(longer, cache, ROW, points=points)
            assert found.new_blocks == 0 and not found.checkpoint
        cache = b.replayed(cache, longer, lease.replay)
        for stop in (112, 120, 128):
            if stop > 112:
                _, cache = b.prefill(cache, longer[int(cache.length[ROW]) : stop])
            found = store.publish(longer, cache, ROW, points=(stop,))
            assert (found.blocks, found.new_blocks, found.checkpoint) == (0, 0, False)
    assert {x.label for x in store.catalog.groups()} == before
    # The positive control: an exact replay is published.
    b, store, cache = stored("zero", n=112)
    _, cache, start = b.serve(store, reset(b, cache, MATE), longer[:129])
    assert start == 112 and store.explain(longer).plan.candidate_length == 120


@pytest.mark.full
def test_the_error_shrinks_to_nothing():
    b = bench("fine")
    chunk, exact = b.spec.chunk, int(b.spec.replay_length)
    assert exact == 4 * chunk
    bounds = [1, chunk, 2 * chunk, 4 * chunk, 8 * chunk]
    rows = replay_errors(b.model, b.params, b.prompt(1, N), bounds)
    assert [x["replayed"] for x in rows] == [chunk, chunk, 2 * chunk, exact, exact]
    assert [x["approximate"] for x in rows] == [True, True, True, False, False]
    assert all(set(x["live_rows"]) == {"windows", "tails"} for x in rows)
    for errors in (
        [x["max_logit_difference"] for x in rows],
        [x["live_rows"]["windows"] for x in rows],
    ):
        assert errors == sorted(errors, reverse=True)
        assert errors[0] == errors[1] > errors[2] > errors[3] == errors[4] == 0


@pytest.mark.full
def test_a_prompt_too_short_for_a_replay():
    b = bench("fine")
    for n in (8, 17):
        with pytest.raises(ValueError, match="does not resume"):
            replay_errors(b.model, b.params, b.prompt(1, n), [16])
