"""Routes by estimated seconds: against trying every way, and end to end over a real disk."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hetero_kv.prefix.costs import Costs, TierCost
from hetero_kv.prefix.keys import block_keys
from hetero_kv.prefix.plan import (
    DISK,
    HOST,
    NONE,
    REPLAY,
    Geometry,
    Presence,
    plan,
)
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.selftest import MOST, shortest_resumable
from hetero_kv.prefix.sized import SizedStore
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix.stores import SPEC, identity, make, prompt, serve

MB = 1 << 20
FREE = TierCost(math.inf)
FAST = Costs(prefill_per_token=1.0, replay_per_token=1.0, host=FREE, disk=TierCost(1e12, 1e-9))
SLOW = Costs(prefill_per_token=1e-6, replay_per_token=1e-6, host=FREE, disk=TierCost(1e3, 0.1))

numbers = st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0])
tiers = st.builds(TierCost, st.sampled_from([0.1, 1.0, 50.0, math.inf]), numbers)
all_costs = st.builds(
    Costs,
    prefill_per_token=numbers,
    prefill_per_pair=st.sampled_from([0.0, 0.01, 0.5]),
    replay_per_token=numbers,
    host=tiers,
    disk=tiers,
)


@st.composite
def cases(draw):
    block, chunk = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (2, 4), (3, 2)]))
    geometry = Geometry(
        block=block,
        granularity=math.lcm(block, chunk),
        replay_length=draw(st.sampled_from([4.0, 12.0, math.inf])),
        history=("kv",),
        checkpoint=tuple(draw(st.sampled_from([(), ("windows",)]))),
        chunk=chunk,
        block_bytes=draw(st.sampled_from([0, 1, 7])),
        checkpoint_bytes=draw(st.sampled_from([0, 30])),
    )
    matched = draw(st.integers(0, 12))
    hole = draw(st.integers(0, 14))
    history = tuple(i != hole for i in range(matched))
    lengths = st.sets(st.integers(1, 12).map(lambda x: x * block), max_size=6)
    stored = frozenset(x for x in draw(lengths) if x <= matched * block)
    slow = frozenset(draw(st.sets(st.integers(0, 12), max_size=8)))
    states = frozenset(draw(lengths)) & stored
    presence = Presence(history, stored, slow, states)
    bound = draw(st.sampled_from([None, 1, 3, 6, 100]))
    return geometry, draw(st.integers(0, 60)), presence, draw(st.booleans()), bound


def ways(geometry, length, presence, replay, bound, costs):
    """(seconds, resumable, replay start or None) of everything that the contract allows."""
    total = sum(costs.prefill_per_token + costs.prefill_per_pair * (t + 0.5) for t in range(length))
    found = [(total, 0, None)]
    exact = geometry.replay_length
    run = exact
    if bound is not None:
        run = min(exact, math.ceil(bound / geometry.chunk) * geometry.chunk)
    for at in range(geometry.block, length, geometry.block):
        blocks = at // geometry.block
        if at % geometry.granularity or blocks > len(presence.history):
            continue
        if not all(presence.history[:blocks]):
            continue
        seconds = 0.0
        for i in range(blocks):
            tier = costs.disk if i in presence.disk_history else costs.host
            seconds += geometry.block_bytes / tier.bytes_per_s + tier.seconds_per_read
        for t in range(at, length):
            seconds += costs.prefill_per_token + costs.prefill_per_pair * (t + 0.5)
        if not geometry.checkpoint:
            found.append((seconds, at, None))
            continue
        stored = at in presence.checkpoints
        if stored:
            tier = costs.disk if at in presence.disk_checkpoints else costs.host
            state = geometry.checkpoint_bytes / tier.bytes_per_s + tier.seconds_per_read
            found.append((seconds + state, at, None))
        if replay and run < at and (run == exact or not stored):
            found.append((seconds + run * costs.replay_per_token, at, at - int(run)))
    return found


@given(cases(), all_costs)
def test_the_cheapest_way_of_all(case, costs):
    geometry, length, presence, replay, bound = case
    found = plan(geometry, length, presence, replay=replay, bound=bound, costs=costs)
    every = ways(*case, costs)
    best = min(x[0] for x in every)
    assert math.isclose(found.seconds, best, rel_tol=1e-9, abs_tol=1e-9)
    start = found.replay[0] if found.replay else None
    taken = [x for x in every if x[1:] == (found.resumable_length, start)]
    assert taken and math.isclose(taken[0][0], best, rel_tol=1e-9, abs_tol=1e-9)
    # Whoever gets less than the longest valid length is told why.
    longest = max(x[1] for x in every)
    told = [x for x in found.reasons if x.code == "cheaper"]
    if found.resumable_length < longest:
        assert [(x.before, x.after) for x in told] == [(longest, found.resumable_length)]
    else:
        assert not told
    if longest < geometry.largest_boundary(length):
        assert [x for x in found.reasons if x.code != "cheaper"]
    # An approximation is one in name, and only where nothing exact is stored.
    if found.approximate:
        assert found.replay[1] - found.replay[0] < geometry.replay_length
        assert found.resumable_length not in presence.checkpoints
    elif found.replay:
        assert found.replay[1] - found.replay[0] == geometry.replay_length


@given(cases())
def test_where_only_tokens_cost_the_plan_is_the_default_one(case):
    geometry, length, presence, replay, bound = case
    costs = Costs(prefill_per_token=1.0, replay_per_token=1.0, host=FREE, disk=FREE)
    options = dict(replay=replay, bound=bound)
    found = plan(geometry, length, presence, **options, costs=costs)
    default = plan(geometry, length, presence, **options)

    def run(x):
        return length - x.resumable_length + (x.replay[1] - x.replay[0] if x.replay else 0)

    assert run(found) == run(default) and found.candidate_length == default.candidate_length


def test_ties_go_to_the_longer_length_and_to_what_is_stored():
    geometry = Geometry(8, 16, 16, ("kv",), ("w",), 16, 10, 10)
    nothing = Costs(prefill_per_token=0.0, replay_per_token=0.0, host=FREE)
    found = plan(geometry, 50, Presence((True,) * 6, frozenset({48})), replay=True, costs=nothing)
    assert (found.resumable_length, found.replay) == (48, None)
    found = plan(geometry, 50, Presence((True,) * 6, frozenset({16})), replay=True, costs=nothing)
    assert (found.resumable_length, found.replay) == (48, (32, 48))


def test_a_reason_names_both_times():
    geometry = Geometry(8, 16, math.inf, ("kv",), ("w",), 16, MB, MB)
    costs = Costs(prefill_per_token=0.01, replay_per_token=0.01, host=FREE, disk=TierCost(MB))
    slow = Presence((True,) * 4, frozenset({16, 32}), frozenset({2, 3}), frozenset({32}))
    found = plan(geometry, 40, slow, costs=costs)
    # 32 tokens: 3 s of reading and 0.08 s of computing; 16 tokens: 0.24 s of computing.
    assert found.resumable_length == 16 and math.isclose(found.seconds, 0.24)
    (reason,) = found.reasons
    assert (reason.code, reason.component, reason.before, reason.after) == ("cheaper", "", 32, 16)
    assert "3.08 s" in reason.detail and "0.24 s" in reason.detail
    assert found.routes == {"kv": HOST, "w": HOST}


def test_an_early_block_on_a_slow_disk_spoils_what_follows():
    geometry = Geometry(8, 8, 8, ("kv",), ("w",), 8, MB, MB)
    costs = Costs(prefill_per_token=0.01, replay_per_token=0.001, host=FREE, disk=TierCost(MB / 10))
    presence = Presence((True,) * 4, frozenset(), frozenset({2}))
    found = plan(geometry, 40, presence, replay=True, costs=costs)
    assert (found.resumable_length, found.replay) == (16, (8, 16))
    assert found.routes == {"kv": HOST, "w": REPLAY}


def test_numbers_that_make_no_sense():
    for bad in (0, -1, math.nan):
        with pytest.raises(ValueError, match="bytes_per_s"):
            TierCost(bad)
    with pytest.raises(ValueError, match="seconds_per_read"):
        TierCost(1.0, -1.0)
    for name in ("prefill_per_token", "prefill_per_pair", "replay_per_token"):
        for bad in (-1.0, math.inf, math.nan):
            fields = dict(prefill_per_token=1.0, replay_per_token=1.0, host=FREE)
            with pytest.raises(ValueError, match="finite"):
                Costs(**{**fields, name: bad})
    none = Costs(prefill_per_token=1.0, replay_per_token=1.0, host=FREE)
    assert none.read_disk(0, 0) == 0
    with pytest.raises(ValueError, match="disk"):
        none.read_disk(1, 1)


def test_measured(tmp_path):
    directory = tmp_path / "made"
    found = Costs.measured(
        prefill_per_token=1.0, prefill_per_pair=2.0, replay_per_token=3.0, directory=directory
    )
    assert (found.prefill_per_token, found.prefill_per_pair, found.replay_per_token) == (1, 2, 3)
    for tier in (found.host, found.disk):
        assert 0 < tier.bytes_per_s < math.inf
        assert 0 <= tier.seconds_per_read < 60
    assert not list(directory.iterdir())
    assert Costs.measured(prefill_per_token=1.0, replay_per_token=1.0).disk is None
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Costs.measured(prefill_per_token=1.0, replay_per_token=1.0, directory=tmp_path / "file")


# -- the self-test ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, replay, want",
    [
        ("full", math.inf, 16),
        ("end", math.inf, 16),
        ("fork", math.inf, 16),
        ("periodic:4", math.inf, 16),
        ("every:4", math.inf, 64),
        ("every:100", math.inf, 1600),
        (f"every:{MOST + 1}", math.inf, 0),
        ("never", 24, 0),
        ("zero", 16, 32),
        ("zero", 24, 32),
        ("zero", 5504, 5520),
        ("zero", math.inf, 0),
        ("bounded:8", math.inf, 16),  # runs 8 tokens, so 16 are more
        ("bounded:16", math.inf, 32),
        ("bounded:17", math.inf, 32),
        ("bounded:17", 16, 32),
    ],
)
def test_the_shortest_prefix_that_is_resumed(policy, replay, want):
    geometry = Geometry(8, 16, replay, ("kv",), ("w",), 8)
    assert shortest_resumable(geometry, Policy.named(policy)) == want
    stateless = Geometry(8, 16, 0, ("kv",), (), 8)
    assert shortest_resumable(stateless, Policy.named(policy)) == 16


def test_the_shortest_prefix_that_pays():
    geometry = Geometry(8, 16, math.inf, ("kv",), ("w",), 16, 0, 100)
    # A checkpoint takes 1 s; a token 0.01 s.
    costs = Costs(prefill_per_token=0.01, replay_per_token=1, host=TierCost(100), disk=TierCost(50))
    assert shortest_resumable(geometry, Policy.named("full"), costs) == 112
    assert shortest_resumable(geometry, Policy.named("full"), costs, on_disk=True) == 208
    never = Costs(prefill_per_token=0.0, replay_per_token=0.0, host=TierCost(100))
    assert shortest_resumable(geometry, Policy.named("full"), never) == 0


def test_a_store_says_what_it_can_do():
    store = make(policy="every:3")
    assert (store.granularity, store.minimum_resumable) == (16, 48)
    assert [store.largest_boundary(x) for x in (0, 16, 17, 48, 49)] == [0, 0, 16, 32, 48]
    assert store.warnings == ()
    assert "shortest 48" in str(store.explain(prompt(1)))
    never = Costs(prefill_per_token=0.0, replay_per_token=0.0, host=TierCost(1.0))
    with pytest.raises(ValueError, match="computing is never slower"):
        make(costs=never)


def test_a_disk_that_never_pays_is_warned_of(tmp_path):
    with pytest.raises(ValueError, match="disk"):
        make(disk_dir=tmp_path, disk_bytes=4 * MB, costs=Costs(**{**vars(SLOW), "disk": None}))
    store = make(disk_dir=tmp_path, disk_bytes=4 * MB, costs=SLOW)
    assert store.warnings and store.minimum_resumable == 16
    store.close()


# -- end to end ------------------------------------------------------------------------------------


def only_on_disk(directory, costs):
    """A store that found everything of prompt(1) on disk, as after a restart."""
    store = make(disk_dir=directory, disk_bytes=4 * MB, costs=costs)
    if not store.catalog.groups():
        serve(store, synthetic.empty(SPEC), 0, prompt(1))
        store.close()
        store = make(disk_dir=directory, disk_bytes=4 * MB, costs=costs)
    assert all(not x.on_host for x in store.catalog.groups())
    return store


def test_a_slow_disk_is_left_alone_and_a_fast_one_read(tmp_path):
    tokens = prompt(1)
    store = only_on_disk(tmp_path, SLOW)
    with store.lookup(tokens) as lease:
        assert (lease.candidate_length, lease.resumable_length) == (48, 0)
        assert set(lease.routes.values()) == {NONE}
        assert lease.reasons[-1].code == "cheaper" and lease.reasons[-1].before == 48
        assert lease.plan.seconds < 1e-3
        assert lease.checkpoint_points == (16, 32, 48)
        cache = store.restore(lease, synthetic.empty(SPEC))
        assert int(cache.length[0]) == 0
    assert "cheaper" in str(store.explain(tokens))
    store.close()

    store = only_on_disk(tmp_path, FAST)
    with store.lookup(tokens) as lease:
        assert lease.resumable_length == 48 and set(lease.routes.values()) == {DISK}
        cache = store.restore(lease, synthetic.empty(SPEC))
        assert int(cache.length[0]) == 48 and not synthetic.wrong_rows(SPEC, cache, 0, tokens)
    # What was read is in host memory now, and the disk's slowness does not matter to it.
    store.costs = SLOW
    with store.lookup(tokens) as lease:
        assert lease.resumable_length == 48 and set(lease.routes.values()) == {HOST}
    store.close()


def test_what_was_computed_for_want_of_a_fast_disk_is_in_host_memory_next_time(tmp_path):
    store = only_on_disk(tmp_path, SLOW)
    cache, length = serve(store, synthetic.empty(SPEC), 0, prompt(1))
    assert length == 0
    cache, length = serve(store, cache, 1, prompt(1))
    assert length == 48
    assert store.explain(prompt(1)).plan.routes["windows"] == HOST
    store.close()


def test_a_store_of_sizes_weighs_them_too():
    geometry = Geometry(8, 16, math.inf, ("kv",), ("w",))
    keys = np.arange(100)
    dear = Costs(prefill_per_token=0.001, replay_per_token=0, host=TierCost(100.0))

    keys = block_keys(identity(), keys)
    for costs, want in ((None, 96), (dear, 0)):
        store = SizedStore(geometry, 8, 8, capacity=1 << 20, costs=costs)
        with store.lookup(keys) as lease:
            store.publish(keys, 12, lease.checkpoint_points)
        with store.lookup(keys) as lease:
            assert lease.resumable_length == want
