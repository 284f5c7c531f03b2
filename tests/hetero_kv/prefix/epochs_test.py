"""Weight epochs: partitioned, bounded, rolled back; nothing of one is ever used in another."""

import dataclasses
import threading

import pytest

from hetero_kv.prefix.index import KINDS
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.stores import SPEC, healthy, plain_metrics, prompt, serve

ONE = stores.identity()
ROOM = 1 << 20


def epoch(number):
    """An update in place: other bytes, another number."""
    return dataclasses.replace(ONE, weights=f"{number:064x}", weight_epoch=number)


def make(directory=None, identity=ONE, **options):
    if directory is not None:
        options |= {"disk_dir": directory, "disk_bytes": ROOM}
    store = stores.PrefixStore(SPEC, identity, host_bytes=stores.PLENTY, **options)
    return store


def resumable(store, seed, **who):
    return store.explain(prompt(seed), **who).plan.resumable_length


def groups(store):
    return len(store.catalog.groups())


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_epochs_are_partitioned_and_bounded(tmp_path, kept, disk):
    store, cache = make(tmp_path if disk else None, epochs_kept=kept), synthetic.empty(SPEC)
    identities = [ONE, epoch(1), epoch(2), epoch(3)]
    for number, identity in enumerate(identities):
        if number:
            removed = store.advance_epoch(identity)
            assert removed.groups == (9 if number > kept else 0)
        assert store.epoch == identity.digest
        # The same tokens, other weights: nothing of the earlier ones is hit.
        cache, length = serve(store, cache, 0, prompt(1))
        assert length == 0
        cache, length = serve(store, cache, 0, prompt(1))
        assert length == 48
        assert groups(store) == 9 * (min(number, kept) + 1)
        healthy(store)
    metrics = plain_metrics(store)
    assert metrics["epochs_total"] == 3 and metrics["epochs_retained"] == kept + 1
    gone = sum(
        metrics.get(f'invalidated_groups_total{{kind="{x}",reason="epoch"}}', 0) for x in KINDS
    )
    assert gone == 9 * (3 - kept)
    # Back to the one before.
    store.advance_epoch(identities[2])
    assert resumable(store, 1) == (48 if kept else 0)
    # And to one that is not retained any more.
    store.advance_epoch(ONE)
    assert resumable(store, 1) == 0
    healthy(store)
    if disk:
        assert store.flush().ok
        assert {x.ticket.generation for x in store.disk.stored()} == {
            x.disk.generation for x in store.catalog.groups()
        }


def test_a_lease_belongs_to_its_epoch():
    store, cache = make(epochs_kept=1), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    with store.lookup(prompt(1)) as lease:
        assert lease.resumable_length == 48 and lease.epoch == ONE.digest
        store.advance_epoch(epoch(1))
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == lease.resumable_length == 0
        assert "epoch" in [x.code for x in lease.reasons]
        healthy(store)
    with store.lookup(prompt(1)) as lease:
        assert lease.resumable_length == 0 and lease.epoch == epoch(1).digest
        store.advance_epoch(ONE)
        store.advance_epoch(epoch(1))
    with store.lookup(prompt(1)) as lease:
        store.advance_epoch(ONE)
    with store.lookup(prompt(1)) as lease:
        store.advance_epoch(epoch(1))
        store.advance_epoch(ONE)  # back in time: its promise holds again
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(SPEC, cache, 0, prompt(1))


def test_weights_that_change_during_a_restore():
    store, cache = make(epochs_kept=1), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    read = store._fetcher.read_group

    def read_late(group):
        found = read(group)
        if store.epoch == ONE.digest:
            store.advance_epoch(epoch(1))
        return found

    store._fetcher.read_group = read_late
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == lease.resumable_length == 0
        assert "epoch" in [x.code for x in lease.reasons]
    assert plain_metrics(store).get("restored_tokens_total") == 0
    healthy(store)


def test_state_of_old_weights_is_not_published_under_new_ones():
    store, tokens = make(epochs_kept=0), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 48)
    with store.lookup(tokens) as lease:
        store.advance_epoch(epoch(1))
        # Whose row it is cannot be told while a lease of the old weights is open.
        for token in (None, lease.epoch, b"other"):
            found = store.publish(tokens, cache, epoch=token)
            assert found.reasons == ("epoch",) and not groups(store)
        assert store.publish(tokens, cache, epoch=store.epoch).checkpoint
    assert store.catalog.serves_others(b"none") is False
    store.clear()
    assert store.publish(tokens, cache, epoch=ONE.digest).reasons == ("epoch",)
    assert store.publish(tokens, cache).checkpoint  # taken for the present one
    assert plain_metrics(store)['publish_refused_total{reason="epoch"}'] == 4
    healthy(store)


def test_leases_that_are_not_cacheable_stop_nobody():
    store, tokens = make(), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 48)
    with store.lookup(tokens, extra={"odd": 1}) as lease:
        store.advance_epoch(epoch(1))
        assert store.publish(tokens, cache).checkpoint
        cache = store.restore(lease, cache, 0)
        assert int(cache.length[0]) == 0
        assert [x.code for x in lease.reasons] == ["not_cacheable"]


@pytest.mark.parametrize("kept", [0, 1])
def test_weights_that_change_during_a_publish(kept):
    store, tokens = make(epochs_kept=kept), prompt(1)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 48)
    add = store.catalog.add_history

    def add_late(*args):
        thread = threading.Thread(target=store.advance_epoch, args=(epoch(1),))
        thread.start()
        thread.join()
        return add(*args)

    store.catalog.add_history = add_late
    found = store.publish(tokens, cache)
    store.catalog.add_history = add
    assert found.reasons == (() if kept else ("epoch",))
    assert groups(store) == (6 + 1 if kept else 0)
    assert resumable(store, 1) == 0
    healthy(store)
    store.advance_epoch(ONE)
    assert resumable(store, 1) == (48 if kept else 0)


def test_an_identity_of_another_family_is_refused():
    store = make()
    for field, value in (("tokenizer", "0" * 64), ("chunk", 32), ("config", "x"), ("block", 16)):
        with pytest.raises(ValueError, match=field):
            store.advance_epoch(dataclasses.replace(ONE, **{field: value}))
    assert store.epoch == ONE.digest
    store.advance_epoch(ONE)
    assert plain_metrics(store)["epochs_retained"] == 1
    with pytest.raises(ValueError, match="epochs_kept"):
        make(epochs_kept=-1)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_restart_under_other_weights(tmp_path, kept):
    cache = synthetic.empty(SPEC)
    for number in range(3):
        store = make(tmp_path, epoch(number), epochs_kept=3)
        cache, length = serve(store, cache, 0, prompt(1))
        assert length == 0 and groups(store) == 9 * (number + 1)
        store.close()
    store = make(tmp_path, epoch(3), epochs_kept=kept)
    assert groups(store) == 9 * kept and resumable(store, 1) == 0
    healthy(store)
    store.flush()
    for number in range(3):
        retained = epoch(number).digest in store.catalog.epochs
        assert retained == (number >= 3 - kept)  # the last that were written
    if kept:
        store.advance_epoch(epoch(2))
        assert resumable(store, 1) == 48
        cache, length = serve(store, cache, 0, prompt(1))
        assert length == 48
    store.close()
    store = make(tmp_path, epoch(0), epochs_kept=3)  # what was dropped, was for good
    assert resumable(store, 1) == (48 if kept > 2 else 0)
    healthy(store)


def test_a_tenant_is_deleted_in_all_epochs(tmp_path):
    store, cache = make(tmp_path, epochs_kept=2), synthetic.empty(SPEC)
    for number in range(3):
        store.advance_epoch(epoch(number))
        for tenant in ("a", "b"):
            cache, _ = serve(store, cache, 0, prompt(1), tenant=tenant)
    assert store.delete(tenant="a", tokens=prompt(1)).groups == 27
    assert store.delete(tenant="b").groups == 27
    assert not groups(store) and not len(store.catalog.index)
    healthy(store)


def test_the_disk_is_charged_for_retained_epochs(tmp_path):
    store, cache = make(tmp_path, epochs_kept=1), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    store.flush()
    live = store.disk.ledger().live
    store.advance_epoch(epoch(1))
    assert store.flush().ok and store.disk.ledger().live == live
    store.advance_epoch(epoch(2))
    assert store.flush().ok and store.disk.ledger().live == 0
    assert store.disk.ledger().exact
