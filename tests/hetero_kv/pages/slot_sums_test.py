"""Checksums of what is not sealed see every bit of live rows, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.contract import History
from hetero_kv.pages import cache as paged_cache
from hetero_kv.pages import slot_sums
from hetero_kv.pages.layout import Paging, history_slots
from hetero_kv.pages.table import COMPLETE, WRITING
from tests.hetero_kv.pages import convert
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.world import PROMPTS, SPEC, WHO

LENGTH = 2 * SPEC.granularity + 3
SUMS = jax.jit(functools.partial(slot_sums.sums, SPEC))
CHANGED = jax.jit(functools.partial(slot_sums.changed, SPEC))
STATE = [x for x in SPEC.slots() if SPEC.group_of(x) == "checkpoint"]
HISTORY = [x for x in SPEC.slots() if isinstance(x.leaf.contract, History)]
NAMES = validate.components(SPEC)


@functools.cache
def cache():
    """Rows 0 and 1 at different lengths."""
    one = world.cold(WHO[0], PROMPTS[0], LENGTH)
    return one


def poked(slot, row: int, live: bool, bit: int = 0):
    """One bit of one row of a leaf, which is live or not; None: it has no such row."""
    about = validate.owner(SPEC, slot).leaf
    value = np.array(cache().leaf(slot))
    rows = np.ones(1, bool)
    if about.rows:
        rows = np.asarray(about.live_rows(int(cache().length[row])))
    index = np.flatnonzero(rows == live)
    if not len(index):
        return None
    one = value[0, row, index[-1]] if about.rows else value[0, row]
    raw = np.ascontiguousarray(one).reshape(-1).view(np.uint8).copy()
    raw[-1] ^= 1 << bit
    changed = raw.view(value.dtype).reshape(np.shape(one))
    if about.rows:
        value[0, row, index[-1]] = changed
    else:
        value[0, row] = changed
    return cache().with_leaves({slot: jnp.array(value)})


@pytest.mark.parametrize("slot", STATE, ids=lambda x: x.path)
def test_one_bit_of_a_live_row(slot) -> None:
    before, name = SUMS(cache()), validate.owner(SPEC, slot).leaf.component
    for bit in (0, 7):
        found = CHANGED(poked(slot, 0, True, bit), before)
        assert validate.describe(SPEC, found, 0) == [f"{name}: checksum"]
        assert np.asarray(found.ok).tolist() == [False] + [True] * (cache().batch - 1)
    dead = poked(slot, 0, False)
    if dead is not None:
        assert CHANGED(dead, before).ok.all()


def test_history_without_pages_is_left_out_and_rows_may_be_left_out() -> None:
    before = SUMS(cache())
    for slot in HISTORY:
        changed = cache().with_leaves({slot: cache().leaf(slot) + 1})
        assert CHANGED(changed, before).ok.all()
    wrong = poked(STATE[0], 0, True)
    rows = jnp.zeros(cache().batch, bool)
    assert CHANGED(wrong, before, rows).ok.all()
    assert before.shape == (cache().batch, len(NAMES))


def test_exchanged_rows_of_a_ring_are_noticed() -> None:
    before = SUMS(cache())
    for slot in STATE:
        if not slot.leaf.rows or np.asarray(slot.leaf.live_rows(LENGTH)).sum() < 2:
            continue
        i, j = np.flatnonzero(slot.leaf.live_rows(LENGTH))[:2]
        value = np.array(cache().leaf(slot))
        value[:, 0, [i, j]] = value[:, 0, [j, i]]
        assert not CHANGED(cache().with_leaves({slot: jnp.array(value)}), before).ok[0]


@functools.cache
def paged():
    """The same row in pages: those that it has filled are sealed, one of each component is open."""
    one, spans = cache(), {}
    for name, (slot, *_) in history_slots(SPEC).items():
        contract = slot.leaf.contract
        spans[name] = next(
            x for x in (8, 12) if int(contract.count(LENGTH)) % (x // contract.stride)
        )
    paging = Paging.of(SPEC, one.batch, one.capacity, spans)
    made = convert.into_pages(SPEC, one, paging, (0,))
    made, flags = jax.jit(functools.partial(paged_cache.seal, SPEC))(made, np.int32(0))
    assert int(flags) == 0
    return made


@functools.cache
def sums_before():
    return SUMS(paged())


def with_bit(slot, page: int, entry: int):
    """The paged cache with one bit of one entry changed."""
    pool = np.array(paged().leaf(slot))
    raw = np.ascontiguousarray(pool[-1, page, entry]).reshape(-1).view(np.uint8).copy()
    raw[0] ^= 1
    pool[-1, page, entry] = raw.view(pool.dtype).reshape(pool[-1, page, entry].shape)
    return paged().with_leaves({slot: jnp.array(pool)})


@pytest.mark.parametrize("slot", HISTORY, ids=lambda x: x.path)
def test_open_pages_count_by_the_entries_written(slot) -> None:
    """What is sealed has checksums of its own."""
    component = slot.leaf.component
    pages, page = paged().pages.tables[component], paged().pages.paging.page(component)
    ids, written = np.asarray(pages.table[0]), int(page.contract.count(LENGTH))
    column, held = divmod(written, page.entries)
    assert held and np.asarray(pages.form)[ids[: column + 1]].tolist() == [COMPLETE] * column + [
        WRITING
    ]
    for entry in range(page.entries):
        found = CHANGED(with_bit(slot, ids[column], entry), sums_before())
        told = [f"{component}: checksum"] if entry < held else []
        assert validate.describe(SPEC, found, 0) == told
    if column:
        assert CHANGED(with_bit(slot, ids[0], 0), sums_before()).ok.all()
