"""Quotas of tenants: on every tier, out of their own, exact, also after a restart."""

import functools
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hetero_kv.metrics import Counters
from hetero_kv.prefix.catalog import Catalog
from hetero_kv.prefix.disk.tier import SMALLEST
from hetero_kv.prefix.encoding import encode
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, KINDS
from hetero_kv.prefix.keys import Keys, read_root, sha256
from hetero_kv.prefix.payload import SizedPayload
from hetero_kv.prefix.plan import Geometry, plan
from hetero_kv.prefix.policy import EVICTIONS, Policy, eviction
from hetero_kv.prefix.quotas import Quota, Quotas
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.store_disk_test import Model
from tests.hetero_kv.prefix.stores import SPEC, plain_metrics, prompt, serve

HYBRID = Geometry(block=1, granularity=1, replay_length=1e9, history=("kv",), checkpoint=("w",))
STATELESS = Geometry(block=1, granularity=1, replay_length=0, history=("kv",), checkpoint=())
planner = functools.partial(plan, replay=False)


def keys_of(tenant, *blocks):
    content = encode(("hetero_kv root", bytes(32), tenant, ""))
    contents = tuple(b"%d" % x for x in blocks)
    chain = list(
        itertools.accumulate(contents, lambda x, y: sha256(x + y), initial=sha256(content))
    )
    return Keys(chain[0], content, tuple(chain[1:]), contents, len(blocks))


def catalog(capacity, quotas, order="lru", geometry=HYBRID, **policy):
    policy = Policy(eviction=eviction(order), **policy)
    return Catalog(geometry, HostTier(capacity), policy, Counters(), quotas)


def publish(cat, keys, points=(), size=1):
    path, reason = cat.hold(keys, len(keys.keys)), ""
    try:
        while len(path) < len(keys.keys) and not reason:
            reason = cat.add_history(keys, path, SizedPayload(size))
            if not reason and len(path) in points and not cat.has_checkpoint(path):
                reason = cat.add_checkpoint(path, SizedPayload(size))
    finally:
        cat.let_go(path)
    assert cat.problems() == []
    return reason


def held(cat, tenant):
    """How many groups of each kind."""
    found = dict.fromkeys(KINDS, 0)
    for group in cat.groups():
        root = group.node
        while root.parent is not None:
            root = root.parent
        found[group.kind] += read_root(root.content).tenant == tenant
    return found


def length(cat, keys):
    return cat.explain(keys, keys.length + 1, planner).candidate_length


def test_a_tenant_at_its_quota_makes_room_out_of_its_own():
    quotas = Quotas(each=Quota(host_bytes=6))
    cat = catalog(100, quotas, geometry=STATELESS, checkpoint_share=0.0)
    others = keys_of("b", 1, 2, 3)
    assert not publish(cat, others)
    runs = [keys_of("a", x, x, x) for x in range(5)]
    for keys in runs:
        assert not publish(cat, keys)
        assert length(cat, others) == 3
    assert [length(cat, x) for x in runs] == [0, 0, 0, 3, 3]  # the last used stay
    assert cat._counters.get("quota_evicted_groups_total", tier="host") == 9
    with cat.open(runs[3], 4, planner), cat.open(runs[4], 4, planner):
        assert publish(cat, keys_of("a", 9)) == "quota"  # all of its own is pinned
        assert not publish(cat, keys_of("b", 9))
    assert cat._counters.get("refused_total", kind=HISTORY, reason="quota") == 1
    assert not publish(cat, keys_of("a", 9))


def test_a_group_larger_than_the_quota_costs_nobody_anything():
    cat = catalog(100, Quotas(each=Quota(host_bytes=6)), checkpoint_share=0.0)
    assert not publish(cat, keys_of("a", 1, 2, 3))
    assert publish(cat, keys_of("a", 7), size=7) == "quota"
    assert length(cat, keys_of("a", 1, 2, 3)) == 3


def test_caps_on_groups_are_per_kind():
    quota = Quota(history_groups=4, checkpoint_groups=2)
    cat = catalog(100, Quotas(tenants={"a": quota}))
    for seed in range(4):
        assert not publish(cat, keys_of("a", seed, 1, 2), {1, 2, 3})
        assert not publish(cat, keys_of("b", seed, 1, 2), {1, 2, 3})
    assert held(cat, "a") == {HISTORY: 4, CHECKPOINT: 2}
    assert held(cat, "b") == {HISTORY: 12, CHECKPOINT: 12}
    assert length(cat, keys_of("a", 3, 1, 2)) == 3
    none = catalog(100, Quotas(each=Quota(checkpoint_groups=0)))
    assert publish(none, keys_of("a", 1, 2), {2}) == "quota"
    assert held(none, "a") == {HISTORY: 2, CHECKPOINT: 0}


def test_without_quotas_nothing_is_booked():
    cat = Catalog(HYBRID, HostTier(10), Policy(), Counters())
    assert not publish(cat, keys_of("a", 1, 2))
    assert cat.accounts is None and cat.account("a") is None
    assert all(x.node.account is None for x in cat.groups())


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "publish", "publish", "open", "close", "discard", "clear"]),
        st.sampled_from("aab"),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(1, 3),
    ),
    max_size=40,
)


@pytest.mark.parametrize("order", sorted(EVICTIONS))
@settings(max_examples=25)
@given(
    operations=OPERATIONS,
    limits=st.tuples(*[st.none() | st.integers(0, 12)] * 3),
    share=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_no_tenant_exceeds_its_quota_in_any_order(order, operations, limits, share):
    quota = Quota(host_bytes=limits[0], history_groups=limits[1], checkpoint_groups=limits[2])
    cat = catalog(30, Quotas(tenants={"a": quota}), order, checkpoint_share=share)
    leases = []
    for name, tenant, blocks, size in operations:
        keys = keys_of(tenant, *blocks)
        if name == "publish":
            before = held(cat, "b")
            free = cat.tier.free
            reason = publish(cat, keys, {len(blocks), 2}, size)
            assert tenant == "a" or reason != "quota"
            if tenant == "a" and free >= 12 * size:
                assert held(cat, "b") == before  # there was no need to touch another's
        elif name == "open":
            leases.append(cat.open(keys, len(blocks) + 1, planner))
        elif name == "close" and leases:
            leases.pop(size % len(leases)).release()
        elif name == "discard" and cat.groups():
            groups = cat.groups()
            cat.discard(groups[size % len(groups)])
        elif name == "clear" and size == 3:
            cat.clear()
        assert cat.problems() == []  # quotas are part of it
    for lease in leases:
        lease.release()
    cat.clear()
    assert cat.problems() == [] and cat.tier.free == 30
    assert not any(sum(x.host.values()) for x in cat.accounts.all())


def test_accounts_of_tenants_without_groups_are_closed():
    cat = catalog(10, Quotas(each=Quota(host_bytes=5)))
    for number in range(100):
        publish(cat, keys_of(f"tenant {number}", number))
    assert len(cat.accounts.all()) <= 11
    assert all(len(x._each) <= 10 for x in cat._eviction.values())


@pytest.mark.parametrize("limit", [-1, 1.5, "1"])
def test_limits_are_checked(limit):
    with pytest.raises(ValueError, match="host_bytes"):
        Quota(host_bytes=limit)


# -- with a disk -----------------------------------------------------------------------------------


def make(directory, quotas, **options):
    return stores.make(disk_dir=directory, disk_bytes=1 << 20, quotas=quotas, **options)


def resumable(store, seeds, tenant):
    found = (store.explain(prompt(x, shared=24), tenant=tenant) for x in seeds)
    return [x.plan.resumable_length for x in found]


def on_disk(store):
    return sum(x.nbytes for x in store.catalog.groups() if x.disk is not None)


def test_quotas_hold_on_both_tiers_and_after_a_restart(tmp_path):
    block, state = stores.sizes()
    one = 6 * block + 3 * state  # what one prompt takes
    host, disk = 2 * one, 3 * one
    quotas = Quotas(tenants={"a": Quota(host_bytes=host, disk_bytes=disk)})
    store, cache = make(tmp_path, quotas), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(0, shared=24), tenant="b")
    for seed in range(8):
        cache, _ = serve(store, cache, 0, prompt(seed, shared=24), tenant="a")
        account = store.catalog.account("a")
        assert sum(account.host.values()) <= host and sum(account.disk.values()) <= disk
    assert store.flush().ok
    stores.healthy(store)
    found = resumable(store, range(8), "a")
    assert found[-1] == 48 and 0 < sum(x > 16 for x in found) < 8
    assert resumable(store, [0], "b") == [48]
    assert sum(store.catalog.account("a").disk.values()) > host  # the disk has a quota of its own
    kept = {x.label for x in store.catalog.groups() if x.disk is not None}
    store.close()
    store = make(tmp_path, quotas)
    assert {x.label for x in store.catalog.groups()} == kept
    stores.healthy(store)
    store.close()
    # A smaller quota is applied to what is found; nobody else's goes.
    store = make(tmp_path, Quotas(tenants={"a": Quota(disk_bytes=one)}))
    stores.healthy(store)
    assert sum(store.catalog.account("a").disk.values()) <= one
    assert resumable(store, [0], "b") == [48]
    store.close()
    store = make(tmp_path, Quotas(tenants={"a": Quota(history_groups=2, checkpoint_groups=0)}))
    stores.healthy(store)
    account = store.catalog.account("a")
    assert account.groups == {HISTORY: 2, CHECKPOINT: 0}
    assert store.flush().ok
    store.close()
    store = make(tmp_path, None)  # it was durable
    assert held(store.catalog, "a") == {HISTORY: 2, CHECKPOINT: 0}
    assert resumable(store, [0], "b") == [48]


@pytest.mark.parametrize("order", sorted(EVICTIONS))
def test_random_histories_of_two_tenants_keep_all_books_exact(tmp_path, order):
    rng = random.Random(order)
    quota = Quota(host_bytes=3 << 10, disk_bytes=6 << 10, history_groups=9, checkpoint_groups=4)
    quotas = Quotas(tenants={"a": quota, "b": Quota(disk_bytes=9 << 10)})
    model = Model(tmp_path, order, HYBRID, 6 << 10, SMALLEST + (5 << 14), quotas)
    hits = 0
    for step in range(120):
        tenant = rng.choice("aab")
        keys = keys_of(tenant, *[rng.randrange(3) for _ in range(rng.randrange(1, 9))])
        action = rng.random()
        if action < 0.6:
            model.publish(keys, sorted(rng.sample(range(1, 9), 2)))
        elif action < 0.9:
            hits += model.read(keys)
        elif action < 0.94:
            some = [x for x in model.cat.groups() if x.disk is not None]
            if some:
                model.cat.leave_disk(rng.choice(some))
        elif action < 0.96:
            model.cat.forget(lambda root, tenant=tenant: root.tenant == tenant, "deleted")
            assert not any(held(model.cat, tenant).values())
        else:
            model.restart(step)
        model.check()
    assert hits
    evicted = [model.counters.get("quota_evicted_groups_total", tier=x) for x in ("host", "disk")]
    assert all(evicted)
    model.cat.clear()
    model.check()
    assert not model.cat.groups() and not model.tier.stored()


def test_a_tenant_may_be_kept_off_one_tier(tmp_path):
    for number, quota in enumerate((Quota(disk_bytes=0), Quota(host_bytes=0))):
        store = make(tmp_path / str(number), Quotas(each=quota))
        cache, _ = serve(store, synthetic.empty(SPEC), 0, prompt(1))
        cache, length = serve(store, cache, 0, prompt(1))
        assert length == 48
        assert store.flush().ok
        stores.healthy(store)
        groups = store.catalog.groups()
        assert groups and all((x.disk is None) == (quota.disk_bytes == 0) for x in groups)
        assert all(x.on_host == (quota.host_bytes is None) for x in groups)
        metrics = plain_metrics(store)
        assert (sum(n for x, n in metrics.items() if x.startswith("quota_refused")) > 0) == (
            quota.disk_bytes == 0
        )
        store.close()
    store = make(tmp_path / "2", Quotas(each=Quota(host_bytes=0, disk_bytes=0)))
    cache, length = serve(store, cache, 0, prompt(1))
    found = store.publish(prompt(1), cache)
    assert found.reasons == ("quota",) and not store.catalog.groups()
    stores.healthy(store)
