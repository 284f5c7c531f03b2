"""Nobody is served what was made for another tenant, adapter, model or epoch, on any tier.

Every test has its positive control: whoever it was made for is served it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import identity_test, stores, world
from tests.hetero_kv.prefix.world import IDENTITY, PLENTY, PROMPTS, SPEC, WHO, G, Who

STEM = PROMPTS[0]
A, B_TENANT, ADAPTER = WHO
STRANGERS = (
    Who("b"),
    Who(""),
    Who("A"),
    Who("a "),
    Who("a", "1" * 64),
    Who("", "0" * 64),
    Who("b", "0" * 64),
)


def on_tier(tier: str, directory) -> PrefixStore:
    """A store that holds the stem of tenant "a" on one tier alone, and on which that hits."""
    if tier == "host":
        store = world.opened()
    else:
        store = world.opened(directory)
    world.published(store, A, STEM)
    if tier == "queue":  # waits to be written, out of host memory
        for group in store.catalog.groups():
            assert store.catalog.leave_host(group, group.ticket)
    elif tier == "disk":
        store.close()
        store = world.opened(directory)
    return store


@pytest.mark.parametrize("tier", ["host", "queue", "disk"])
def test_d7_d9_no_tier_serves_a_stranger(tmp_path, tier):
    store = on_tier(tier, tmp_path)
    assert {x.on_host for x in store.catalog.groups()} == {tier == "host"}
    for who in STRANGERS:
        with store.lookup(STEM, **who.arguments) as lease:
            assert lease.candidate_length == lease.resumable_length == 0
            assert not lease.groups()
    _, length, lease = world.restored(store, A, STEM)
    assert length == 32
    assert set(lease.routes.values()) == {"host" if tier == "host" else "disk"}
    world.healthy(store)


@pytest.mark.parametrize("tier", ["host", "queue", "disk"])
def test_d5_the_same_tokens_of_all_are_kept_apart(tmp_path, tier):
    store = on_tier(tier, tmp_path)
    world.published(store, B_TENANT, STEM)
    world.published(store, ADAPTER, STEM)
    assert len(store.catalog.groups()) == 3 * (10 + 5)
    for who in WHO:
        assert world.restored(store, who, STEM)[1] == 32  # the bytes are compared


@pytest.mark.parametrize("extra", [{"adapter": "name"}, {"lora": "x"}, {"adapter": None}, "a"])
def test_d3_d6_what_is_not_identified_is_neither_stored_nor_found(extra):
    store = world.opened()
    told = store.publish(STEM, world.cold(A, STEM, 40), tenant="a", extra=extra)
    assert told.reasons == ("not_cacheable",) and not store.catalog.groups()
    world.published(store, A, STEM)
    with store.lookup(STEM, tenant="a", extra=extra) as lease:
        assert lease.resumable_length == 0
        assert {x.code for x in lease.reasons} == {"not_cacheable"}
    assert world.restored(store, A, STEM)[1] == 32


@pytest.mark.parametrize("field", sorted(set(identity_test.CHANGES) - {"block", "regime"}))
def test_d12_d15_what_another_identity_stored_is_not_found(tmp_path, field):
    world.published(store := world.opened(tmp_path / "disk"), A, STEM)
    store.close()
    changed = dataclasses.replace(IDENTITY, **{field: identity_test.CHANGES[field]})
    if field in ("leaves", "chunk"):  # they contradict the spec: no such store can be made
        with pytest.raises(ValueError, match="use Identity"):
            PrefixStore(SPEC, changed, host_bytes=PLENTY)
        assert changed.digest != IDENTITY.digest
        return
    store = PrefixStore(
        SPEC, changed, host_bytes=PLENTY, disk_dir=tmp_path / "disk", disk_bytes=PLENTY
    )
    with store.lookup(STEM, **A.arguments) as lease:
        assert lease.candidate_length == 0 and not lease.groups()
    published = store.publish(STEM, world.cold(A, STEM, 40), **A.arguments)
    assert published.new_blocks == 10
    world.healthy(store)
    store.close()
    store = world.opened(tmp_path / "disk")
    assert world.restored(store, A, STEM)[1] == 32
    store.close()


def test_d12_one_dtype_is_not_read_as_another_of_its_size(tmp_path):
    def spec_of(dtype):
        name, leaf = synthetic.FULL.leaves[0]
        leaves = ((name, dataclasses.replace(leaf, dtype=dtype)), *synthetic.FULL.leaves[1:])
        layer = dataclasses.replace(synthetic.FULL, leaves=leaves)
        segment = dataclasses.replace(SPEC.segments[0], repeats=1, layers=(layer,))
        return CacheSpec((segment,), chunk=8, block=4)

    def make(spec):
        options = dict(host_bytes=PLENTY, disk_dir=tmp_path, disk_bytes=PLENTY)
        return PrefixStore(spec, stores.identity(spec), **options)

    first, other = spec_of("bfloat16"), spec_of("float16")
    assert first.block_bytes() == other.block_bytes()
    store = make(first)
    cache = synthetic.advance(first, synthetic.empty(first), 0, STEM, 40)
    assert store.publish(STEM, cache).blocks == 10
    store.close()
    for spec, expected in ((other, 0), (first, 32)):
        store = make(spec)
        with store.lookup(STEM) as lease:
            cache = store.restore(lease, synthetic.empty(spec))
            assert lease.resumable_length == expected
        assert not synthetic.wrong_rows(spec, cache, 0, STEM)
        store.close()


def test_d15_weights_that_differ_in_one_bit_share_nothing(tmp_path):
    weights = np.arange(1000, dtype=np.float32)
    other = weights.copy()
    other[500] = np.nextafter(other[500], np.float32(np.inf))

    def make(array):
        who = Identity.of(SPEC, {"w": jnp.asarray(array)}, {}, batch=2)
        options = dict(host_bytes=PLENTY, disk_dir=tmp_path, disk_bytes=PLENTY)
        return PrefixStore(SPEC, who, **options)

    store = make(weights)
    world.published(store, A, STEM)
    store.close()
    for array, expected in ((other, 0), (weights, 32)):
        store = make(array)
        assert world.resumable(store, A, STEM) == expected
        store.close()


def test_e1_an_update_of_the_weights_makes_old_prefixes_miss(tmp_path):
    store = world.opened(tmp_path)
    world.published(store, A, STEM)
    with store.lookup(STEM, **A.arguments) as lease:
        assert lease.resumable_length == 32
        store.advance_epoch(dataclasses.replace(IDENTITY, weight_epoch=1))
        cache = store.restore(lease, world.state.init(SPEC, 2, world.CAPACITY))
        assert world.stands(cache, 0) == 0
    assert world.resumable(store, A, STEM) == 0
    world.published(store, A, STEM)
    assert world.restored(store, A, STEM)[1] == 32  # the positive control
    store.clear()  # a hard flush
    assert world.resumable(store, A, STEM) == 0 and not store.catalog.groups()
    world.healthy(store)


def test_e2_nothing_is_older_than_the_epochs_that_are_kept():
    store = world.opened()
    ages = []
    for epoch in range(8):
        if epoch:
            store.advance_epoch(dataclasses.replace(IDENTITY, weight_epoch=epoch))
        assert world.resumable(store, A, STEM) == 0
        world.published(store, A, STEM)
        assert world.resumable(store, A, STEM) == 4 * G
        ages.append(len(store.catalog.groups()) // 15)
    assert max(ages) == ages[-1] <= 2  # groups of so many epochs at most
    world.healthy(store)
