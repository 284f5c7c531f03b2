"""The validator finds every disagreement between evidence and lengths, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state, validate
from hetero_kv.contract import Evidence
from tests.hetero_kv import synthetic

SPEC = synthetic.everything()
NAMES = validate.components(SPEC)
TOKENS = np.arange(70) * 5 % 11
evidence = jax.jit(functools.partial(validate.evidence, SPEC))
with_finite = jax.jit(functools.partial(validate.evidence, SPEC, finite=True))


def cache_at(*lengths):
    cache = synthetic.empty(SPEC, batch=len(lengths))
    for row, length in enumerate(lengths):
        cache = synthetic.advance(SPEC, cache, row, TOKENS + row, length)
    return cache


def slot_named(name):
    return next(x for x in SPEC.slots() if x.name == name)


def test_components():
    assert NAMES == (
        "csa entries",
        "csa index keys",
        "windows",
        "tails",
        "masks",
        "nsa entries",
        "full kv",
        "recurrent state",
        "lengths",
    )


@pytest.mark.parametrize("first", range(0, 64, 4))
def test_true_evidence_passes_at_every_length(first):
    verdict = with_finite(cache_at(*range(first, first + 4)))
    assert verdict.ok.all()
    assert not verdict.bits.any()
    assert verdict.bits.shape == (4, len(NAMES))


@pytest.mark.parametrize("name", ["entries_count", "keys_count", "nsa_count", "kv_count"])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_wrong_counter_is_found(name, step):
    cache, slot = cache_at(20, 41, 0), slot_named(name)
    last = slot.repeats - 1
    cache = synthetic.edit(cache, slot, (last, 1), step, add=True)
    verdict = evidence(cache)
    component = validate.owner(SPEC, slot).leaf.component
    assert list(verdict.ok) == [True, False, True]
    assert validate.describe(SPEC, verdict, 1) == [f"{component}: count"]
    assert validate.describe(SPEC, verdict, 0) == []


@pytest.mark.parametrize("name", ["window_pos", "tail_pos"])
@pytest.mark.parametrize("length", [1, 7, 8, 29, 40])
def test_a_wrong_position_is_found_on_every_live_row_and_on_no_other(name, length):
    cache, slot = cache_at(length), slot_named(name)
    about = validate.owner(SPEC, slot).leaf
    live = about.live_rows(length)
    for row in range(about.rows):
        verdict = evidence(synthetic.edit(cache, slot, (1, 0, row), about.rows, add=True))
        wanted = [f"{about.component}: positions"] if live[row] else []
        assert validate.describe(SPEC, verdict, 0) == wanted


def test_the_ring_of_another_request_is_found():
    # The classical fault: a hit at 40 reads the window that a request of 25 tokens left behind.
    cache = cache_at(25)
    cache = cache.replace(length=cache.length.at[0].set(40))
    found = validate.describe(SPEC, evidence(cache), 0)
    assert "windows: positions" in found and "csa entries: count" in found


@pytest.mark.parametrize(
    "length, grid, capacity_ok", [(-1, 0, False), (65, 0, False), (20, 21, False), (20, -1, False)]
)
def test_lengths_out_of_range(length, grid, capacity_ok):
    cache = cache_at(20)
    cache = cache.replace(length=jnp.array([length]), grid_length=jnp.array([grid]))
    assert "lengths: length" in validate.describe(SPEC, evidence(cache), 0)


def test_row_mask():
    cache = cache_at(20, 30)
    cache = cache.replace(length=cache.length + 1)
    assert list(evidence(cache).ok) == [False, False]
    verdict = evidence(cache, jnp.array([False, True]))
    assert list(verdict.ok) == [True, False]
    assert not verdict.bits[0].any()


def test_finite_reads_live_rows_only():
    cache = cache_at(21)
    for slot in SPEC.slots():
        if isinstance(slot.leaf.contract, Evidence) or slot.leaf.component == "scratch":
            continue
        live = slot.leaf.live_rows(21, cache.capacity)
        dead, alive = np.flatnonzero(~live), np.flatnonzero(live)
        if len(dead):
            changed = synthetic.edit(cache, slot, (0, 0, dead), np.nan)
            assert with_finite(changed).ok.all(), slot.path
        if len(alive):
            verdict = with_finite(synthetic.edit(cache, slot, (0, 0, alive[-1]), np.nan))
            found = validate.describe(SPEC, verdict, 0)
            assert found == [f"{slot.leaf.component}: nonfinite"], slot.path


def test_poisoned_empty_cache_is_fine():
    assert with_finite(state.init(SPEC, 2, 16, poison=True)).ok.all()


def test_vmap_and_one_compile():
    caches = [cache_at(a, b) for a, b in [(3, 40), (12, 0), (64, 5)]]
    caches[1] = caches[1].replace(length=caches[1].length + 1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    check = jax.jit(jax.vmap(functools.partial(validate.evidence, SPEC)))
    assert check(stacked).ok.tolist() == [[True, True], [False, False], [True, True]]
    fresh = jax.jit(functools.partial(validate.evidence, SPEC))
    for cache in caches:
        fresh(cache)
    assert fresh._cache_size() == 1
