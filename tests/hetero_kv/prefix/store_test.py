"""The store on a synthetic cache: what is restored is what a cold run would hold, bit by bit."""

import jax
import numpy as np
import pytest

from hetero_kv import state, validate
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.policy import Policy
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix.stores import (
    CAPACITY,
    PLENTY,
    SPEC,
    G,
    healthy,
    make,
    plain_metrics,
    prompt,
    publish_beside,
    serve,
    sizes,
)


def test_a_b_a():
    store, cache = make(), synthetic.empty(SPEC)
    a, b = prompt(1), prompt(2)
    lengths = []
    for tokens in (a, b, a, a[:50], b, a):
        cache, length = serve(store, cache, 0, tokens)
        lengths.append(length)
    assert lengths == [0, 0, 48, 48, 48, 48]


@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64])
def test_every_length_of_a_prompt(length):
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 1, prompt(1, length))
    cache, _ = serve(store, cache, 1, prompt(2, 37))
    cache, resumed = serve(store, cache, 1, prompt(1, length))
    assert resumed == SPEC.largest_boundary(length)
    longer = np.concatenate([prompt(1, length), prompt(3, 60)])[:CAPACITY]
    _, resumed = serve(store, cache, 0, longer)
    assert resumed == min(length // G * G, SPEC.largest_boundary(len(longer)))


@pytest.mark.parametrize("fork", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 59])
def test_forks_share_what_is_shared(fork):
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1, shared=fork))
    cache, resumed = serve(store, cache, 1, prompt(2, shared=fork))
    assert resumed == fork // G * G
    assert not synthetic.wrong_rows(SPEC, cache, 0, prompt(1, shared=fork))


def test_rows_do_not_disturb_each_other():
    store, cache = make(), synthetic.empty(SPEC, batch=3)
    for row in range(3):
        cache, _ = serve(store, cache, row, prompt(row))
    with store.lookup(prompt(0)) as lease:
        cache = store.restore(lease, cache, 2)
    for row, seed, length in ((0, 0, 60), (1, 1, 60), (2, 0, 48)):
        assert int(cache.length[row]) == length
        assert not synthetic.wrong_rows(SPEC, cache, row, prompt(seed))


LAYERS = (
    synthetic.COMPRESSED,
    synthetic.OVERLAPPING,
    synthetic.FULL,
    synthetic.RECURRENT,
)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: x.kind)
@pytest.mark.parametrize("chunk, block", [(16, 8), (8, 16), (12, 8)])
def test_every_kind_of_contract_alone(layer, chunk, block):
    spec = synthetic.only(layer, chunk=chunk, block=block)
    store, cache = make(spec), synthetic.empty(spec)
    for tokens in (prompt(1), prompt(2), prompt(1)):
        cache, length = serve(store, cache, 0, tokens, spec)
    assert length == spec.largest_boundary(60)
    store.clear()
    assert plain_metrics(store)["host_free_bytes"] == PLENTY and not len(store.catalog.index)


@pytest.mark.parametrize("length", [1, 8, 15, 16, 20, 24, 32, 40, 48])
def test_only_complete_exact_state_is_published(length):
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, length)
    grid = length // 16 * 16
    found = store.publish(tokens, cache)
    assert found.length == length
    assert found.blocks == found.new_blocks == grid // 8
    assert found.checkpoint == (length == grid and length > 0)
    again = store.publish(tokens, cache)
    assert (again.blocks, again.new_blocks) == (found.blocks, 0)
    assert again.checkpoint == found.checkpoint
    healthy(store)


@pytest.mark.parametrize("first", range(8, 64, 8))
def test_publishing_bit_by_bit_up_to_the_last_row(first):
    # The blocks that are read are padded to a power of two, which must not run over the end.
    spec, tokens = synthetic.everything(chunk=8, block=8), prompt(1, 64)
    store, cache = make(spec), synthetic.empty(spec)
    for stop in (first, 64):
        cache = synthetic.advance(spec, cache, 0, tokens, stop)
        assert store.publish(tokens, cache).blocks == stop // 8
    fresh = synthetic.empty(spec, capacity=65)
    with store.lookup(np.append(tokens, 1)) as lease:
        fresh = store.restore(lease, fresh)
    assert int(fresh.length[0]) == 64
    assert not synthetic.wrong_rows(spec, fresh, 0, tokens)


def test_state_off_the_grid_or_from_decode_is_left_out():
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 32)
    cache = synthetic.advance(SPEC, cache, 0, tokens, 48, on_grid=False)
    found = store.publish(tokens, cache)
    assert (found.blocks, found.checkpoint) == (4, False)
    assert store.explain(tokens).plan.resumable_length == 0


def test_checkpoints_only_at_points():
    store, tokens = make(policy="end"), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 32)
    assert not store.publish(tokens, cache).checkpoint
    assert store.publish(tokens, cache, points=(32,)).checkpoint
    cache = synthetic.advance(SPEC, cache, 0, tokens, 48)
    assert store.publish(tokens, cache).checkpoint


@pytest.mark.parametrize("name", ["entries_count", "keys_count", "window_pos", "tail_pos"])
def test_evidence_that_disagrees_stops_a_publish(name):
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 1, tokens, 32)
    slot = next(x for x in SPEC.slots() if x.name == name)
    component = validate.owner(SPEC, slot).leaf.component
    cache = synthetic.edit(cache, slot, (0, 1), 1, add=True)
    found = store.publish(tokens, cache, row=1)
    assert found.reasons[0] == "evidence" and component in found.reasons[1]
    assert plain_metrics(store)['publish_refused_total{reason="evidence"}'] == 1
    assert plain_metrics(store)["host_free_bytes"] == PLENTY
    assert not store.publish(tokens, cache, row=0).reasons  # another row is not affected


def test_a_cache_beyond_its_tokens_is_refused():
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 32)
    assert store.publish(tokens[:31], cache).reasons == ("length_beyond_tokens",)


def test_dead_rows_are_stored_in_canonical_form():
    # Two slots that differ only in stale bytes publish equal objects.
    found, spec = [], synthetic.everything(chunk=8, block=8)
    for seed in (5, 6):
        store, tokens = make(spec), prompt(1)
        cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(seed), 41)
        cache = jax.jit(lambda c: state.reset_row(spec, c, 0))(cache)
        store.publish(tokens, synthetic.advance(spec, cache, 0, tokens, 8))
        tier = store.catalog.tier
        found.append([tier.read(x.ticket, x.label).payload.buffer for x in store.catalog.groups()])
    assert len(found[0]) == 2
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_publishing_the_same_again_does_not_grow():
    store, cache = make(), synthetic.empty(SPEC)
    for _ in range(5):
        cache, _ = serve(store, cache, 0, prompt(1))
        assert len(store.catalog.groups()) == 6 + 3


@pytest.mark.parametrize("prefixes", [1.0, 1.3, 2.0, 3.7])
@pytest.mark.parametrize("policy", ["full", "end", "fork", "periodic:2"])
def test_far_too_small_a_store_is_never_wrong(prefixes, policy):
    block, checkpoint = sizes()
    store = make(host_bytes=int(prefixes * (2 * block + checkpoint)), policy=policy)
    cache, rng = synthetic.empty(SPEC), np.random.default_rng(0)
    for _ in range(20):
        seed, n = rng.integers(0, 3), rng.integers(1, 65)
        cache, _ = serve(store, cache, int(rng.integers(0, 2)), prompt(seed, 64, shared=20)[:n])
    pressure = ("evicted_groups_total", "publish_cut_total")
    assert sum(v for k, v in plain_metrics(store).items() if k.startswith(pressure)) > 5


def test_kinds_keep_their_shares():
    block, checkpoint = sizes()
    room = 4 * (2 * block + checkpoint)
    policy = Policy(checkpoint_share=2 * checkpoint / room)
    store, cache = make(host_bytes=room, policy=policy), synthetic.empty(SPEC)
    for seed in range(6):
        cache, _ = serve(store, cache, 0, prompt(seed))
    used = store.catalog.used
    assert 2 * checkpoint <= used[CHECKPOINT] <= 3 * checkpoint
    assert used[HISTORY] >= room - 3 * checkpoint - block


def test_eviction_is_leaf_first_and_spares_what_is_leased():
    block, checkpoint = sizes()
    store, cache = make(host_bytes=6 * block + 3 * checkpoint), synthetic.empty(SPEC)
    a = prompt(1, 49)
    cache, _ = serve(store, cache, 0, a)
    with store.lookup(a) as lease:
        assert lease.resumable_length == 48
        for seed in range(2, 5):
            cache, _ = publish_beside(store, cache, prompt(seed))
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(SPEC, cache, 0, a)
    for seed in range(2, 5):
        cache, _ = serve(store, cache, 0, prompt(seed))
    assert store.explain(a).plan.resumable_length < 48


def test_a_full_store_of_pinned_groups_refuses_and_stays_exact():
    block, checkpoint = sizes()
    store, cache = make(host_bytes=6 * block + 3 * checkpoint), synthetic.empty(SPEC)
    a = prompt(1, 49)
    cache, _ = serve(store, cache, 0, a)
    with store.lookup(a):
        cache, found = publish_beside(store, cache, prompt(2))
        while not found.reasons:
            cache, found = publish_beside(store, cache, prompt(2))
        assert found.reasons == ("no_room",)
    healthy(store)
    assert store.explain(a).plan.resumable_length >= 32
