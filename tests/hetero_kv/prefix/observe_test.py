"""What a store counts: every prompt token once, by component and tier; ages by the clock given."""

import pathlib
import re

import jax
import numpy as np
import pytest

import hetero_kv.prefix
import models
from hetero_kv.metrics import Counters, series
from hetero_kv.prefix import families, observe
from hetero_kv.prefix.families import FAMILIES
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.quotas import Quota, Quotas
from hetero_kv.prefix.sized import SizedStore
from hetero_kv.prefix.store import PrefixStore
from models.config import DecoderConfig
from tests.hetero_kv import metrics_test, synthetic
from tests.hetero_kv.prefix import catalog_test, stores
from tests.hetero_kv.prefix.stores import SPEC, plain_metrics, prompt, serve

TINY = DecoderConfig(
    vocab_size=64,
    d_model=16,
    layer_types=("csa",),
    mlp_types=("dense",),
    n_heads=2,
    head_dim=16,
    rope_dim=8,
    window=8,
    csa_ratio=4,
    hca_ratio=8,
    index_heads=2,
    index_dim=8,
    index_topk=3,
    d_ff=16,
    chunk=8,
    block=8,
)


class Clock:
    """Seconds, as set by a test."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def buckets(metrics, name, **labels):
    """Observations per bucket, by upper bound; without empty ones."""
    found, before = {}, 0
    prefix = series(f"{name}_bucket", **labels, le="")[:-2]
    for key, value in metrics.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)[:-2]] = value - before
            before = value
    return {x: n for x, n in found.items() if n}


@pytest.fixture(scope="module")
def model():
    built = models.build(TINY)
    return built, built.init(jax.random.key(0))


class Step:
    """The model step, which counts what it really computes: how far it moves the row."""

    def __init__(self, model, params, store):
        self.model, self.params, self.store = model, params, store
        self.tokens = 0

    def prefill(self, cache, tokens):
        before = int(cache.length[0])
        _, cache = self.model.prefill(self.params, tokens[None], cache, logits="last")
        moved = int(cache.length[0]) - before
        self.store.computed(moved)
        self.tokens += moved
        return cache


@pytest.mark.parametrize("policy", ["full", "end", "zero", "periodic:2"])
@pytest.mark.parametrize("disk", [False, True])
def test_reused_replayed_and_computed_tokens_are_all_prompt_tokens(model, tmp_path, policy, disk):
    model, params = model
    spec = model.cache_spec
    identity = Identity.of(spec, params, TINY, batch=1)
    where = {"disk_dir": tmp_path, "disk_bytes": 1 << 22} if disk else {}
    store = PrefixStore(spec, identity, host_bytes=1 << 22, policy=policy, **where)
    step, cache = Step(model, params, store), model.init_cache(batch=1, capacity=64)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 64, 60).astype(np.int32)
    fork = np.concatenate([base[:37], rng.integers(0, 64, 20).astype(np.int32)])
    total = seen = 0
    for number, tokens in enumerate((base, base, fork, base[:20], base, fork, base[:7])):
        if disk and number == 4:  # from disk from now on
            store.close()
            step.store = store = PrefixStore(
                spec, identity, host_bytes=1 << 22, policy=policy, **where
            )
            step.tokens = total = 0
        with store.lookup(tokens) as lease:
            cache = store.restore(lease, cache)
            if lease.replay:
                cache = model.replay(params, tokens[None], cache, *lease.replay)
            for stop in (*lease.checkpoint_points, len(tokens)):
                if stop > int(cache.length[0]):
                    cache = step.prefill(cache, tokens[int(cache.length[0]) : stop])
                store.publish(tokens, cache, points=lease.checkpoint_points)
            seen += lease.resumable_length > 0
        assert int(cache.length[0]) == len(tokens)
        total += len(tokens)
        metrics = plain_metrics(store)
        assert metrics["computed_tokens_total"] == step.tokens
        parts = ("restored_tokens_total", "replay_tokens_total", "computed_tokens_total")
        assert sum(metrics[x] for x in parts) == metrics["prompt_tokens_total"] == total
    assert seen >= 3
    assert (metrics["replay_tokens_total"] > 0) == (policy == "zero")
    # By component: each was resumed for what was reused and replayed together.
    resumed = metrics["restored_tokens_total"] + metrics["replay_tokens_total"]
    hits = {}
    for key, value in metrics.items():
        found = re.fullmatch(r'hit_tokens_total\{component="(.*)",tier="(.*)"\}', key)
        if found:
            hits.setdefault(found[1], {})[found[2]] = value
    assert hits.keys() == {*store.geometry.history, *store.geometry.checkpoint}
    assert all(sum(x.values()) == resumed for x in hits.values())
    assert any("disk" in x for x in hits.values()) == disk
    assert all(set(hits[x]) == {"replay"} for x in store.geometry.checkpoint) == (policy == "zero")
    with pytest.raises(ValueError, match="counted up"):
        store.computed(-1)


def test_tokens_and_bytes_by_tier(tmp_path):
    store, cache = stores.make(disk_dir=tmp_path, disk_bytes=1 << 20), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    metrics = plain_metrics(store)
    layouts = [store.transfer.history_layout(x) for x in range(6)]
    layouts += [store.transfer.checkpoint_layout] * 3
    want = {}
    for layout in layouts:
        for name, start, stop in layout.components:
            want[name] = want.get(name, 0) + stop - start
    published = {x: metrics[series("published_bytes_total", component=x)] for x in want}
    assert published == want
    stored = [metrics[series("stored_bytes_total", kind=x)] for x in (HISTORY, CHECKPOINT)]
    assert sum(want.values()) == sum(stored) == metrics["host_peak_bytes"]
    store.close()
    store = stores.make(disk_dir=tmp_path, disk_bytes=1 << 20)
    # Two blocks in host memory, the other four and the checkpoint on disk.
    cache, _ = serve(store, cache, 0, prompt(1)[:20], publish=False)
    before = plain_metrics(store)
    cache, _ = serve(store, cache, 0, prompt(1), publish=False)
    metrics = plain_metrics(store)
    for tier, tokens in (("host", 16), ("disk", 32)):
        name = series("hit_tokens_total", component="full kv", tier=tier)
        assert metrics[name] - before.get(name, 0) == tokens
    assert metrics[series("hit_tokens_total", component="windows", tier="disk")] == 16 + 48
    assert metrics["disk_peak_bytes"] >= metrics["disk_live_bytes"] > 0
    assert buckets(metrics, "disk_read_seconds") and metrics["disk_queue_depth"] == 0
    store.clear()
    metrics = plain_metrics(store)
    assert metrics["host_free_bytes"] == metrics["host_capacity_bytes"]
    # Two of the three checkpoints were used, and came back to host memory.
    assert metrics["host_peak_bytes"] == stored[0] + stored[1] * 2 // 3


def test_lifetimes_and_gaps_by_the_clock():
    clock = Clock()
    cat = catalog_test.Catalog(
        catalog_test.HYBRID,
        catalog_test.HostTier(6),
        catalog_test.Policy(),
        Counters(),
        clock=clock,
    )
    keys = catalog_test.trace_keys(1, 2)
    catalog_test.publish(cat, keys, 2, {2})
    for after in (0.5, 10.0, 100.0):  # seconds to the next use
        clock.now += after
        cat.open(keys, 3, catalog_test.planner).release()
    found = cat._counters.snapshot()
    assert buckets(found, "reuse_gap_seconds", kind=HISTORY) == {"1.0": 2, "15.0": 2, "300.0": 2}
    assert buckets(found, "reuse_gap_seconds", kind=CHECKPOINT) == {"1.0": 1, "15.0": 1, "300.0": 1}
    assert not buckets(found, "lifetime_seconds", kind=HISTORY)
    clock.now += 4000 - 110.5
    # Only the prompt's own goes: one checkpoint, two blocks.
    for seed in (7, 8, 9):
        catalog_test.publish(cat, catalog_test.trace_keys(seed, seed), 2, {2})
    found = cat._counters.snapshot()
    assert buckets(found, "lifetime_seconds", kind=HISTORY)["14400.0"] == 2
    assert buckets(found, "lifetime_seconds", kind=CHECKPOINT)["14400.0"] == 1
    name = series("lifetime_seconds_count", kind=HISTORY)
    assert found[name] == cat._counters.get("evicted_groups_total", kind=HISTORY)


def test_latencies_by_the_clock(tmp_path):
    clock = Clock()
    store = stores.make(disk_dir=tmp_path, disk_bytes=1 << 20, clock=clock)
    publish, cache = store.catalog.hold, synthetic.empty(SPEC)

    def slow(*args):
        store.disk.write_back()  # no write may be under way while the clock moves
        clock.now += 0.2
        return publish(*args)

    store.catalog.hold = slow
    cache, _ = serve(store, cache, 0, prompt(1))
    store.flush()
    metrics = plain_metrics(store)
    assert buckets(metrics, "publish_seconds") == {"0.25": metrics["publishes_total"]}
    assert buckets(metrics, "lookup_seconds") == {"1e-05": 1}  # the clock stood still
    assert buckets(metrics, "restore_seconds") == buckets(metrics, "flush_seconds") == {"1e-05": 1}
    assert buckets(metrics, "disk_write_seconds") == {"1e-05": 9}


def test_sized_stores_count_alike():
    geometry = Geometry(1, 1, 1e9, ("kv",), ("w",))
    store = SizedStore(geometry, 1, 1, capacity=100, policy="full")
    keys = catalog_test.trace_keys(1, 2, 3)
    for _ in range(2):
        with store.lookup(keys, 4) as lease:
            store.publish(keys, 3, lease.checkpoint_points)
    metrics = {x.removeprefix(observe.NAMESPACE): n for x, n in store.metrics().items()}
    assert metrics["lookups_total"] == metrics["publishes_total"] == 2
    for component in ("kv", "w"):
        assert metrics[series("hit_tokens_total", component=component, tier="host")] == 3
    assert buckets(metrics, "lookup_seconds") and buckets(metrics, "publish_seconds")
    metrics_test.parse(families.to_text(store.metrics()))


def test_every_name_in_the_code_has_a_meaning():
    text = "".join(
        x.read_text() for x in pathlib.Path(hetero_kv.prefix.__file__).parent.rglob("*.py")
    )
    counted = set(re.findall(r'"([a-z_]+_total)"', text)) | {"stored_groups_total"}
    assert len(counted) > 40 and counted <= FAMILIES.keys()
    assert not {x for x in FAMILIES if "ratio" in x}  # to be derived


def test_the_text_of_a_busy_store(tmp_path):
    quotas = Quotas(tenants={"a": Quota(host_bytes=4096, disk_bytes=4096)})
    store = stores.make(disk_dir=tmp_path, disk_bytes=1 << 20, quotas=quotas)
    cache = synthetic.empty(SPEC)
    for tenant in "aab":
        for seed in range(3):
            cache, _ = serve(store, cache, 0, prompt(seed, shared=24), tenant=tenant)
    store.delete(tenant="a", erase=True)
    found = metrics_test.parse(families.to_text(store.metrics()))
    assert all(x.startswith(observe.NAMESPACE) for x in found)
    assert not [x for x, (kind, told, _) in found.items() if kind == "untyped" or not told]
    samples = {}
    for name, (kind, _, some) in found.items():
        assert (kind == "counter") == name.endswith("_total")
        samples |= some
    assert len(samples) == len(store.metrics())
    key = (observe.NAMESPACE + "hit_tokens_total", (("component", "full kv"), ("tier", "host")))
    assert samples[key] > 0
