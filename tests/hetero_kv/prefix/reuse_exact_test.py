"""Reuse equals recompute, bit by bit, with real models (DESIGN rule 3).

Caches start poisoned, slots are used by other prompts before, and another row of the batch runs
something else meanwhile. A comparison covers the rest of the prompt, a few decode steps beyond the
next entries of every layer, and every live row.
"""

import functools

import jax
import numpy as np
import pytest

import models
from hetero_kv import validate
from hetero_kv.contract import Evidence
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from models.config import DecoderConfig
from tests.hetero_kv.prefix.stores import plain_metrics

TINY = DecoderConfig(
    vocab_size=64,
    d_model=32,
    layer_types=("swa", "csa", "hca", "csa"),
    mlp_types=("dense",) * 4,
    n_heads=2,
    head_dim=16,
    rope_dim=8,
    window=8,
    csa_ratio=4,
    hca_ratio=8,
    index_heads=8,
    index_dim=8,
    index_topk=3,
    d_ff=64,
    chunk=16,
    block=8,
    init_scale=0.5,
)
FULL = TINY.replace(layer_types=("full",) * 2, mlp_types=("dense",) * 2)
WIDE = TINY.replace(
    d_model=512,
    layer_types=("swa", "csa", "hca"),
    mlp_types=("dense",) * 3,
    n_heads=4,
    head_dim=128,
    rope_dim=32,
    window=32,
    hca_ratio=32,
    index_dim=32,
    d_ff=1024,
    chunk=64,
    block=32,
    init_scale=0.02,
)
STEPS = 17  # 2 * m' + 1
CAPACITY = 128
ROW, MATE = 1, 0


class Bench:
    """A model, its weights, and the two ways to run a prompt in row ROW."""

    def __init__(self, config: DecoderConfig, capacity: int = CAPACITY):
        self.capacity = capacity
        self.model = models.build(config)
        self.params = self.model.init(jax.random.key(1))
        self.spec = self.model.cache_spec
        self.identity = Identity.of(self.spec, self.params, config, batch=2)

    def prompt(self, seed: int, n: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.model.config.vocab_size, n)

    def empty(self):
        return self.model.init_cache(batch=2, capacity=self.capacity, poison=True)

    def prefill(self, cache, tokens, mate=None):
        """Runs `tokens` in ROW and `mate` beside it. Returns (logits of ROW [n, V], cache)."""
        mate = np.zeros(0, int) if mate is None else mate
        both = np.zeros((2, max(len(tokens), len(mate))), np.int32)
        both[ROW, : len(tokens)], both[MATE, : len(mate)] = tokens, mate
        valid = np.array([len(mate), len(tokens)])
        logits, cache = self.model.prefill(self.params, both, cache, valid)
        return np.asarray(logits)[ROW, : len(tokens)], cache

    def finish(self, cache, tokens, mate=None, store=None):
        """Prefill of the rest (then published, if there is a store), and STEPS decode steps."""
        start = int(cache.length[ROW])
        logits, cache = self.prefill(cache, tokens[start:], mate)
        if store is not None:
            store.publish(tokens, cache, ROW)
        rows = [logits]
        for token in self.prompt(77, STEPS):
            step, cache = self.model.decode_step(self.params, np.full(2, token, np.int32), cache)
            rows.append(np.asarray(step)[ROW][None])
        return np.concatenate(rows), cache

    @functools.lru_cache(maxsize=32)  # noqa: B019 (a bench lives as long as the test run)
    def cold(self, seed: int, n: int):
        """Logits [n + STEPS, V] and cache of a run without any store."""
        return self.finish(self.empty(), self.prompt(seed, n), self.prompt(50, 23))

    def used(self, seed: int, n: int):
        """A cache whose rows other requests have used."""
        _, cache = self.finish(self.empty(), self.prompt(seed, n), self.prompt(seed + 1, 11))
        return cache

    def publish(self, store, seed: int, n: int):
        """A cold run that publishes at every point."""
        tokens, cache = self.prompt(seed, n), self.empty()
        with store.lookup(tokens) as lease:
            for stop in (*lease.checkpoint_points, n):
                rest = tokens[int(cache.length[ROW]) : stop]
                if len(rest):
                    _, cache = self.prefill(cache, rest)
                store.publish(tokens, cache, ROW, points=lease.checkpoint_points)

    def same_as_cold(self, seed: int, n: int, start: int, logits, cache) -> bool:
        want, reference = self.cold(seed, n)
        return np.array_equal(logits, want[start:]) and not differing(self.spec, cache, reference)


def differing(spec, cache, reference) -> list[str]:
    """Leaves whose live rows differ in ROW."""
    length = int(reference.length[ROW])
    assert int(cache.length[ROW]) == length
    found = []
    for slot in spec.slots():
        a, b = (np.asarray(x.leaf(slot))[:, ROW] for x in (cache, reference))
        if isinstance(slot.leaf.contract, Evidence):
            continue  # checked by the validator
        live = slot.leaf.live_rows(length, cache.capacity)
        if slot.leaf.row_count(cache.capacity):
            a, b = a[:, live], b[:, live]
        if a.tobytes() != b.tobytes():
            found.append(slot.path)
    for row in (cache, reference):
        assert validate.describe(spec, validate.evidence(spec, row, finite=True), ROW) == []
    return found


@functools.cache
def bench(name: str) -> Bench:
    configs = {"tiny": (TINY, 128), "full": (FULL, 128), "wide": (WIDE, 320)}
    return Bench(*configs[name])


@pytest.mark.parametrize("name", ["tiny", "full"])
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


def reset(b: Bench, cache, row: int):
    """An empty lease resets a row."""
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24)
    with store.lookup(np.zeros(0, int)) as lease:
        return store.restore(lease, cache, row)


@pytest.mark.parametrize("policy", ["full", "end", "fork", "zero"])
def test_a_b_a_in_one_slot_of_a_small_store(policy):
    b = bench("tiny")
    transfer = PrefixStore(b.spec, b.identity, host_bytes=1 << 24).transfer
    block = transfer.history_layout(1).nbytes
    checkpoint = transfer.checkpoint_layout.nbytes
    # Room for two of the three prompts.
    room = 22 * block + (8 if policy == "full" else 3) * checkpoint
    store = PrefixStore(b.spec, b.identity, host_bytes=room, policy=policy)
    cache, resumed = b.used(seed=5, n=40), []
    for seed, n in [(1, 89), (2, 75), (1, 89), (3, 100), (1, 89), (1, 50), (2, 75), (1, 89)]:
        tokens = b.prompt(seed, n)
        cache = reset(b, cache, MATE)
        with store.lookup(tokens) as lease:
            cache = store.restore(lease, cache, ROW)
            start = int(cache.length[ROW])
            if lease.replay:
                both = np.stack([tokens, tokens])
                rows = np.arange(2) == ROW
                cache = b.model.replay(b.params, both, cache, *lease.replay, rows=rows)
                assert int(cache.length[ROW]) == start
            parts = []
            for stop in lease.checkpoint_points:
                logits, cache = b.prefill(cache, tokens[int(cache.length[ROW]) : stop])
                parts.append(logits)
                store.publish(tokens, cache, ROW, points=lease.checkpoint_points)
        logits, cache = b.finish(cache, tokens, store=store)
        logits = np.concatenate([*parts, logits])
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
    found = validate.describe(b.spec, validate.evidence(b.spec, cache), ROW)
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
