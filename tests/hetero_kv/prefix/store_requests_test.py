"""Tenants, odd requests, replay, metrics and upkeep of the store."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.quotas import Quotas
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic, validators
from tests.hetero_kv.prefix.stores import (
    PLENTY,
    SPEC,
    healthy,
    identity,
    make,
    plain_metrics,
    prompt,
    serve,
    sizes,
)


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
    assert plain_metrics(store)['publish_cut_total{reason="collision"}'] > 0
    assert hits  # whoever came first is served


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
    wrong = validate.describe(spec, validators.evidence(spec, cache), 0)
    assert wrong == ["windows: positions", "tails: positions"]
    metrics = plain_metrics(store)
    assert metrics["replay_tokens_total"] == 8 and metrics["restored_tokens_total"] == 48


def test_metrics_add_up():
    store, cache = make(), synthetic.empty(SPEC)
    for tokens in (prompt(1), prompt(1), np.concatenate([prompt(1)[:20], prompt(2)[20:]])):
        cache, _ = serve(store, cache, 0, tokens)
    metrics = plain_metrics(store)
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
    assert plain_metrics(store)["lookups_total"] == 1  # explaining is not looking up


def test_flush_clear_close():
    store, cache = make(), synthetic.empty(SPEC)
    cache, _ = serve(store, cache, 0, prompt(1))
    store.flush()
    store.clear()
    healthy(store)
    assert plain_metrics(store)["host_free_bytes"] == PLENTY
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


def test_a_cache_of_another_model_is_refused():
    store, tokens = make(), prompt(1)
    good = synthetic.empty(SPEC)
    slot = next(iter(SPEC.slots()))
    leaf = good.leaf(slot)
    for wrong in (leaf.astype(jnp.float16), jnp.concatenate([leaf, leaf], axis=-1)):
        cache = good.with_leaves({slot: wrong})
        with pytest.raises(ValueError, match=f"{slot.path} of the cache is .* by the store's spec"):
            store.publish(tokens, cache)
        with store.lookup(tokens) as lease, pytest.raises(ValueError, match="another model"):
            store.restore(lease, cache)
    assert not store.catalog.groups()


def test_an_identity_of_another_cache_is_refused():
    other = dataclasses.replace(SPEC.segments[0], repeats=SPEC.segments[0].repeats + 1)
    deeper = CacheSpec((other, *SPEC.segments[1:]), chunk=SPEC.chunk, block=SPEC.block)
    weights = {"w": np.zeros(3, np.float32)}
    made = Identity.of(deeper, weights, {}, batch=1)
    with pytest.raises(ValueError, match="other cached leaves"):
        PrefixStore(SPEC, made, host_bytes=1 << 20)
    same = Identity.of(SPEC, weights, {}, batch=1)
    with pytest.raises(ValueError, match="chunk"):
        PrefixStore(SPEC, dataclasses.replace(same, chunk=2 * SPEC.chunk), host_bytes=1 << 20)
    with pytest.raises(ValueError, match="disk_dir is empty"):
        PrefixStore(SPEC, same, host_bytes=1 << 20, disk_dir="", disk_bytes=1 << 20)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(host_bytes="a"), "host_bytes is an integer number of bytes, got 'a'"),
        (dict(host_bytes=2.5), "host_bytes is an integer number of bytes, got 2.5"),
        (dict(host_bytes=1 << 20, policy=None), "policy is a Policy or a name"),
        (dict(host_bytes=1 << 20, epochs_kept=-1), "epochs_kept"),
    ],
)
def test_nonsense_in_the_configuration_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrefixStore(SPEC, Identity.of(SPEC, {"w": np.zeros(3, np.float32)}, {}, batch=1), **options)


@pytest.mark.parametrize("wait", [-1, float("nan")])
def test_a_wait_that_is_no_time_is_refused(wait):
    store = PrefixStore(
        SPEC, Identity.of(SPEC, {"w": np.zeros(3, np.float32)}, {}, batch=1), host_bytes=1 << 20
    )
    with pytest.raises(ValueError, match="wait is a number of seconds"):
        store.lookup(np.arange(20), wait=wait)


def test_limits_must_be_quotas():
    with pytest.raises(ValueError, match="the limits of 'a' are a Quota, got 5"):
        Quotas(tenants={"a": 5})


@pytest.mark.parametrize(
    "field, value",
    [
        *((x, 5) for x in ("costs", "quotas", "digest", "clock", "disk_dir")),
        *(("epochs_kept", x) for x in (1.5, "a", True, None, -1)),
        *(("host_bytes", x) for x in (1.5, True)),
    ],
)
def test_arguments_of_other_types_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} (is|must be) .*got {value!r}"):
        make(**{field: value})


def test_rows_and_points_are_integers():
    store, cache, tokens = make(), synthetic.empty(SPEC, batch=3), prompt(1)
    for row in (1.5, True, None, "1"):
        with pytest.raises(ValueError, match=f"row is an integer, got {row!r}"):
            store.publish(tokens, cache, row)
        with store.lookup(tokens) as lease, pytest.raises(ValueError, match="row is an integer"):
            store.restore(lease, cache, row)
    for points in (16, (16.0,), (True,), "16"):
        with pytest.raises(ValueError, match="points are lengths in tokens"):
            store.publish(tokens, cache, points=points)
