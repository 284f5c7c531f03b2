"""Damage, recycled objects and shared memory: a shorter hit, never a wrong byte."""

import jax
import numpy as np
import pytest

from hetero_kv import state
from hetero_kv.contract import Evidence
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix.stores import (
    CAPACITY,
    SPEC,
    healthy,
    make,
    plain_metrics,
    prompt,
    publish_beside,
    raw,
    serve,
    stored,
)


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
        name = [x for x in plain_metrics(store) if x.startswith("dropped_total")]
        assert len(name) == 1 and "corrupt" in name[0] and "component" in name[0]
        cache, _ = serve(store, cache, 0, tokens)  # it heals
        assert store.explain(tokens).plan.resumable_length == 48


@pytest.mark.parametrize("kind, blocks, left", [(HISTORY, 3, 16), (CHECKPOINT, 6, 32)])
def test_a_stale_ticket_shortens_the_hit_and_raises_nothing(kind, blocks, left):
    store, cache, tokens = make(), synthetic.empty(SPEC), prompt(1)
    cache, _ = serve(store, cache, 0, tokens)
    group = stored(store, kind, blocks)
    store.catalog.tier._generations[group.ticket.slot] += 1  # recycled behind the catalog's back
    with store.lookup(tokens) as lease:
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == left
        assert any(x.code == "stale" for x in lease.reasons)
    assert plain_metrics(store)[f'stale_tickets_total{{kind="{kind}"}}'] == 1
    assert store.explain(tokens).plan.resumable_length == left  # and it does not come back


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


def test_verify_finds_and_drops_what_is_damaged():
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    raw(store, stored(store, HISTORY, 3))[5] ^= 1
    (found,) = store.verify()
    assert found.startswith("history at 24: corrupt")
    healthy(store)
    assert store.explain(prompt(1)).plan.resumable_length == 16


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
    cache, _ = publish_beside(store, cache, b)  # takes over the same slots
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
        assert plain_metrics(store)["leases_open"] == 1
        assert all(x.pins == 1 for x in lease.groups())
        raise KeyError
    assert plain_metrics(store)["leases_open"] == 0
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
    numbers = [np.int32(0)] * 3
    compiled = fresh.write.lower(shapes, *numbers, history, {}).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert compiled.memory_analysis().alias_size_in_bytes >= size
