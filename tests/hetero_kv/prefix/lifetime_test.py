"""Races, aborts, tiers that fail and caches that go away: faults of lifetimes, layouts, padding.

The table of all kinds of faults is in fault_table_test.py.
"""

import errno
import hashlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state
from hetero_kv.contract import CacheSpec, Segment
from hetero_kv.prefix.disk.tier import SMALLEST
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores, world
from tests.hetero_kv.prefix.world import CAPACITY, PLENTY, PROMPTS, SPEC, WHO

A, OTHER, _ = WHO
STEM = PROMPTS[0]
BLOCK, STATE = world.sizes()


def before_reads(store, monkeypatch, action):
    """Calls `action(n)` at the n-th read from host memory, after its ticket was looked up."""
    tier, count = store.catalog.tier, iter(range(1 << 30))
    original = type(tier).read

    def read(ticket, label):
        action(next(count))
        return original(tier, ticket, label)

    monkeypatch.setattr(tier, "read", read)


# -- F: races, lifetimes, aborts ---------------------------------------------------------------


def test_f1_pressure_during_a_restore_takes_nothing_that_is_promised(monkeypatch):
    store = world.opened(host_bytes=12 * BLOCK + 4 * STATE)
    world.published(store, A, STEM, 24)
    before_reads(store, monkeypatch, lambda n: world.published(store, OTHER, PROMPTS[2 * n + 2]))
    _, length, _ = world.restored(store, A, STEM[:25])
    assert length == 24
    monkeypatch.undo()
    assert world.total(store, "evicted_groups_total") > 0
    world.healthy(store)


def test_f2_promotion_out_of_a_full_disk_into_full_memory(tmp_path):
    store = world.opened(tmp_path, host_bytes=4 * BLOCK + STATE, disk_bytes=SMALLEST + (1 << 15))
    for tokens in PROMPTS[:6]:
        world.published(store, A, tokens)
        store.flush()
    assert store.catalog.tier.free < STATE
    hits = 0
    for tokens in PROMPTS[:6] * 2:
        _, length, _ = world.restored(store, A, tokens)
        hits += length > 0
        world.healthy(store)
    assert hits and world.total(store, "promoted_groups_total")


def test_f6_a_cache_may_go_while_its_groups_wait_to_be_written(tmp_path):
    store = world.opened(tmp_path)
    told = world.contents(A, STEM)
    cache = synthetic.advance(SPEC, state.init(SPEC, 1, CAPACITY), 0, told, 32)
    assert store.publish(STEM, cache, **A.arguments).checkpoint
    assert store.disk.ledger().queued > 0
    scribble = jax.jit(lambda c: jax.tree.map(lambda x: x * 0 + 7, c), donate_argnums=0)
    jax.block_until_ready(scribble(cache))
    assert cache.length.is_deleted()
    assert store.flush().ok
    store.close()
    assert world.restored(world.opened(tmp_path), A, STEM)[1] == 32


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE])
def test_f8_g2_an_unreadable_tier_costs_the_hit_and_is_not_asked_for_ever(tmp_path, error):
    store = world.opened(tmp_path)
    world.published(store, A, STEM)
    store.close()
    files = world.Files()
    files._error = error
    store = world.opened(tmp_path, files)
    files.seen.clear()
    with world.failing(files, "read"):
        for turn in range(4):
            cache, length, lease = world.restored(store, A, STEM)
            assert length == 0
            if not turn:
                assert "unreadable" in {x.code for x in lease.reasons}
                assert lease.candidate_length == 36
    # The first request reads one object, and one more for its shorter plan; the later ones, what
    # is left of the prefix: nobody tries again what has failed.
    assert files.seen["read"] <= 2 * 4
    assert world.total(store, "disk_read_failures_total") == files.seen["read"]
    assert world.total(store, "replans_total") <= 2 * 4
    world.healthy(store)
    world.published(store, A, STEM)
    assert world.restored(store, A, STEM, cache)[1] == 32


def test_g2_a_store_that_always_fails_ends_in_a_cold_start_after_one_retry(monkeypatch):
    store, reads = world.opened(), []
    world.published(store, A, STEM)

    def damage(n):
        reads.append(n)
        for group in store.catalog.groups():
            if group.kind == CHECKPOINT and group.label not in hurt:
                hurt.add(group.label)
                world.flip(store, group, 0)

    hurt = set()
    before_reads(store, monkeypatch, damage)
    _, length, lease = world.restored(store, A, STEM)
    assert length == 0 and not lease.groups()
    assert len(reads) == 8 + 1 + 6 + 1  # the prefix of 32 tokens, and the one of 24
    assert [x.code for x in lease.reasons].count("corrupt") == 2
    world.healthy(store)


@pytest.mark.parametrize("event", ["clear", "discard"])
def test_f9_a_reader_slower_than_deletion_gets_nothing(monkeypatch, event):
    store = world.opened()
    world.published(store, A, STEM)
    expected = {"clear": 0, "discard": 16}[event]
    done = []

    def act(n):
        if n == 3 and not done:  # while the fourth block is copied
            done.append(n)
            if event == "clear":
                store.clear()
                world.published(store, OTHER, STEM)  # takes over the slots
            else:
                store.catalog.discard(stores.stored(store, HISTORY, 5))

    before_reads(store, monkeypatch, act)
    _, length, _ = world.restored(store, A, STEM)
    assert done and length == expected
    world.healthy(store)


@pytest.mark.parametrize("step", ["inspect", "read_history", "read_checkpoint"])
@pytest.mark.parametrize("disk", [False, True])
def test_f10_a_publish_that_dies_at_any_step_leaves_nothing_behind(
    tmp_path, monkeypatch, step, disk
):
    store = world.opened(tmp_path if disk else None)
    world.published(store, A, STEM, 16)

    def fails(*arguments):
        raise MemoryError(step)

    with monkeypatch.context() as patch:
        patch.setattr(store.transfer, step, fails)
        with pytest.raises(MemoryError):
            store.publish(STEM, world.cold(A, STEM, 32), **A.arguments)
    world.healthy(store)
    assert not any(x.pins for x in store.catalog.groups())
    assert world.restored(store, A, STEM)[1] == 16
    world.published(store, A, STEM)
    assert world.restored(store, A, STEM)[1] == 32


@pytest.mark.parametrize("call", ["place", "place_run", "read"])
def test_f10_a_tier_that_raises_leaves_the_ledger_exact(monkeypatch, call):
    store = world.opened()
    world.published(store, A, STEM, 16)
    with monkeypatch.context() as patch:

        def fails(*arguments):
            raise MemoryError(call)

        patch.setattr(store.catalog.tier, call, fails)
        with pytest.raises(MemoryError):
            if call == "read":
                world.restored(store, A, STEM)
            else:
                store.publish(STEM, world.cold(A, STEM, 32), **A.arguments)
    world.healthy(store)
    assert world.totals(store)["leases_open"] == 0
    assert not any(x.pins for x in store.catalog.groups())
    world.published(store, A, STEM)
    assert world.restored(store, A, STEM)[1] == 32


def test_f11_a_thousand_requests_cancelled_before_and_during_their_restore(monkeypatch):
    store = world.opened()
    world.published(store, A, STEM)
    free = store.catalog.tier.free
    cache = state.init(SPEC, 2, CAPACITY)
    original = store.transfer.stage_checkpoint
    for turn in range(1000):
        with pytest.raises(KeyboardInterrupt), store.lookup(STEM, **A.arguments) as lease:
            if turn % 10 == 0:

                def cancelled(*arguments):
                    raise KeyboardInterrupt

                store.transfer.stage_checkpoint = cancelled
                store.restore(lease, cache)
            raise KeyboardInterrupt
        store.transfer.stage_checkpoint = original
    assert world.totals(store)["leases_open"] == 0
    assert not any(x.pins for x in store.catalog.groups())
    assert store.catalog.tier.free == free
    world.healthy(store)
    assert world.restored(store, A, STEM)[1] == 32
    store.clear()
    assert store.catalog.tier.free == PLENTY


def test_f13_what_went_to_disk_and_is_computed_again_has_one_owner(tmp_path):
    store = world.opened(tmp_path)
    world.published(store, A, STEM)
    store.flush()
    many, live = len(store.catalog.groups()), store.disk.ledger().live
    for group in store.catalog.groups():
        assert store.catalog.leave_host(group, group.ticket)
    assert store.catalog.tier.free == PLENTY
    for _ in range(3):
        world.published(store, A, STEM)
        world.healthy(store)
        assert len(store.catalog.groups()) == many and store.disk.ledger().live == live
    assert world.restored(store, A, STEM)[1] == 32
    world.healthy(store)


def test_f15_a_storm_of_cancelled_requests_does_not_touch_a_bystander():
    store = world.opened(host_bytes=30 * BLOCK + 8 * STATE)
    world.published(store, A, STEM)
    stop, failures = threading.Event(), []

    def storm(seed):
        draw = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                tokens = PROMPTS[2 * draw.integers(len(PROMPTS) // 2)]
                lease = store.lookup(tokens, **A.arguments)
                store.publish(tokens[:16], world.cold(A, tokens[:16], 16), **A.arguments)
                lease.release()
        except Exception as error:  # for the main thread
            failures.append(error)

    threads = [threading.Thread(target=storm, args=(x,)) for x in range(4)]
    for thread in threads:
        thread.start()
    try:
        cache = None
        for _ in range(40):
            cache, _, _ = world.restored(store, A, STEM, cache)  # compares every byte
            world.published(store, A, STEM)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    world.healthy(store)
    assert world.totals(store)["leases_open"] == 0


def test_f16_churn_larger_than_the_store_brings_no_phantom_back():
    store = world.opened(host_bytes=14 * BLOCK + 4 * STATE)
    for _ in range(5):
        world.published(store, A, STEM)
        assert world.restored(store, A, STEM)[1] == world.restored(store, A, STEM)[1] > 0
        for tokens in PROMPTS[1:9]:
            world.published(store, OTHER, tokens + 7)  # pressure
        assert world.restored(store, A, STEM)[1] <= 32
        world.healthy(store)


def test_f18_cleaning_up_after_a_failed_read_spares_what_was_published_since(monkeypatch):
    store = world.opened()
    world.published(store, A, STEM)
    tier, group = store.catalog.tier, stores.stored(store, CHECKPOINT, 8)
    original, done = type(tier).read, []

    def read(ticket, label):
        fetched = original(tier, ticket, label)
        if ticket == group.ticket and not done:
            done.append(ticket)
            store.catalog.discard(group)  # someone else was faster, and it was computed again
            world.published(store, A, STEM)
            return type(fetched)(None, "corrupt", "windows")
        return fetched

    monkeypatch.setattr(tier, "read", read)
    world.restored(store, A, STEM)
    monkeypatch.undo()
    assert done and world.restored(store, A, STEM)[1] == 32
    assert stores.stored(store, CHECKPOINT, 8) is not group
    world.healthy(store)


# -- G, H: files and layouts -------------------------------------------------------------------


def test_g7_layers_in_another_order_are_another_format(tmp_path):
    options = dict(disk_dir=tmp_path, disk_bytes=PLENTY)
    layers = (synthetic.FULL, synthetic.OVERLAPPING, synthetic.RECURRENT)
    for turn, order in enumerate((layers, layers[::-1], layers)):
        spec = CacheSpec((Segment(1, order),), chunk=8, block=8)
        store, cache = stores.make(spec, **options), synthetic.empty(spec)
        cache, length = stores.serve(store, cache, 0, STEM, spec)
        assert length == (32 if turn == 2 else 0)
        store.close()


@pytest.mark.parametrize("capacity", [33, 40, 64, 100])
def test_h1_h2_a_cache_of_another_size_gets_every_row_at_its_position(capacity):
    store = world.opened()
    world.published(store, A, STEM)
    cache = state.init(SPEC, 3, capacity)
    with store.lookup(STEM, **A.arguments) as lease:
        cache = store.restore(lease, cache, 2)
    told = world.contents(A, STEM)
    assert world.stands(cache, 2) == 32
    assert not synthetic.wrong_rows(SPEC, cache, 2, told)
    assert world.stands(cache, 0) == world.stands(cache, 1) == 0
    # And what such a cache publishes is the same again.
    again = world.opened()
    again.publish(STEM, cache, 2, **A.arguments)
    for kind, depth in ((HISTORY, 3), (HISTORY, 8), (CHECKPOINT, 8)):
        one, other = (stores.raw(x, stores.stored(x, kind, depth)) for x in (store, again))
        np.testing.assert_array_equal(one, other)


def test_h4_the_serial_form_of_every_leaf_is_pinned():
    """A reader of another version must not take these bytes for another layout."""
    store, found = world.opened(), hashlib.sha256()
    world.published(store, A, STEM)
    for group in sorted(store.catalog.groups(), key=lambda x: (x.node.depth, x.kind)):
        payload = store.catalog.tier._payloads[group.ticket.slot]
        for section in payload.layout.sections:
            name = f"{section.slot.path} {section.offset} {section.shape} {section.dtype}"
            found.update(name.encode())
        found.update(payload.buffer)
    assert found.hexdigest()[:16] == "4b43a98d097aa22a"


def test_h6_parts_of_every_kind_of_component_are_copied_alone():
    layers = (synthetic.COMPRESSED, synthetic.OVERLAPPING, synthetic.FULL, synthetic.RECURRENT)
    for layer in layers:
        spec = CacheSpec((Segment(1, (layer,)),), chunk=8, block=8)
        store, cache = stores.make(spec), synthetic.empty(spec)
        for stop in (8, 24, 40):  # each publish adds a part
            cache = synthetic.advance(spec, cache, 0, STEM, stop)
            store.publish(STEM, cache, 0)
            told = store.explain(np.append(STEM, 1))
            assert told.plan.resumable_length == stop
        for n in (9, 17, 41):
            tokens = np.append(STEM, 1)[:n]
            with store.lookup(tokens) as lease:
                cache = store.restore(lease, cache, 1)
            assert not synthetic.wrong_rows(spec, cache, 1, tokens)


# -- J: padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 1, 7, 64])
def test_j1_what_is_published_from_a_padded_batch_has_no_padding_in_it(pad):
    def noise(slot, leaf):
        rng = np.random.default_rng(pad)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and slot.leaf.row_count(CAPACITY + pad):
            return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        return leaf

    clean, padded = world.opened(), world.opened()
    told = world.contents(A, STEM)
    for length in (8, 16, 24, 40):
        cache = state.init(SPEC, 3, CAPACITY + pad)
        cache = cache.with_leaves({x: noise(x, cache.leaf(x)) for x in SPEC.slots()})
        cache = synthetic.advance(SPEC, cache, 1, told, length)  # beside rows that stand at 0
        padded.publish(STEM, cache, 1, **A.arguments)
        clean.publish(STEM, world.cold(A, STEM, length), **A.arguments)
    groups = clean.catalog.groups()
    assert len(groups) == len(padded.catalog.groups()) == 10 + 4
    for group in groups:
        other = stores.stored(padded, group.kind, group.node.depth)
        np.testing.assert_array_equal(stores.raw(clean, group), stores.raw(padded, other))


def test_j2_j3_a_restore_touches_its_row_alone():
    store = world.opened()
    world.published(store, A, STEM)
    bystander = world.contents(OTHER, PROMPTS[3])
    for row, batch in ((0, 3), (1, 3), (2, 3)):
        cache = state.init(SPEC, batch, CAPACITY)
        for other in set(range(batch)) - {row}:
            cache = synthetic.advance(SPEC, cache, other, bystander, 19 + other)
        before = {x: np.array(cache.leaf(x)) for x in SPEC.slots()}
        with store.lookup(STEM, **A.arguments) as lease:
            cache = store.restore(lease, cache, row)
        for slot, leaf in before.items():
            kept = np.delete(np.arange(batch), row)
            np.testing.assert_array_equal(np.array(cache.leaf(slot))[:, kept], leaf[:, kept])
        assert world.wrong(cache, row, A, STEM) == []
