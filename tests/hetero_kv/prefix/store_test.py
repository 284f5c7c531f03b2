"""The store on a synthetic cache: what is restored is what a cold run would hold, bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state, validate
from hetero_kv.contract import Evidence, History
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.policy import Never, Policy
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic

SPEC = synthetic.everything()  # B = 8, G = 16
G = SPEC.granularity
PLENTY = 1 << 20
CAPACITY = 64


def identity(spec=SPEC, **fields):
    return Identity.of(spec, {"w": jnp.arange(3.0)}, {"name": "synthetic"}, batch=2, **fields)


def make(spec=SPEC, host_bytes=PLENTY, **options):
    return PrefixStore(spec, identity(spec), host_bytes=host_bytes, **options)


def prompt(seed, n=60, shared=0):
    """i32[n]; the first `shared` tokens are the same for every seed."""
    head = np.random.default_rng(999).integers(0, 1000, shared)
    return np.concatenate([head, np.random.default_rng(seed).integers(0, 1000, n - shared)])


def healthy(store):
    assert store.verify() == []
    metrics = store.metrics()
    used = sum(metrics[f'host_used_bytes{{kind="{x}"}}'] for x in (HISTORY, CHECKPOINT))
    assert metrics["host_free_bytes"] + used == metrics["host_capacity_bytes"]


def serve(store, cache, row, tokens, spec=SPEC, publish=True, **who):
    """One request as an engine would run it. Returns (cache, restored length)."""
    with store.lookup(tokens, **who) as lease:
        cache = store.restore(lease, cache, row)
        length = int(cache.length[row])
        assert length == lease.resumable_length
        assert not synthetic.wrong_rows(spec, cache, row, tokens)
        for stop in (*lease.checkpoint_points, len(tokens)):
            if stop > int(cache.length[row]):
                cache = synthetic.advance(spec, cache, row, tokens, stop)
            if publish:
                store.publish(tokens, cache, row, points=lease.checkpoint_points, **who)
    assert not synthetic.wrong_rows(spec, cache, row, tokens)
    assert validate.evidence(spec, cache).ok.all()
    healthy(store)
    assert store.metrics()["leases_open"] == 0
    return cache, length


# -- reuse equals recompute ------------------------------------------------------------------------


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
    assert store.metrics()["host_free_bytes"] == PLENTY and not len(store.catalog.index)


# -- what is published -----------------------------------------------------------------------------


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
    assert store.metrics()['publish_refused_total{reason="evidence"}'] == 1
    assert store.metrics()["host_free_bytes"] == PLENTY
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


# -- tiny budgets ----------------------------------------------------------------------------------


def sizes(spec=SPEC):
    store = make(spec)
    block = store.transfer.history_layout(1).nbytes
    return block, store.transfer.checkpoint_layout.nbytes


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
    assert sum(v for k, v in store.metrics().items() if k.startswith(pressure)) > 5


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
            cache, _ = synthetic_only(store, cache, prompt(seed))
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(SPEC, cache, 0, a)
    for seed in range(2, 5):
        cache, _ = serve(store, cache, 0, prompt(seed))
    assert store.explain(a).plan.resumable_length < 48


def synthetic_only(store, cache, tokens):
    """Publishes a cold prompt from row 1 while leases are open."""
    cache = jax.jit(lambda c: state.reset_row(SPEC, c, 1))(cache)
    cache = synthetic.advance(SPEC, cache, 1, tokens, 48)
    return cache, store.publish(tokens, cache, 1)


def test_a_full_store_of_pinned_groups_refuses_and_stays_exact():
    block, checkpoint = sizes()
    store, cache = make(host_bytes=6 * block + 3 * checkpoint), synthetic.empty(SPEC)
    a = prompt(1, 49)
    cache, _ = serve(store, cache, 0, a)
    with store.lookup(a):
        cache, found = synthetic_only(store, cache, prompt(2))
        while not found.reasons:
            cache, found = synthetic_only(store, cache, prompt(2))
        assert found.reasons == ("no_room",)
    healthy(store)
    assert store.explain(a).plan.resumable_length >= 32


# -- faults ----------------------------------------------------------------------------------------


def stored(store, kind, blocks):
    return next(x for x in store.catalog.groups() if x.kind == kind and x.node.depth == blocks)


def raw(store, group):
    return store.catalog.tier._payloads[group.ticket.slot].buffer


@pytest.mark.parametrize(
    "kind, blocks, left", [(HISTORY, 1, 0), (HISTORY, 3, 16), (HISTORY, 6, 32), (CHECKPOINT, 6, 32)]
)
def test_a_flipped_bit_anywhere_shortens_the_hit(kind, blocks, left):
    cache, tokens = synthetic.empty(SPEC), prompt(1)
    for part in range(12):
        store = make()
        cache, _ = serve(store, cache, 0, tokens)
        buffer = raw(store, stored(store, kind, blocks))
        buffer[part * (len(buffer) - 1) // 11] ^= 1 << (part % 8)
        with store.lookup(tokens) as lease:
            assert lease.resumable_length == 48
            cache = store.restore(lease, cache, 0)
            assert int(cache.length[0]) == lease.resumable_length == left
            assert lease.candidate_length == 48
            assert any(x.code == "corrupt" for x in lease.reasons)
            assert lease.checkpoint_points == tuple(range(left + 16, 61, 16))
        assert not synthetic.wrong_rows(SPEC, cache, 0, tokens)
        healthy(store)
        name = [x for x in store.metrics() if x.startswith("dropped_total")]
        assert len(name) == 1 and "corrupt" in name[0] and "component" in name[0]
        cache, _ = serve(store, cache, 0, tokens)  # it heals
        assert store.explain(tokens).plan.resumable_length == 48


def test_two_faults_end_in_a_cold_start():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    for blocks in (4, 6):
        raw(store, stored(store, CHECKPOINT, blocks))[0] ^= 1
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == 0
        assert [x.code for x in lease.reasons].count("corrupt") == 2
        assert set(lease.routes.values()) == {"none"}
    _, length = serve(store, cache, 0, tokens)
    assert length == 16  # what was left


def test_swapped_payloads_are_noticed():
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    cache, _ = serve(store, cache, 0, prompt(2))
    payloads = store.catalog.tier._payloads
    a, b = (
        x.ticket.slot for x in store.catalog.groups() if x.kind == CHECKPOINT and x.node.depth == 6
    )
    payloads[a], payloads[b] = payloads[b], payloads[a]
    # Both are whole and have true checksums of their own; only their owners are exchanged.
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 32
    assert not synthetic.wrong_rows(SPEC, cache, 0, prompt(1))


def test_a_checkpoint_with_positions_of_another_length_is_refused():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    group = stored(store, CHECKPOINT, 6)
    payload = store.catalog.tier._payloads[group.ticket.slot]
    section = next(x for x in payload.layout.sections if isinstance(x.slot.leaf.contract, Evidence))
    buffer = payload.buffer.copy()
    section.view(buffer)[...] += 1
    forged = type(payload).seal(payload.layout, group.label, buffer)
    store.catalog.tier._payloads[group.ticket.slot] = forged
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, 0)
        assert "evidence" in {x.code for x in lease.reasons}
    assert int(cache.length[0]) == 32


def test_objects_recycled_between_lookup_and_restore():
    store, cache = make(), synthetic.empty(SPEC)
    a, b = prompt(1), prompt(2)
    cache, _ = serve(store, cache, 0, a)
    lease = store.lookup(a)
    slots = {x.ticket.slot for x in lease.groups()}
    store.clear()
    cache, _ = synthetic_only(store, cache, b)  # takes over the same slots
    assert slots & {x.ticket.slot for x in store.catalog.groups()}
    cache = store.restore(lease, cache, 0)
    lease.release()
    assert int(cache.length[0]) == 0
    assert "stale" in {x.code for x in lease.reasons}
    healthy(store)
    assert not synthetic.wrong_rows(SPEC, cache, 0, a)
    _, length = serve(store, cache, 0, b)
    assert length == 48


def test_a_lease_is_released_after_an_error():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    with pytest.raises(KeyError), store.lookup(tokens) as lease:
        assert store.metrics()["leases_open"] == 1
        assert all(x.pins == 1 for x in lease.groups())
        raise KeyError
    assert store.metrics()["leases_open"] == 0
    assert not any(x.pins for x in store.catalog.groups())
    lease.release()  # again is harmless
    with pytest.raises(ValueError, match="released"):
        store.restore(lease, cache)
    healthy(store)


@pytest.mark.parametrize("row", [-1, 2, 7])
def test_a_row_outside_the_batch_is_an_error_not_a_neighbour(row):
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    with pytest.raises(ValueError, match="batch"):
        store.publish(tokens, cache, row)
    with store.lookup(tokens) as lease, pytest.raises(ValueError, match="batch"):
        store.restore(lease, cache, row)


def test_a_cache_that_is_too_small_takes_what_fits():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    small = synthetic.empty(SPEC, batch=1, capacity=40)
    with store.lookup(tokens) as lease:
        small = store.restore(lease, small)
        assert "capacity" in {x.code for x in lease.reasons}
    assert int(small.length[0]) == 32
    assert not synthetic.wrong_rows(SPEC, small, 0, tokens)


# -- nothing aliases -------------------------------------------------------------------------------


def test_a_cache_may_be_donated_and_overwritten_after_publish():
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC, batch=1), 0, tokens, 48)
    store.publish(tokens, cache)
    scribble = jax.jit(lambda c: jax.tree.map(lambda x: x * 0 + 7, c), donate_argnums=0)
    overwritten = scribble(cache)
    assert cache.length.is_deleted()
    jax.block_until_ready(overwritten)
    fresh = synthetic.empty(SPEC, batch=1)
    with store.lookup(prompt(1)) as lease:
        fresh = store.restore(lease, fresh)
    assert int(fresh.length[0]) == 48 and not synthetic.wrong_rows(SPEC, fresh, 0, tokens)


def test_the_store_may_be_overwritten_after_restore():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, 0)
        for group in store.catalog.groups():
            raw(store, group)[:] = 0xFF
    assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(SPEC, cache, 0, tokens)


def test_restored_and_donated_caches_leave_the_store_alone():
    store, cache, tokens = make(), synthetic.empty(SPEC, batch=1), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    before = [raw(store, x).copy() for x in store.catalog.groups()]
    with store.lookup(tokens) as lease:
        old = cache
        cache = store.restore(lease, cache)
        assert old.length.is_deleted()  # donated
    scribble = jax.jit(lambda c: jax.tree.map(lambda x: x * 0 + 7, c), donate_argnums=0)
    jax.block_until_ready(scribble(cache))
    for want, group in zip(before, store.catalog.groups(), strict=True):
        np.testing.assert_array_equal(want, raw(store, group))


def test_restore_donates_in_place_and_compiles_once_per_bucket():
    store, cache = make(), synthetic.empty(SPEC)
    fresh = type(store.transfer)(SPEC)  # its own compile caches
    store.transfer = fresh
    cache, _ = serve(store, cache, 0, prompt(1, 64))
    for length in (64, 64, 50, 40, 33, 33, 20, 20, 3):
        with store.lookup(prompt(1, 64)[:length]) as lease:
            cache = store.restore(lease, cache, 1)
    # 2, 4, (6 and) 8 blocks and none.
    assert fresh.write._cache_size() == 4
    assert fresh._inspect._cache_size() == 1
    shapes = state.abstract(SPEC, 2, CAPACITY)
    history = fresh.stage_history([], CAPACITY)
    compiled = fresh.write.lower(shapes, np.int32(0), np.int32(0), history, {}).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


# -- tenants, identities, odd requests -------------------------------------------------------------


def test_tenants_never_see_each_other():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens, tenant="a")
    for other in ("b", "", "A", "a\0"):
        with store.lookup(tokens, tenant=other) as lease:
            assert lease.candidate_length == lease.resumable_length == 0
            assert [x.code for x in lease.reasons] == ["no_match"]
    cache, length = serve(store, cache, 0, tokens, tenant="a")  # the positive control
    assert length == 48
    cache, length = serve(store, cache, 1, tokens, tenant="b")
    assert length == 0


def test_adapters_and_media_never_mix():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    a = {"adapter": "a" * 64}
    cache, _ = serve(store, cache, 0, tokens, extra=a)
    for other in ({}, {"adapter": "b" * 64}, {**a, "media": [(0, 4, "c" * 64)]}):
        assert store.explain(tokens, extra=other).plan.candidate_length == 0
    _, length = serve(store, cache, 0, tokens, extra=a)
    assert length == 48


def test_what_is_not_cacheable_runs_cold_and_says_why():
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    extra = {"lora": "x"}
    cache, length = serve(store, cache, 0, tokens, extra=extra)
    cache, length = serve(store, cache, 0, tokens, extra=extra)
    assert length == 0
    assert store.publish(tokens, cache, extra=extra).reasons == ("not_cacheable",)
    with store.lookup(tokens, extra=extra) as lease:
        assert [x.code for x in lease.reasons] == ["not_cacheable"]
        assert "lora" in str(lease.reasons[0])
    with store.lookup([[1], [2, 3]]) as lease:
        assert lease.resumable_length == 0
    assert not store.catalog.groups()


def test_a_store_of_other_weights_matches_nothing():
    spec, tokens = SPEC, prompt(1)
    one = identity()
    other = dataclasses.replace(one, weights="0" * 64)
    assert one.digest != other.digest
    store = make()
    serve(store, synthetic.empty(SPEC), 0, tokens)
    store.identity = other  # an in-place weight update
    assert store.explain(tokens).plan.candidate_length == 0
    store.identity = one
    assert store.explain(tokens).plan.resumable_length == spec.largest_boundary(60)


def test_colliding_keys_are_misses():
    # With 4 bits nearly every key collides; contents and parents are compared, so it is harmless.
    store = make(digest=lambda message: bytes([sum(message) % 16]))
    cache = synthetic.empty(SPEC)
    hits = 0
    for seed in (1, 2, 3, 1, 2, 3, 1):
        cache, length = serve(store, cache, 0, prompt(seed))
        hits += length > 0
    assert store.metrics()['publish_cut_total{reason="collision"}'] > 0
    assert hits  # whoever came first is served


# -- replay, sizes only, upkeep --------------------------------------------------------------------


def test_replay_plan():
    spec = synthetic.only(synthetic.COMPRESSED, chunk=8, block=8)
    assert spec.replay_length == 8
    store, cache, tokens = make(spec, policy="zero"), synthetic.empty(spec), prompt(1)
    cache = synthetic.advance(spec, cache, 0, tokens, 56)
    found = store.publish(tokens, cache)
    assert (found.blocks, found.checkpoint) == (7, False)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(2), 60)
    with store.lookup(tokens) as lease:
        assert (lease.resumable_length, lease.replay) == (56, (48, 56))
        assert lease.routes["windows"] == lease.routes["tails"] == "replay"
        assert lease.routes["csa entries"] == "host"
        cache = store.restore(lease, cache)
    # Nothing vouches for windows and tails until the replay has run.
    wrong = validate.describe(spec, validate.evidence(spec, cache), 0)
    assert wrong == ["windows: positions", "tails: positions"]
    metrics = store.metrics()
    assert metrics["replay_tokens_total"] == 8 and metrics["restored_tokens_total"] == 48


def test_metrics_add_up():
    store, cache = make(), synthetic.empty(SPEC)
    for tokens in (prompt(1), prompt(1), np.concatenate([prompt(1)[:20], prompt(2)[20:]])):
        cache, _ = serve(store, cache, 0, tokens)
    metrics = store.metrics()
    assert metrics["lookups_total"] == metrics["restores_total"] == 3
    assert metrics["prompt_tokens_total"] == 180
    assert metrics["resumable_tokens_total"] == metrics["restored_tokens_total"] == 48 + 16
    assert metrics["candidate_tokens_total"] == 48 + 16
    total = sum(v for k, v in metrics.items() if k.startswith("restored_bytes_total"))
    block, checkpoint = sizes()
    first = store.transfer.history_layout(0).nbytes
    assert total == 2 * first + (5 + 1) * block + 2 * checkpoint


def test_explain():
    store, cache, tokens = make(policy="end"), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    found = store.explain(tokens[:40])
    assert found.plan.candidate_length == 32 and found.plan.resumable_length == 0
    told = {x.component for x in found.plan.reasons if x.code == "no_checkpoint"}
    assert told == {"windows", "tails", "recurrent state"}
    text = str(found)
    assert "recurrent state: 32 -> 0 (no_checkpoint)" in text and "shortest 16" in text
    assert store.metrics()["lookups_total"] == 1  # explaining is not looking up


def test_flush_clear_close():
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    store.flush()
    store.clear()
    healthy(store)
    assert store.metrics()["host_free_bytes"] == PLENTY
    lease = store.lookup(prompt(1))
    store.close()
    lease.release()
    store.close()
    for call in (store.flush, store.clear, store.verify, lambda: store.lookup(prompt(1))):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_configurations_that_cannot_work_fail_at_the_start():
    block, checkpoint = sizes()
    with pytest.raises(ValueError, match="disk tier"):
        make(disk_dir="somewhere")
    with pytest.raises(ValueError, match="disk tier"):
        make(disk_bytes=5)
    with pytest.raises(ValueError, match="best possible hit is 0"):
        make(host_bytes=2 * block + checkpoint - 64)
    with pytest.raises(ValueError, match="best possible hit is 0"):
        make(host_bytes=0)
    with pytest.raises(ValueError, match="best possible hit is 0"):
        make(policy="never")
    with pytest.raises(ValueError, match="best possible hit is 0"):
        make(policy="zero")  # recurrent state cannot be replayed
    with pytest.raises(ValueError, match="block"):
        PrefixStore(SPEC, identity(synthetic.everything(block=16)), host_bytes=PLENTY)
    make(synthetic.only(synthetic.FULL), policy="never")  # nothing to checkpoint


# -- the baseline ----------------------------------------------------------------------------------


def after_another(store_type, **options):
    """A hit at 56 of prompt 1 in a slot that prompt 2 has used."""
    store = store_type(SPEC, identity(), host_bytes=PLENTY, **options)
    cache = synthetic.empty(SPEC)
    cache = synthetic.advance(SPEC, cache, 0, prompt(1), 60)
    cache = cache.replace(grid_length=cache.length)  # all 7 blocks
    store.publish(prompt(1), cache)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, prompt(2), 41)
    old = jax.tree.map(np.array, cache)
    with store.lookup(prompt(1)) as lease:
        assert lease.candidate_length == lease.resumable_length == 56
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == int(cache.grid_length[0]) == 56
    return store, old, cache


@pytest.mark.parametrize("kind", ["stale", "zeroed"])
def test_hash_only_restores_the_kv_and_nothing_else(kind):
    _, old, cache = after_another(HashOnlyStore, kind=kind)
    wrong = {x.split("[")[0] for x in synthetic.wrong_rows(SPEC, cache, 0, prompt(1))}
    names = {x.path: x.name for x in SPEC.slots()}
    assert {names[x] for x in wrong} == {
        "keys",
        "window",
        "window_pos",
        "tail",
        "tail_pos",
        "state",
        "conv",
    }
    for slot in SPEC.slots():
        have, before = np.asarray(cache.leaf(slot)), np.asarray(old.leaf(slot))
        np.testing.assert_array_equal(have[:, 1], before[:, 1])  # the neighbour
        if slot.name in ("keys", "window", "tail", "state", "conv"):
            want = before[:, 0] if kind == "stale" else np.zeros_like(before[:, 0])
            np.testing.assert_array_equal(have[:, 0], want)
    # The counters say that all is well, the positions do not.
    found = validate.describe(SPEC, validate.evidence(SPEC, cache), 0)
    assert found == ["windows: positions", "tails: positions"]


def test_hash_only_is_right_where_kv_is_all_there_is():
    spec = synthetic.only(synthetic.FULL)
    store = HashOnlyStore(spec, identity(spec), host_bytes=PLENTY)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(1), 48)
    store.publish(prompt(1), cache)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(2), 41)
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(spec, cache, 0, prompt(1))
    with store.lookup(prompt(3)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 0


def test_hash_only_chosen_components():
    _, _, cache = after_another(HashOnlyStore, components=("csa entries", "csa index keys"))
    wrong = {x.split("[")[0] for x in synthetic.wrong_rows(SPEC, cache, 0, prompt(1))}
    names = {x.path: x.name for x in SPEC.slots()}
    assert {"kv", "nsa"} <= {names[x] for x in wrong}
    assert not {"entries", "keys"} & {names[x] for x in wrong}
    for bad in (dict(components=("windows",)), dict(kind="shiny")):
        with pytest.raises(ValueError):
            HashOnlyStore(SPEC, identity(), host_bytes=PLENTY, **bad)


def test_hash_only_survives_damage():
    store, _, cache = after_another(HashOnlyStore)
    raw(store, stored(store, HISTORY, 3))[0] ^= 1
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 16
    healthy(store)


def test_hash_only_needs_no_checkpoints():
    store, _, _ = after_another(HashOnlyStore)
    assert {x.kind for x in store.catalog.groups()} == {HISTORY}
    assert isinstance(store.policy.checkpoints, Never)
    assert {x.leaf.component for x in SPEC.slots() if isinstance(x.leaf.contract, History)} - set(
        store.components
    ) == {"csa index keys"}
