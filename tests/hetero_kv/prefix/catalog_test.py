"""The control plane with sizes only: ledger, shares and order under random operations."""

import collections
import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hetero_kv.metrics import Counters, series
from hetero_kv.prefix.catalog import Catalog
from hetero_kv.prefix.host import CORRUPT, STALE, HostTier
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.keys import Keys, sha256
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, SizedPayload
from hetero_kv.prefix.plan import Geometry, plan
from hetero_kv.prefix.policy import Lru, Policy

HYBRID = Geometry(block=1, granularity=1, replay_length=1e9, history=("kv",), checkpoint=("w",))
STATELESS = Geometry(block=1, granularity=1, replay_length=0, history=("kv",), checkpoint=())
RECURRENT = Geometry(block=1, granularity=1, replay_length=1e9, history=(), checkpoint=("state",))
planner = functools.partial(plan, replay=False)


def trace_keys(*blocks: int) -> Keys:
    """Keys from block ids, as request traces give them."""
    keys, contents, key = [], [], b"root"
    for block in blocks:
        contents.append(b"%d" % block)
        key = sha256(key + contents[-1])
        keys.append(key)
    return Keys(b"root", b"", tuple(keys), tuple(contents), len(blocks))


def catalog(capacity, geometry=HYBRID, **policy):
    return Catalog(geometry, HostTier(capacity), Policy(**policy), Counters())


def publish(cat, keys, blocks, points=(), size=1, state=1):
    """What a prefill of `blocks` blocks publishes. Returns reasons."""
    path, reason = cat.hold(keys, blocks), ""
    try:
        while len(path) < blocks and not reason:
            reason = cat.add_history(keys, path, SizedPayload(size))
            if not reason and len(path) in points:
                reason = cat.add_checkpoint(path, SizedPayload(state))
        if path and len(path) in points and not cat.has_checkpoint(path):
            reason = reason or cat.add_checkpoint(path, SizedPayload(state))
    finally:
        cat.let_go(path)
    assert cat.problems() == []
    return reason


def test_blocks_are_evicted_as_a_plain_lru_would():
    rng = np.random.default_rng(0)
    cat = catalog(40, STATELESS, checkpoint_share=0.0)
    reference = collections.OrderedDict()  # by prefix; a request touches its blocks leaf to root
    for _ in range(300):
        length = int(rng.integers(1, 9))
        blocks = [int(rng.integers(0, 3)) for _ in range(length)]
        keys = trace_keys(*blocks)
        with cat.open(keys, length + 1, planner) as lease:
            hit = lease.resumable_length
        publish(cat, keys, length)
        prefixes = [tuple(blocks[: i + 1]) for i in range(length)]
        want = 0
        while want < length and prefixes[want] in reference:
            want += 1
        assert hit == want
        for prefix in prefixes[want:]:
            while len(reference) >= 40:
                reference.pop(next(x for x in reference if x not in prefixes))
            reference[prefix] = None
        for prefix in reversed(prefixes):
            reference.move_to_end(prefix)
    assert cat.tier.free == 0


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "publish", "open", "close", "discard", "clear"]),
        st.integers(0, 5),
        st.integers(1, 8),
        st.integers(1, 3),
    ),
    max_size=60,
)


@pytest.mark.parametrize("geometry", [HYBRID, STATELESS, RECURRENT], ids=["hybrid", "kv", "state"])
@settings(max_examples=150)
@given(operations=OPERATIONS, capacity=st.integers(2, 30), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_ledger_is_exact_after_every_step(geometry, operations, capacity, share):
    cat = catalog(capacity, geometry, checkpoint_share=share)
    leases = []
    for name, seed, length, size in operations:
        keys = trace_keys(*(min(seed, i) for i in range(length)))
        if name == "publish":
            publish(cat, keys, length, {length, length // 2}, size if geometry.history else 0, 2)
        elif name == "open":
            leases.append(cat.open(keys, length + 1, planner))
        elif name == "close" and leases:
            leases.pop(seed % len(leases)).release()
        elif name == "discard" and cat.groups():
            groups = cat.groups()
            cat.discard(groups[seed % len(groups)])
        elif name == "clear" and not seed:
            cat.clear()
        assert cat.problems() == []
        assert cat.used[HISTORY] + cat.used[CHECKPOINT] <= capacity
        assert cat.leases == len(leases)
        pinned = {id(x) for lease in leases for x in lease.groups()}
        for group in cat.groups():
            assert (group.pins > 0) == (id(group) in pinned)
    for lease in leases:
        lease.release()
    cat.clear()
    assert cat.tier.free == capacity and not len(cat.index) and cat.problems() == []


class OldestFirst(Lru):
    """Parents before children: the worst order for a tree."""

    def touch(self, item):
        pass


def test_eviction_is_leaf_first_in_any_order():
    cat = catalog(8, eviction=OldestFirst, checkpoint_share=0.0)
    publish(cat, trace_keys(1, 2, 3, 4), 4)
    publish(cat, trace_keys(1, 2, 8, 9), 4)
    for seed in range(5):
        publish(cat, trace_keys(20 + seed), 1)
        assert cat.tier.free == max(0, 1 - seed)
    assert cat.explain(trace_keys(1, 2, 3, 4), 5, planner).candidate_length == 2


def test_leased_groups_outlive_any_pressure():
    cat = catalog(8)
    publish(cat, trace_keys(1, 2), 2, {2}, state=2)
    with cat.open(trace_keys(1, 2), 3, planner) as lease:
        for seed in range(10, 20):
            publish(cat, trace_keys(seed, seed, seed), 3, {3}, state=2)
        assert all(cat.tier.is_current(x.ticket) for x in lease.groups())
        assert cat.explain(trace_keys(1, 2), 3, planner).resumable_length == 2
    for seed in range(10, 20):
        publish(cat, trace_keys(seed, seed, seed), 3, {3}, state=2)
    assert cat.explain(trace_keys(1, 2), 3, planner).candidate_length == 0


def test_state_without_history_leaves_no_bare_blocks_behind():
    cat = catalog(4, RECURRENT)
    for seed in range(50):
        publish(cat, trace_keys(seed, 1, 2, 3), 4, {4}, size=0, state=2)
        publish(cat, trace_keys(seed, 9), 2, set(), size=0)
        assert len(cat.index) <= 1 + 2 * 4
    assert len(cat.groups()) == 2 * (4 + 1)


def test_a_checkpoint_goes_with_the_history_under_it():
    cat = catalog(20)
    publish(cat, trace_keys(1, 2, 3, 4), 4, {2, 3, 4})
    cat.discard(next(x for x in cat.groups() if x.kind == HISTORY and x.node.depth == 3))
    assert sorted((x.kind, x.node.depth) for x in cat.groups()) == [
        (CHECKPOINT, 2),
        (HISTORY, 1),
        (HISTORY, 2),
    ]


# -- the tier --------------------------------------------------------------------------------------


def payload(text: bytes, label: bytes) -> ArrayPayload:
    layout = GroupLayout((), (("all", 0, len(text)),), len(text))
    return ArrayPayload.seal(layout, label, np.frombuffer(text, np.uint8).copy())


def test_reads_are_copies_and_checked():
    tier = HostTier(10)
    ticket = tier.put(payload(b"abcd", b"a"))
    fetched = tier.read(ticket, b"a")
    fetched.payload.buffer[:] = 0
    assert tier.read(ticket, b"a").payload.buffer.tobytes() == b"abcd"
    assert tier.read(ticket, b"b").failure == CORRUPT  # another group's payload
    tier._payloads[ticket.slot].buffer[2] ^= 8
    assert tier.read(ticket, b"a") == (type(fetched))(None, CORRUPT, "all")


def test_slots_are_recycled_and_generations_are_not():
    tier = HostTier(10)
    old = tier.put(payload(b"abcd", b"a"))
    tier.drop(old)
    new = tier.put(payload(b"efgh", b"b"))
    assert new.slot == old.slot and new.generation > old.generation
    assert tier.read(old, b"a").failure == tier.read(old, b"b").failure == STALE
    assert not tier.is_current(old) and tier.is_current(new)
    with pytest.raises(ValueError, match="twice"):
        tier.drop(old)
    assert tier.free + tier.owned() == 10


def test_a_read_that_is_overtaken_is_stale():
    tier = HostTier(10)
    ticket = tier.put(payload(b"abcd", b"a"))

    class Slow(ArrayPayload):
        def copy(self):
            copy = super().copy()
            tier.drop(ticket)  # recycled while it is being read
            tier.put(payload(b"efgh", b"b"))
            return copy

    whole = tier._payloads[ticket.slot]
    tier._payloads[ticket.slot] = Slow(whole.layout, whole.buffer, whole.checksums)
    assert tier.read(ticket, b"a").failure == STALE


def test_nothing_beyond_the_capacity():
    tier = HostTier(4)
    assert tier.put(SizedPayload(5)) is None and tier.free == 4
    assert tier.put(SizedPayload(4)) is not None and tier.free == 0
    with pytest.raises(ValueError):
        HostTier(0)


def test_series_names():
    assert series("a_total") == "a_total"
    assert series("a_total", b="x", a='q"\\\n') == 'a_total{a="q\\"\\\\\\n",b="x"}'
    counters = Counters()
    counters.add("a_total", 2, b="x")
    counters.add("a_total", b="x")
    assert counters.get("a_total", b="x") == 3 and counters.get("b_total") == 0
    assert counters.snapshot() == {'a_total{b="x"}': 3}
