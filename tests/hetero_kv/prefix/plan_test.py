"""The plan against a brute-force oracle, and policies."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetero_kv.prefix.plan import HOST, NONE, REPLAY, Geometry, Presence, plan, plan_hash_only
from hetero_kv.prefix.policy import End, Fork, Full, Lru, Never, Periodic, Policy
from tests.hetero_kv import synthetic

CODES = {
    "no_match",
    "short_prompt",
    "granularity",
    "history_missing",
    "no_checkpoint",
    "replay_not_shorter",
    "capacity",
}


@st.composite
def cases(draw):
    block = draw(st.sampled_from([1, 2, 3, 4]))
    chunk = draw(st.sampled_from([1, 2, 3, 4, 6]))
    geometry = Geometry(
        block=block,
        granularity=math.lcm(block, chunk),
        replay_length=draw(st.sampled_from([0.0, 4.0, 12.0, math.inf])),
        history=tuple(draw(st.sampled_from([(), ("kv",), ("entries", "keys")]))),
        checkpoint=tuple(draw(st.sampled_from([(), ("windows",), ("windows", "tails")]))),
    )
    matched = draw(st.integers(0, 12))
    holes = draw(st.booleans())
    history = tuple(draw(st.booleans()) or not holes for _ in range(matched))
    stored = st.sets(st.integers(1, 12).map(lambda x: x * block), max_size=5)
    presence = Presence(history, frozenset(x for x in draw(stored) if x <= matched * block))
    limit = draw(st.none() | st.integers(0, 60))
    return geometry, draw(st.integers(0, 60)), presence, draw(st.booleans()), limit


def oracle(geometry, length, presence, replay, limit):
    """(candidate, resumable, replay start or None) by trying every length."""
    block, candidate = geometry.block, 0
    for at in range(0, length, block):  # at most length - 1
        if at <= len(presence.history) * block:
            candidate = at
    best = (length, 0, None)  # (tokens to run, resumable, replay start): cold
    for at in range(1, length):
        if at % geometry.block or at % geometry.granularity:
            continue
        if limit is not None and at > limit:
            continue
        blocks = at // block
        if blocks > len(presence.history) or not all(presence.history[:blocks]):
            continue
        run = length - at
        if not geometry.checkpoint or at in presence.checkpoints:
            best = min(best, (run, at, None), key=lambda x: x[0])
        elif replay and geometry.replay_length < at:
            start = at - int(geometry.replay_length)
            best = min(best, (run + at - start, at, start), key=lambda x: x[0])
    return candidate, best[1], best[2]


@given(cases())
def test_against_the_oracle(case):
    geometry, length, presence, replay, limit = case
    found = plan(geometry, length, presence, replay=replay, limit=limit)
    candidate, resumable, start = oracle(*case)
    assert found.candidate_length == candidate
    run = (
        length - found.resumable_length + (found.replay[1] - found.replay[0] if found.replay else 0)
    )
    want = length - resumable + (resumable - start if start is not None else 0)
    assert run == want
    if start is None or found.replay is None:
        assert found.resumable_length == resumable
    else:
        assert found.replay == (start, resumable)


@given(cases())
def test_structure_of_a_plan(case):
    geometry, length, presence, replay, limit = case
    found = plan(geometry, length, presence, replay=replay, limit=limit)
    assert found.resumable_length % geometry.granularity == 0
    assert 0 <= found.resumable_length <= max(0, length - 1)
    assert found.resumable_length <= found.candidate_length
    assert set(found.routes) == {*geometry.history, *geometry.checkpoint}
    for name, route in found.routes.items():
        if not found.resumable_length:
            assert route == NONE
        elif name in geometry.checkpoint and found.replay:
            assert route == REPLAY
        else:
            assert route == HOST
    assert {x.code for x in found.reasons} <= CODES
    # Whoever gets less than the best possible is told why.
    if found.resumable_length < geometry.largest_boundary(length):
        assert found.reasons
    for reason in found.reasons:
        assert reason.before > reason.after >= 0 or reason.code == "short_prompt"
        assert str(reason)


GEOMETRY = Geometry(8, 16, 24, ("entries", "keys"), ("windows", "tails"))


def test_reasons_name_every_component_at_fault():
    found = plan(GEOMETRY, 100, Presence((True,) * 3 + (False,) + (True,) * 4, frozenset({16})))
    assert (found.candidate_length, found.resumable_length) == (64, 16)
    told = [(x.component, x.code, x.before, x.after) for x in found.reasons]
    assert told == [
        ("", "no_match", 96, 64),
        ("entries", "history_missing", 64, 24),
        ("keys", "history_missing", 64, 24),
        ("", "granularity", 24, 16),
    ]
    found = plan(GEOMETRY, 80, Presence((True,) * 8, frozenset({16})))
    told = [(x.component, x.code, x.before, x.after) for x in found.reasons]
    assert told == [("windows", "no_checkpoint", 64, 16), ("tails", "no_checkpoint", 64, 16)]


def test_a_checkpoint_off_the_granularity_does_not_count():
    found = plan(GEOMETRY, 100, Presence((True,) * 8, frozenset({16, 24, 40, 56})))
    assert found.resumable_length == 16


@pytest.mark.parametrize("length, resumable", [(16, 0), (17, 16), (32, 16), (33, 32), (64, 48)])
def test_the_last_token_is_always_computed(length, resumable):
    everything = Presence((True,) * 8, frozenset(range(16, 65, 16)))
    assert plan(GEOMETRY, length, everything).resumable_length == resumable


def test_short_prompts_hear_the_minimum():
    found = plan(GEOMETRY, 16, Presence())
    assert found.reasons[0].code == "short_prompt" and "17" in found.reasons[0].detail


def test_replay_only_where_it_runs_fewer_tokens():
    history = (True,) * 12
    far = plan(GEOMETRY, 100, Presence(history), replay=True)
    assert (far.resumable_length, far.replay) == (96, (72, 96))
    near = plan(GEOMETRY, 100, Presence(history, frozenset({80})), replay=True)
    assert (near.resumable_length, near.replay) == (80, None)
    even = plan(GEOMETRY, 100, Presence(history, frozenset({64})), replay=True)
    assert even.replay == (72, 96)
    tie = Geometry(8, 16, 32, ("entries",), ("windows",))
    found = plan(tie, 100, Presence(history, frozenset({64})), replay=True)
    assert (found.resumable_length, found.replay) == (64, None)  # a prefill of 32 does the same
    short = plan(GEOMETRY, 25, Presence((True,) * 3), replay=True)  # 16 tokens, replay runs 24
    assert (short.resumable_length, short.replay) == (0, None)
    assert short.reasons[-1].code == "replay_not_shorter"


def test_hash_only_takes_the_candidate():
    found = plan_hash_only(GEOMETRY, 100, Presence((True,) * 7))
    assert found.candidate_length == found.resumable_length == 56
    assert found.routes == {"entries": HOST, "keys": HOST, "windows": NONE, "tails": NONE}


def test_geometry_of_a_spec():
    spec = synthetic.everything(chunk=24, block=16)
    found = Geometry.of(spec)
    assert (found.block, found.granularity) == (16, 48)
    assert found.history == ("csa entries", "csa index keys", "nsa entries", "full kv")
    assert found.checkpoint == ("windows", "tails", "recurrent state")
    assert found.replay_length == math.inf


# -- policies --------------------------------------------------------------------------------------

POLICIES = [Full(), Periodic(1), Periodic(3), End(), Fork(), Never()]


@given(st.sampled_from(POLICIES), st.integers(0, 300), st.integers(1, 40), st.integers(0, 300))
def test_points_are_ascending_multiples_within_the_prompt(policy, length, g, candidate):
    points = policy.points(length, Geometry(1, g, 0, (), ()), candidate)
    assert list(points) == sorted(set(points))
    assert all(0 < x <= length and x % g == 0 for x in points)
    if not isinstance(policy, Never):
        best = max(0, length - 1) // g * g
        # What is published can be resumed by the same prompt: writer and reader agree.
        assert best in points or not best


def test_points():
    g = Geometry(8, 16, 0, (), ())
    assert Full().points(64, g) == (16, 32, 48, 64)
    assert Periodic(3).points(100, g) == (48, 96)
    assert Periodic(2).points(90, g) == (32, 64, 80)
    assert End().points(64, g) == (48, 64)
    assert End().points(65, g) == (64,)
    assert Fork().points(100, g, candidate=40) == (32, 96)
    assert Never().points(100, g) == ()


def test_named_policies():
    assert Policy.named("periodic:4").checkpoints == Periodic(4)
    assert Policy.named("zero").checkpoints == Never(replay=True)
    assert Policy.named("fork", checkpoint_share=0.2).checkpoint_share == 0.2
    for bad in ("", "periodic", "periodic:x", "full:2", "lru"):
        with pytest.raises(ValueError):
            Policy.named(bad)
    with pytest.raises(ValueError):
        Periodic(0)
    with pytest.raises(ValueError):
        Policy(checkpoint_share=1.5)


def test_lru_order():
    lru = Lru()
    for item in "abcd":
        lru.add(item)
    lru.touch("a")
    lru.remove("c")
    assert list(lru.order()) == ["b", "d", "a"]
