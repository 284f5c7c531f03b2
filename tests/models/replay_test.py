"""Replay rebuilds windows and tails from stored history: bitwise where it claims to be exact."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv.contract import Evidence, Point, Window
from hetero_kv.state import Cache
from models.decoder import Decoder
from tests import variants
from tests.models import tiny

EXACT = ("v4", "scanned", "full_mixed", "no_window", "full")
STOP = 48


@functools.cache
def cold(name: str, stop: int) -> Cache:
    """The state of `stop` tokens from one prefill. Copy it before it is used."""
    made, params = tiny.model(name)
    return made.prefill(params, tiny.tokens()[:, :stop], tiny.empty(made))[1]


def without_checkpoint(made: Decoder, cache: Cache) -> Cache:
    """A copy whose windows and tails are gone: NaN, and evidence of nothing."""
    gone = {}
    for slot in made.cache_spec.slots():
        if made.cache_spec.group_of(slot) == "checkpoint":
            value = -1 if isinstance(slot.leaf.contract, Evidence) else jnp.nan
            gone[slot] = jnp.full_like(cache.leaf(slot), value)
    return tiny.copy(cache).with_leaves(gone)


def replayed(name: str, start: int, stop: int) -> Cache:
    made, params = tiny.model(name)
    cache = without_checkpoint(made, cold(name, stop))
    return made.replay(params, tiny.tokens(), cache, start, stop)


def assert_history_untouched(made: Decoder, before: Cache, after: Cache) -> None:
    """Entries, index keys, full-attention rows and their counters, dead rows too."""
    for slot in made.cache_spec.slots():
        if made.cache_spec.group_of(slot) == "history":
            np.testing.assert_array_equal(before.leaf(slot), after.leaf(slot), err_msg=slot.path)


def checkpoint_error(made: Decoder, one: Cache, two: Cache) -> dict[int, float]:
    """By layer, the largest difference in live rows of windows and tails."""
    worst: dict[int, float] = {}
    for (slot, _, a), (_, _, b) in zip(
        tiny.live_values(made, one), tiny.live_values(made, two), strict=True
    ):
        if isinstance(slot.leaf.contract, Window | Point):
            for repeat in range(slot.repeats):
                layer = made.runs[slot.segment].layer(repeat, slot.layer)
                error = np.abs(a[repeat] - b[repeat]).max(initial=0.0)
                worst[layer] = max(worst.get(layer, 0.0), float(error))
    return worst


@pytest.mark.parametrize("name", variants.some(EXACT, ("v4",)))
def test_exact_replay_is_bitwise_equal_to_cold(name: str) -> None:
    made, _ = tiny.model(name)
    need = made.cache_spec.replay_tokens(STOP)
    start = STOP - int(need)
    if not need:  # nothing to rebuild, but replaying a chunk must do no harm
        start = STOP - tiny.CHUNK
    assert 0 < start < STOP, "the replay must not be the whole prompt, or nothing is tested"
    cache = replayed(name, start, STOP)
    tiny.assert_same_state(made, cache, cold(name, STOP))
    assert_history_untouched(made, cold(name, STOP), cache)
    assert list(cache.grid_length) == [STOP, STOP]  # publishable
    mine, _ = tiny.decode(name, cache, 9)
    cold_run, _ = tiny.decode(name, tiny.copy(cold(name, STOP)), 9)
    np.testing.assert_array_equal(mine, cold_run)


@pytest.mark.parametrize("name", variants.some(EXACT, ("v4",)))
def test_replay_of_everything_is_exact(name: str) -> None:
    made, _ = tiny.model(name)
    for stop in (tiny.CHUNK, 21):
        cache = replayed(name, 0, stop)
        tiny.assert_same_state(made, cache, cold(name, stop))
        assert_history_untouched(made, cold(name, stop), cache)
        np.testing.assert_array_equal(cache.grid_length, cold(name, stop).grid_length)


@pytest.mark.parametrize(
    "name", variants.some(("v4", "scanned", "full_mixed", "no_window"), ("v4",))
)
def test_replay_off_the_grid(name: str) -> None:
    made, _ = tiny.model(name)
    stop = 53
    need = made.cache_spec.replay_tokens(stop, round_up=False)
    start = (stop - int(need)) // tiny.CHUNK * tiny.CHUNK
    assert start > 0
    cache = replayed(name, start, stop)
    tiny.assert_same_state(made, cache, cold(name, stop))
    assert_history_untouched(made, cold(name, stop), cache)


@pytest.mark.parametrize("name", variants.some(("v4", "scanned"), ("v4",)))
def test_one_chunk_less_is_wrong_at_the_top_and_not_publishable(name: str) -> None:
    made, _ = tiny.model(name)
    need = int(made.cache_spec.replay_tokens(STOP))
    assert need > tiny.CHUNK
    cache = replayed(name, STOP - need + tiny.CHUNK, STOP)
    errors = checkpoint_error(made, cache, cold(name, STOP))
    top = len(made.config.layer_types) - 1
    assert errors[top] > 0
    assert errors[0] == 0  # the lowest layer reads tokens only
    assert all(np.isfinite(list(errors.values())))
    assert_history_untouched(made, cold(name, STOP), cache)
    assert list(cache.length) == [STOP, STOP]
    assert not cache.grid_length.any()


@pytest.mark.parametrize("name", variants.some(("v4", "full_mixed"), ("v4",)))
def test_rows_that_are_not_replayed_keep_everything(name: str) -> None:
    made, params = tiny.model(name)
    _, cache = tiny.decode(name, tiny.copy(cold(name, STOP)), 3, (True, False))
    before = tiny.copy(cache)
    cache = made.replay(params, tiny.tokens(), cache, 0, STOP, rows=np.array([False, True]))
    for slot in made.cache_spec.slots():
        np.testing.assert_array_equal(cache.leaf(slot)[:, 0], before.leaf(slot)[:, 0])
    assert list(cache.length) == [STOP + 3, STOP]
    assert list(cache.grid_length) == list(before.grid_length)
    tiny.assert_same_state(made, cache, before)


def test_bad_replays_are_refused() -> None:
    made, params = tiny.model("v4")
    for start, stop in ((3, STOP), (STOP, STOP), (-tiny.CHUNK, STOP), (STOP, 16)):
        with pytest.raises(ValueError, match="start on the chunk grid"):
            made.replay(params, tiny.tokens(), tiny.empty(made), start, stop)
    with pytest.raises(ValueError, match="needs that many tokens"):
        made.replay(params, tiny.tokens()[:, :40], tiny.empty(made), 0, STOP)


@pytest.mark.parametrize("layers", [1, 3, 43])
@pytest.mark.parametrize("window", [1, 6, 17, 128])
def test_replay_length_is_layers_times_window(layers: int, window: int) -> None:
    kinds = (("swa", "csa", "hca") * layers)[:layers]
    config = tiny.BASE.replace(layer_types=kinds, mlp_types=("dense",) * layers, window=window)
    spec = models.build(config).cache_spec
    tail = {1: 0, 3: 0, 43: 0}[layers]  # at a boundary no row is open; CSA keeps its overlap
    if layers > 1 and kinds[-1] == "csa":
        tail = 4
    need = max(layers * (window - 1), tail)
    if window == 1:  # the overlap of the topmost CSA layer is all there is
        need = 4 if layers > 1 else 0
    assert spec.replay_tokens(spec.granularity, round_up=False) == need
    assert spec.replay_length == math.ceil(need / tiny.CHUNK) * tiny.CHUNK


@pytest.mark.parametrize(
    "name, need",
    [
        ("full", 0),
        ("no_window", 4),  # the overlap
        ("nothing_to_see", 4),
        ("all_entries", 14),  # two windows of 8
        ("full_mixed", 4),  # two windows of 3; the overlap of a layer of ratio 3 is less
    ],
)
def test_replay_length_of_other_schedules(name: str, need: int) -> None:
    spec = tiny.model(name)[0].cache_spec
    assert spec.replay_tokens(spec.granularity, round_up=False) == need
    assert spec.replay_length == math.ceil(need / tiny.CHUNK) * tiny.CHUNK


def test_replay_structure_is_that_of_the_cache() -> None:
    cache = replayed("v4", 0, tiny.CHUNK)
    assert jax.tree.structure(cache) == jax.tree.structure(cold("v4", tiny.CHUNK))
