"""Contracts against brute force."""

import dataclasses
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from hetero_kv.contract import (
    CacheSpec,
    Derived,
    Evidence,
    History,
    LayerSpec,
    Leaf,
    Point,
    Scratch,
    Segment,
    Window,
)
from hetero_kv.packing import Packing
from tests.hetero_kv import synthetic

LENGTHS = range(0, 70)


@pytest.mark.parametrize("stride, span", [(1, 1), (4, 4), (4, 8), (16, 32), (3, 5), (5, 3)])
def test_history_counts_entries_whose_last_token_is_there(stride, span):
    contract = History(stride, span)
    for length in LENGTHS:
        brute = sum(i * stride + span <= length for i in range(200))
        assert contract.count(length) == brute
        assert int(contract.count(jnp.asarray(length))) == brute
        assert int(contract.count(np.asarray(length))) == brute


def test_history_span_defaults_to_stride():
    assert History(4) == History(4, 4)


RINGS = [
    Leaf(contract=Window(8), component="w", rows=7),
    Leaf(contract=Window(8), component="w", rows=13),
    Leaf(contract=Window(1), component="w", rows=1),
    Leaf(contract=Point(4), component="t", rows=4),
    Leaf(contract=Point(4, keep=4), component="t", rows=8),
    Leaf(contract=Point(3, keep=2), component="t", rows=7),
]


def simulate_ring(rows, length):
    held = np.full(rows, -1)
    for position in range(length):
        held[position % rows] = position
    return held


def needed_positions(contract, length):
    """From the contract's words: positions that must be present to resume at `length`."""
    if isinstance(contract, Window):
        return range(max(0, length - min(length, contract.width - 1)), length)
    opened = length - length % contract.group
    return range(max(0, opened - contract.keep), length)


@pytest.mark.parametrize("leaf", RINGS, ids=lambda x: f"{x.contract}-{x.rows}")
def test_rings_against_simulation(leaf):
    for length in LENGTHS:
        held = simulate_ring(leaf.rows, length)
        np.testing.assert_array_equal(leaf.ring_positions(length), held)
        live = np.isin(held, list(needed_positions(leaf.contract, length)))
        np.testing.assert_array_equal(leaf.live_rows(length), live)
        # Every needed position is held: the ring is long enough.
        assert set(needed_positions(leaf.contract, length)) == set(held[live])


@pytest.mark.parametrize("leaf", RINGS, ids=lambda x: f"{x.contract}-{x.rows}")
def test_rings_traced_and_batched(leaf):
    lengths = jnp.arange(40).reshape(4, 10)
    rows = jax.jit(leaf.live_rows)(lengths)
    held = jax.jit(leaf.ring_positions)(lengths)
    assert rows.shape == held.shape == (4, 10, leaf.rows)
    for at in np.ndindex(4, 10):
        length = int(lengths[at])
        np.testing.assert_array_equal(rows[at], leaf.live_rows(length))
        np.testing.assert_array_equal(held[at], leaf.ring_positions(length))


def test_history_live_rows_are_the_first_ones():
    leaf = Leaf(contract=History(4, 8), component="e", width=(2,), tile=8)
    for length in LENGTHS:
        live = leaf.live_rows(length, 64)
        assert live.sum() == leaf.contract.count(length)
        assert live[: live.sum()].all()
    traced = jax.jit(lambda x: leaf.live_rows(x, 64))(jnp.arange(3) * 20)
    np.testing.assert_array_equal(traced.sum(-1), [0, 4, 9])


def test_live_rows_of_the_rest():
    assert Leaf(contract=Point(), component="s", width=(2,)).live_rows(0).all()
    assert Leaf(contract=Point(), component="s", rows=3).live_rows(5).shape == (3,)
    assert not Leaf(contract=Derived(), component="m", rows=3).live_rows(5).any()
    assert not Leaf(contract=Scratch(), component="x", rows=3).live_rows(5).any()


def test_shapes_and_bytes():
    leaf = Leaf(contract=History(4), component="e", width=(3,), dtype="bfloat16", tile=8, align=16)
    assert leaf.shape(65) == (16, 3)
    assert leaf.shape(1) == (8, 3)
    assert leaf.row_bytes == 6
    assert leaf.stride_bytes == 16
    assert Leaf(contract=Point(), component="s", width=(2, 3)).shape(99) == (2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: History(0),
        lambda: History(4, -1),
        lambda: Window(0),
        lambda: Point(-1),
        lambda: Point(0, keep=2),
        lambda: Evidence(of="x", kind="digest"),
        lambda: Leaf(contract=None, component="x"),
        lambda: Leaf(contract="History", component="x"),
        lambda: Leaf(contract=Window, component="x"),
        lambda: Leaf(contract=History(4), component="x", rows=3),
        lambda: Leaf(contract=Window(8), component="x", rows=6),
        lambda: Leaf(contract=Point(4, 4), component="x", rows=7),
        lambda: LayerSpec("l", (("x", np.zeros(3)),)),
        lambda: LayerSpec("l", (("x", None),)),
        lambda: LayerSpec("l", (("pos", synthetic.positions("gone", 3)),)),
        lambda: synthetic.everything(chunk=0),
        lambda: synthetic.everything(block=6),
    ],
)
def test_bad_declarations_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_geometry():
    spec = synthetic.everything(chunk=24, block=16)
    assert spec.strides_lcm == 4
    assert spec.granularity == spec.minimum_resumable == 48
    for length in range(200):
        brute = max(x for x in range(0, 200, 48) if x == 0 or x <= length - 1)
        assert spec.largest_boundary(length) == brute


def test_units():
    spec = synthetic.everything(block=8)
    for length in LENGTHS:
        assert spec.tokens_of(spec.blocks_in(length)) == length // 8 * 8


@pytest.mark.parametrize("stride, span", [(1, 1), (4, 4), (4, 8), (2, 16), (8, 24)])
def test_blocks_partition_the_entries(stride, span):
    spec = synthetic.only(synthetic.FULL, block=8)
    leaf = Leaf(contract=History(stride, span), component="e")
    for blocks in range(1, 8):
        ranges = [spec.entries_of_block(leaf, b) for b in range(blocks)]
        assert ranges[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert ranges[-1][1] == leaf.contract.count(8 * blocks)
    with pytest.raises(ValueError):
        spec.entries_of_block(Leaf(contract=Window(8), component="w", rows=8), 0)


def swa(width):
    leaf = Leaf(contract=Window(width), component="windows", rows=width)
    return LayerSpec("swa", (("window", leaf),))


def v4_layer(width, ratio, keep):
    window = Leaf(contract=Window(width), component="windows", rows=width)
    tail = Leaf(contract=Point(ratio, keep), component="tails", rows=ratio + keep)
    entries = Leaf(contract=History(ratio), component="entries")
    return LayerSpec("v4", (("entries", entries), ("window", window), ("tail", tail)))


def test_replay_length_of_v4_schedules_is_layers_times_window_minus_1():
    w, csa, hca = 128, v4_layer(128, 4, 4), v4_layer(128, 128, 0)
    flash = CacheSpec(
        (Segment(2, (swa(w),)), Segment(20, (csa, hca)), Segment(1, (csa,))), chunk=64, block=128
    )
    layers = 43
    assert flash.replay_tokens(128, round_up=False) == layers * (w - 1)
    assert flash.replay_length == math.ceil(layers * (w - 1) / 64) * 64
    # In the middle of a group the top layer's tail needs up to 127 tokens: no more than a window.
    assert flash.replay_tokens(None, round_up=False) == layers * (w - 1)


def test_replay_length_counts_tails_longer_than_what_is_above():
    top = v4_layer(4, 32, 32)  # needs 32 + open rows, its window only 3
    spec = CacheSpec((Segment(1, (swa(8),)), Segment(1, (top,))), chunk=1, block=32)
    assert spec.replay_tokens(32) == 32 + 7
    assert spec.replay_tokens(32 + 5) == 32 + 5 + 7
    assert spec.replay_tokens(None) == 32 + 31 + 7


def test_recurrent_state_cannot_be_replayed():
    assert synthetic.only(synthetic.RECURRENT).replay_length == math.inf


def test_full_attention_needs_no_replay():
    assert synthetic.only(synthetic.FULL).replay_length == 0


def reach(spec, length):
    """Brute force: the first token whose input any live row at `length` depends on exactly.

    A row of layer l at position p needs the inputs of layer l at p, which need the outputs of
    layer l - 1 at p, which need its window rows from p - (W - 1) on (History is read, not rerun).
    """
    lowest = length
    need = set()  # positions whose layer inputs must be exact, top layer first
    for layer in reversed(list(spec.layers())):
        inputs = set()
        for at in need:  # outputs needed above: this layer's windows there
            inputs |= set(range(max(0, at - max(layer.window - 1, 0)), at + 1))
        for _, leaf in layer.leaves:
            if leaf.is_ring:
                inputs |= set(needed_positions(leaf.contract, length))
        need = inputs
        lowest = min([lowest, *inputs])
    return length - lowest


@settings(max_examples=60)
@given(
    layers=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([2, 3, 4, 6]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    length=st.integers(100, 130),
)
def test_replay_tokens_against_dependency_sets(layers, length):
    layers = tuple(v4_layer(w, m, m if overlap else 0) for w, m, overlap in layers)
    spec = CacheSpec((Segment(1, layers),), chunk=1, block=12)
    assert spec.replay_tokens(length) == reach(spec, length)


def test_groups():
    spec = synthetic.everything()
    found = {slot.name: spec.group_of(slot) for slot in spec.slots()}
    assert {k for k, v in found.items() if v == "none"} == {"mask", "scratch"}
    history = {"entries", "keys", "nsa", "kv"}
    assert {k for k, v in found.items() if v == "history"} == history | {
        f"{x}_count" for x in history
    }


def test_bytes():
    spec = synthetic.everything(block=8)
    csa, nsa, full = 2 * 2 * (3 + 2) * 4, 2 * 2 * 2 * 4, 8 * 4 * 2
    assert spec.block_bytes() == csa + nsa + full
    assert spec.history_bytes_per_token() * 8 == csa + nsa + full


def test_specs_are_hashable_and_stable():
    assert hash(synthetic.everything()) == hash(synthetic.everything())
    assert synthetic.everything() == synthetic.everything()
    paths = [x.path for x in synthetic.everything().slots()]
    assert len(set(paths)) == len(paths)
    assert dataclasses.replace(synthetic.everything(), chunk=32) != synthetic.everything()


def test_packed_rows_are_declared_by_what_they_are_read_as() -> None:
    packing = Packing("fp8_rope", 512, 64)
    leaf = Leaf.of_rows(512, "float32", packing, contract=History(4), component="entries")
    assert (leaf.row_bytes, leaf.dtype, leaf.shape(64)) == (584, "uint8", (16, 584))
    assert leaf.poison == 255 and math.isnan(Leaf.of_rows(
        8, "bfloat16", contract=History(4), component="entries").poison)  # fmt: skip
    counter = Leaf(contract=Evidence(of="entries", kind="count"), component="x", dtype="int32")
    assert counter.poison is None
    for changes, told in (
        (dict(dtype="float32"), "packed rows are uint8"),
        (dict(width=(512,)), "packed rows are uint8"),
        (dict(contract=Point(), rows=0), "only rows of History and Window"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(leaf, **changes)
    with pytest.raises(ValueError, match="does not store"):
        Leaf.of_rows(512, "bfloat16", packing, contract=History(4), component="entries")
