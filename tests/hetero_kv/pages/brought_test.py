"""What a restore has brought: its sums see every live bit, in its place, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state, validate
from hetero_kv.contract import History
from hetero_kv.pages import brought
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.world import CAPACITY, PROMPTS, SPEC, WHO

LENGTH = 2 * SPEC.granularity
CHANGED = jax.jit(functools.partial(brought.changed, SPEC))
HISTORY = [x for x in SPEC.slots() if isinstance(x.leaf.contract, History)]
STATE = [x for x in SPEC.slots() if SPEC.group_of(x) == "checkpoint"]


@functools.cache
def restored():
    """(cache of one row, what was brought), LENGTH tokens of a prompt."""
    store = world.opened()
    world.published(store, WHO[0], PROMPTS[0], LENGTH)
    with store.lookup(PROMPTS[0], **WHO[0].arguments) as lease:
        cache = store.restore(lease, state.init(SPEC, 1, CAPACITY, poison=True), 0)
        assert world.stands(cache, 0) == LENGTH == int(lease.brought.tokens)
        return cache, lease.brought


def found(cache, given) -> list[str]:
    bits, _ = CHANGED(cache, given)
    return validate.describe(SPEC, validate.Verdict(bits[None], None), 0)


def name(slot) -> str:
    return validate.owner(SPEC, slot).leaf.component


def flipped(slot, live: bool, last: bool = False):
    """One bit of a row of a leaf, which is live or not; None: there is none."""
    cache = restored()[0]
    about, value = validate.owner(SPEC, slot).leaf, np.array(cache.leaf(slot))
    rows = slot.leaf.row_count(CAPACITY) or about.rows
    mask = np.asarray(about.live_rows(LENGTH, CAPACITY)) if rows else np.ones(1, bool)
    index = np.flatnonzero(mask == live)
    if not len(index):
        return None
    at = (slot.repeats - 1, 0, index[-1 if last else 0]) if rows else (slot.repeats - 1, 0)
    raw = np.ascontiguousarray(value[at]).reshape(-1).view(np.uint8).copy()
    raw[-1 if last else 0] ^= 1
    value[at] = raw.view(value.dtype).reshape(np.shape(value[at]))
    return cache.with_leaves({slot: jnp.array(value)})


def test_what_was_brought_is_there() -> None:
    cache, given = restored()
    stored = {name(x) for x in HISTORY + STATE}
    summed = zip(validate.components(SPEC), np.asarray(given.sums), strict=True)
    assert given.state and not given.first and {x for x, total in summed if total} == stored
    assert found(cache, given) == []
    nothing = brought.nothing(SPEC)
    assert found(state.init(SPEC, 1, CAPACITY), nothing) == []
    changed = flipped(HISTORY[0], True)
    assert found(changed, nothing) == []


@pytest.mark.parametrize("slot", HISTORY + STATE, ids=lambda x: x.path)
def test_one_bit_of_a_live_row(slot) -> None:
    _, given = restored()
    for last in (False, True):
        assert found(flipped(slot, True, last), given) == [f"{name(slot)}: checksum"]
        dead = flipped(slot, False, last)
        assert dead is None or found(dead, given) == []


def test_before_a_replay_history_alone_is_compared() -> None:
    cache, given = restored()
    with_history = np.isin(validate.components(SPEC), [name(x) for x in HISTORY])
    some = given._replace(state=np.False_, sums=np.where(with_history, given.sums, 0))
    assert found(cache, some) == found(flipped(STATE[0], True), some) == []
    assert found(flipped(HISTORY[0], True), some) == [f"{name(HISTORY[0])}: checksum"]


@pytest.mark.parametrize("slot", HISTORY, ids=lambda x: x.path)
def test_entries_in_each_others_place(slot) -> None:
    """Within a block, between blocks and layers; those that came otherwise are left out."""
    cache, given = restored()
    count = slot.leaf.contract.count(LENGTH)
    value, per = np.array(cache.leaf(slot)), SPEC.block // slot.leaf.contract.stride
    pairs = [(0, 1), (0, count - 1), (0, min(per, count - 1))]
    for i, j in pairs:
        other = value.copy()
        other[:, 0, [i, j]] = other[:, 0, [j, i]]
        assert found(cache.with_leaves({slot: jnp.array(other)}), given)
    if slot.repeats > 1:
        turned = cache.with_leaves({slot: jnp.array(value[::-1])})
        assert found(turned, given) == [f"{name(slot)}: checksum"]
    blocks = SPEC.blocks_in(LENGTH)
    none = given._replace(first=np.int32(blocks), sums=np.zeros_like(given.sums), state=False)
    assert found(cache.with_leaves({slot: jnp.array(other)}), none) == []


def test_what_went_to_another_row_is_missed_in_its_own() -> None:
    """The sums are of what was given, not of where it went."""
    store = world.opened()
    world.published(store, WHO[0], PROMPTS[0], LENGTH)
    real = store.transfer.write

    def write(cache, row, *rest):
        return real(cache, 1 - row, *rest)

    store.transfer.write = write
    try:
        with store.lookup(PROMPTS[0], **WHO[0].arguments) as lease:
            cache = store.restore(lease, state.init(SPEC, 2, CAPACITY), 0)
    finally:
        store.transfer.write = real
    for row, fine in ((0, False), (1, True)):
        told = found(state.take_row(cache, row), lease.brought)
        assert (told == []) == fine
        if not fine:
            assert {x.split(":")[0] for x in told} == {name(x) for x in HISTORY + STATE}
