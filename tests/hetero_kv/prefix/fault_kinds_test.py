"""Faults that other systems have had, put to the store: windows, other state, boundaries, silence.

The table of all kinds of faults is in fault_table_test.py.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state
from hetero_kv.contract import CacheSpec, History, LayerSpec, Leaf, Segment, Window
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.plan import Geometry, Presence, plan
from tests import variants
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores, world
from tests.hetero_kv.prefix.world import CAPACITY, PLENTY, PROMPTS, SPEC, WHO, B, G

A, OTHER, ADAPTER = WHO
STEM = PROMPTS[0]  # 40 tokens, of which others share some
BLOCK, STATE = world.sizes()


def fork(at: int, n: int = CAPACITY) -> np.ndarray:
    """The stem's first `at` tokens, and others after them."""
    return np.concatenate([STEM[:at], 5000 + np.arange(n - at)])


def slot_of(name: str):
    return next(x for x in SPEC.slots() if x.name == name)


# -- A: windows --------------------------------------------------------------------------------


def test_a1_history_without_state_is_no_hit():
    store = world.opened()
    store.publish(STEM, world.cold(A, STEM, 40), points=(), **A.arguments)
    told = store.explain(STEM, **A.arguments)
    assert told.plan.candidate_length == 36 and told.plan.resumable_length == 0
    short = {x.component for x in told.plan.reasons if x.code == "no_checkpoint"}
    assert short == {"windows", "tails", "recurrent state"}
    _, length, lease = world.restored(store, A, STEM)
    assert length == 0 and set(lease.routes.values()) == {"none"}


def test_a2_hole_in_history():
    geometry, draw = Geometry.of(SPEC), random.Random(2)
    for _ in range(300):
        flags = tuple(draw.random() < 0.8 for _ in range(10))
        points = frozenset(x for x in range(G, 41, G) if draw.random() < 0.7)
        found = plan(geometry, 41, Presence(flags, points)).resumable_length
        assert found == max(x for x in (0, *points) if all(flags[: x // B]))


@pytest.mark.parametrize("name", ["window_pos", "tail_pos"])
def test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored(name):
    slot, length = slot_of(name), 24
    about = dict(synthetic.COMPRESSED.leaves)[name.removesuffix("_pos")]
    live = np.asarray(about.live_rows(length))
    cache = world.cold(A, STEM, length)
    for row in range(about.rows):
        store = world.opened()
        holed = synthetic.edit(cache, slot, (0, 0, row), -1)
        told = store.publish(STEM, holed, **A.arguments)
        assert bool(told.blocks) == (not live[row])
        # And where it got in all the same, say from an older writer.
        world.published(store, A, STEM)
        group = stores.stored(store, CHECKPOINT, length // B)
        payload = store.catalog.tier._payloads[group.ticket.slot]
        section = next(x for x in payload.layout.sections if x.slot.name == name)
        section.view(payload.buffer)[0, row] = -1
        forged = type(payload).seal(payload.layout, group.label, payload.buffer)
        store.catalog.tier._payloads[group.ticket.slot] = forged
        _, found, lease = world.restored(store, A, STEM[: length + 1])
        assert found == (16 if live[row] else length)
        assert live[row] == ("evidence" in {x.code for x in lease.reasons})


def windows(*widths: int) -> CacheSpec:
    """A layer per width, each a component of its own, and a history."""
    layers = [synthetic.FULL]
    for width in widths:
        leaf = Leaf(contract=Window(width), component=f"window {width}", rows=width + 2, width=(1,))
        evidence = synthetic.positions("ring", width + 2)
        layers.append(LayerSpec(f"sliding {width}", (("ring", leaf), ("ring_pos", evidence))))
    return CacheSpec((Segment(1, tuple(layers)),), chunk=8, block=4)


@pytest.mark.parametrize(
    "widths", variants.some([[3, 8, 30], [30, 8, 3], [8, 30, 3]], [[3, 8, 30]])
)
def test_a3_a5_windows_of_several_widths_resume_jointly(widths):
    spec = windows(*widths)
    for hurt in (None, *widths):
        store, cache = stores.make(spec), synthetic.empty(spec, capacity=64)
        cache, _ = stores.serve(store, cache, 0, STEM, spec)
        # Also between the smallest and the largest window.
        for n in range(9, 41) if hurt is None else ():
            cache, length = stores.serve(store, cache, 1, STEM[:n], spec, publish=False)
            assert length == (n - 1) // 8 * 8
        if hurt is not None:  # one component's bytes, of the last checkpoint
            group = stores.stored(store, CHECKPOINT, 8)
            layout = store.catalog.tier._payloads[group.ticket.slot].layout
            (start,) = (x[1] for x in layout.components if x[0] == f"window {hurt}")
            stores.raw(store, group)[start] ^= 1
            with store.lookup(STEM) as lease:
                assert lease.resumable_length == 32
                cache = store.restore(lease, cache, 0)
                assert lease.resumable_length == 24
                assert f"window {hurt}" in {x.component for x in lease.reasons}
            assert not synthetic.wrong_rows(spec, cache, 0, STEM)


# -- B: other state ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HISTORY, CHECKPOINT])
def test_b1_any_component_that_falls_short_shortens_all(kind):
    depth, left = (6, 16) if kind == HISTORY else (8, 24)
    layout = world.opened().transfer.layout_of(kind, depth)
    for name, start, stop in layout.components:
        store = world.opened()
        world.published(store, A, STEM)
        assert world.flip(store, stores.stored(store, kind, depth), (start + stop) // 2)
        _, length, lease = world.restored(store, A, STEM)
        assert length == left
        assert name in {x.component for x in lease.reasons}
        assert set(lease.routes.values()) == {"host"}


@pytest.mark.parametrize(
    "kind, depth, left", [(HISTORY, 1, 0), (HISTORY, 7, 24), (CHECKPOINT, 8, 24)]
)
def test_b2_what_is_gone_between_lookup_and_fetch_shortens_the_hit(kind, depth, left):
    store = world.opened()
    world.published(store, A, STEM)
    with store.lookup(STEM, **A.arguments) as lease:
        assert lease.resumable_length == 32
        store.catalog.discard(stores.stored(store, kind, depth))
        cache = store.restore(lease, state.init(SPEC, 2, CAPACITY))
        assert lease.resumable_length == world.stands(cache, 0) == left
    assert world.wrong(cache, 0, A, STEM) == []
    world.healthy(store)


def test_b6_a_slot_handed_out_keeps_nothing_of_its_last_request():
    store = world.opened()
    world.published(store, A, STEM)

    def poison(slot):
        leaf = world.cold(OTHER, STEM, 40).leaf(slot)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.full_like(leaf, jnp.nan) if floating else leaf + 1

    poisoned = world.cold(OTHER, STEM, 40).with_leaves({x: poison(x) for x in SPEC.slots()})
    for n in (9, 17, 33, 40):
        again = jax.tree.map(jnp.copy, poisoned)
        cache, length, _ = world.restored(store, A, STEM[:n], again)
        assert length == (n - 1) // G * G
        for slot in SPEC.slots():
            if not isinstance(slot.leaf.contract, History) and slot.name in ("state", "conv"):
                assert np.isfinite(np.asarray(cache.leaf(slot))).all()


def test_b8_a_restart_keeps_every_place_to_resume(tmp_path):
    store = world.opened(tmp_path)
    world.published(store, A, STEM)
    store.close()
    store = world.opened(tmp_path)
    for tokens, expected in ((STEM, 32), (STEM[:-1], 32), (STEM[:33], 32), (STEM[:32], 24)):
        _, length, lease = world.restored(store, A, tokens)
        assert length == expected
    for at in (5, 9, 16, 17, 31):  # early divergence, with the reason
        _, length, lease = world.restored(store, A, fork(at))
        assert length == at // G * G
        assert {x.code for x in lease.reasons} >= {"no_match"}


def test_b10_m2_objects_that_go_one_by_one_leave_no_half_groups_and_no_orphans(tmp_path):
    draw = random.Random(0)
    store = world.opened(tmp_path)
    for tokens in PROMPTS[:8]:
        world.published(store, A, tokens)
    store.flush()
    while store.catalog.groups():
        group = draw.choice(store.catalog.groups())
        draw.choice([store.catalog.discard, store.catalog.leave_disk])(group)
        world.healthy(store)  # where a child without its parent, or its bytes, would be seen
        tokens = draw.choice(PROMPTS[:8])
        _, length, lease = world.restored(store, A, tokens)
        assert length == lease.resumable_length
    world.healthy(store)
    assert not store.disk.stored() and store.catalog.tier.free == store.catalog.tier.capacity


# -- C: boundaries -----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(1, CAPACITY + 1))
def test_c1_c12_a_checkpoint_stands_where_its_tokens_end(stop):
    """A scheduler that ignores the points it was told ends its chunks anywhere."""
    store = world.opened()
    told = store.publish(STEM, world.cold(A, STEM, stop), **A.arguments)
    assert told.checkpoint == (stop % G == 0)
    assert told.blocks == stop // G * G // B
    expected = stop if stop % G == 0 and stop < CAPACITY else 0
    assert world.restored(store, A, STEM)[1] == expected
    assert world.restored(store, A, STEM[:stop])[1] == 0  # the last token is always computed


@pytest.mark.parametrize(
    "n", sorted({k * x + d for k in range(1, 6) for x in (B, G) for d in (-1, 0, 1)})
)
def test_c2_c10_prompts_around_every_boundary(n):
    n = min(n, CAPACITY)
    store = world.opened()
    tokens = STEM[:n]
    world.published(store, A, tokens)
    cache, length, _ = world.restored(store, A, tokens)
    assert length == (n - 1) // G * G
    told = world.contents(A, tokens)
    cache = synthetic.advance(SPEC, cache, 0, told, n)  # prefill of the rest
    assert world.wrong(cache, 0, A, tokens) == []


@pytest.mark.parametrize("strides", variants.some([[1, 4, 8], [8, 1, 2], [2, 16, 4]], [[1, 4, 8]]))
def test_c4_components_of_different_units(strides):
    def layer(i, stride):
        leaf = Leaf(contract=History(stride), component=f"kv {i}", width=(i + 1,))
        return LayerSpec(f"layer {i}", (("kv", leaf), ("kv_count", synthetic.count("kv"))))

    layers = tuple(layer(i, x) for i, x in enumerate(strides))
    spec = CacheSpec((Segment(1, (*layers, synthetic.RECURRENT)),), chunk=24, block=16)
    store, cache = stores.make(spec), synthetic.empty(spec, capacity=144)
    tokens = stores.prompt(1, 144)
    for n in (144, 97, 96, 50, 49, 48, 144):
        cache, length = stores.serve(store, cache, n % 2, tokens[:n], spec)
        assert length == (0 if n == 144 and not length else (n - 1) // 48 * 48)
    assert length == 96


@pytest.mark.parametrize("at", range(CAPACITY))
def test_c5_a_prompt_never_resumes_beyond_the_first_token_that_differs(at):
    store = world.opened()
    world.published(store, A, STEM)
    changed = STEM.copy()
    changed[at] += 1
    assert world.restored(store, A, changed)[1] == min(at // G * G, 32)


@pytest.mark.parametrize("kind", ["exact", "prefix", "fork"])
def test_c8_no_token_is_left_out_or_computed_twice(kind):
    tokens = {"exact": STEM, "prefix": STEM[:29], "fork": fork(21)}[kind]
    store = world.opened()
    world.published(store, A, STEM)
    before = world.totals(store)
    cache, length, _ = world.restored(store, A, tokens)
    stop, computed = length, 0
    while stop < len(tokens):
        end = min(stop // G * G + G, len(tokens))
        cache = synthetic.advance(SPEC, cache, 0, world.contents(A, tokens), end)
        computed, stop = computed + end - stop, end
    assert world.wrong(cache, 0, A, tokens) == []
    after = world.totals(store)
    assert after["restored_tokens_total"] - before["restored_tokens_total"] == length
    assert length + computed == len(tokens) and length > 0


def test_c15_the_same_prompt_five_times():
    for n in (40, 33, 32, 17):
        store, tokens = world.opened(), STEM[:n]
        cache, used, seen = state.init(SPEC, 2, CAPACITY), [], []
        for turn in range(5):
            with store.lookup(tokens, **A.arguments) as lease:
                cache = store.restore(lease, cache, turn % 2)
                seen.append(world.stands(cache, turn % 2))
                for end in (*lease.checkpoint_points, n):
                    told = world.contents(A, tokens)
                    cache = synthetic.advance(SPEC, cache, turn % 2, told, end)
                    store.publish(tokens, cache, turn % 2, **A.arguments)
            used.append(PLENTY - store.catalog.tier.free)
        assert seen == [0] + [(n - 1) // G * G] * 4
        assert used == [used[0]] * 5


def test_d1_prefixes_whose_digests_all_agree_are_told_apart_by_their_tokens():
    def digest(message):  # the depth, and nothing else
        return b"\0" if message.startswith(b"l") else bytes([message[0] + 1])

    store = world.opened(digest=digest)
    world.published(store, A, STEM)
    assert world.restored(store, A, STEM)[1] == 32
    for who in WHO:
        for tokens in PROMPTS[2:]:
            shared = int(np.argmin(np.append(tokens == STEM[: len(tokens)], False)))
            expected = min(shared, len(tokens) - 1) // G * G if who == A else 0
            assert world.restored(store, who, tokens)[1] == expected
            told = store.publish(tokens, world.cold(who, tokens, len(tokens)), **who.arguments)
            blocks = len(tokens) // G * G // B
            assert told.blocks == min(shared // B, blocks) if who == A else not told.blocks
    world.healthy(store)


# -- M: order of eviction, silent losses -------------------------------------------------------


def test_m6_edits_of_the_last_message_and_regeneration_hit():
    store = world.opened()
    world.published(store, A, STEM)
    regenerated, edited, early = STEM, fork(35), fork(9)
    assert [world.resumable(store, A, x) for x in (regenerated, edited, early)] == [32, 32, 8]


def test_c6_m8_the_shortest_prefix_that_can_hit_is_told_and_true():
    store = world.opened()
    least = store.spec.minimum_resumable
    assert least == G
    for shared in range(0, 2 * G + 2):
        store.clear()
        world.published(store, A, STEM)
        hit = world.resumable(store, A, fork(shared))
        control = world.resumable(store, A, fork(0))
        assert hit == shared // G * G and control == 0
    for n in range(1, CAPACITY + 1):
        told = store.explain(STEM[:n], **A.arguments)
        assert (told.granularity, told.minimum_resumable) == (G, least)
        assert told.largest_boundary == told.plan.resumable_length == (n - 1) // G * G
        short = "short_prompt" in {x.code for x in told.plan.reasons}
        assert short == (n <= least)
        assert str(least) in str(told)


def test_m10_counters_equal_what_was_done():
    store, draw = world.opened(), random.Random(3)
    cache, truth = state.init(SPEC, 2, CAPACITY), dict.fromkeys(("asked", "restored", "new"), 0)
    for _ in range(40):
        who, tokens = draw.choice(WHO), draw.choice(PROMPTS[:10])
        cache, length, _ = world.restored(store, who, tokens, cache, 0)
        truth["asked"] += len(tokens)
        truth["restored"] += length
        for end in range(2 * G if draw.random() < 0.5 else G, len(tokens) + 1, 2 * G):
            told = store.publish(tokens, world.cold(who, tokens, end), **who.arguments)
            truth["new"] += told.new_blocks
    seen = world.totals(store)
    assert seen["prompt_tokens_total"] == truth["asked"]
    assert seen["restored_tokens_total"] == truth["restored"] > 0
    assert seen["restores_total"] == seen["lookups_total"] == 40
    groups = store.catalog.groups()
    assert sum(x.kind == HISTORY for x in groups) == truth["new"]
    assert seen["stored_groups_total"] == len(groups)
    assert seen["stored_bytes_total"] == sum(x.nbytes for x in groups) == seen["host_used_bytes"]
