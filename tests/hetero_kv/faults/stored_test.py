"""Faults put to the store alone, with every kind of contract: what it finds, and what it cannot."""

import numpy as np
import pytest

from hetero_kv import state, validate
from hetero_kv.faults import kinds, places
from tests.hetero_kv import validators
from tests.hetero_kv.faults.world import LENGTH, STEM, A, injector
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.world import CAPACITY, SPEC

EVERY = kinds.cases(SPEC, LENGTH, (kinds.ALL, kinds.LAST))
# Where the keys must tell, nothing is forged: epochs_test, isolation_test.
NOT_STORED = (kinds.ROW, kinds.DEVICE)
STORED = [x for x in EVERY if x.moment not in NOT_STORED and x.guard != kinds.IDENTITY]
ROWS = [x for x in EVERY if x.moment == kinds.ROW]


def restored(case, directory):
    """(cache, lease) of one restore of LENGTH tokens under a fault of the store."""
    store = world.opened(directory if case.moment == kinds.DISK else None)
    world.published(store, A, STEM, LENGTH)
    if case.moment == kinds.DISK:
        places.to_disk(store)
    if case.moment != kinds.FETCH:
        injector().damage(case, store)
    with store.lookup(STEM, **A.arguments) as lease:
        if case.moment == kinds.FETCH:
            injector().damage(case, store)
        cache = store.restore(lease, state.init(SPEC, 2, CAPACITY), 1)
        assert world.stands(cache, 1) == lease.resumable_length
    return cache, lease


@pytest.mark.parametrize("kind", sorted({x.kind for x in STORED}))
def test_the_store_refuses_what_it_can_know(kind: str, tmp_path) -> None:
    for i, case in enumerate(x for x in STORED if x.kind == kind):
        cache, lease = restored(case, tmp_path / str(i))
        if case.guard == kinds.AUDIT:  # sealed as wrong as it was: only computing again can tell
            assert lease.resumable_length == LENGTH and not lease_tells(lease), case
            assert world.wrong(cache, 1, A, STEM), f"{case}: nothing is wrong"
            continue
        if case.guard == kinds.EVIDENCE:  # in the call that reads the row
            told = validate.describe(SPEC, validators.evidence(SPEC, cache), 1)
            assert any(case.component in x for x in told), (case, told)
            continue
        assert lease.resumable_length < LENGTH, case
        assert not world.wrong(cache, 1, A, STEM), case
        told = [x for x in lease.reasons if x.code in kinds.CODES[case.guard]]
        assert told, (case, lease.reasons)
        if case.guard in kinds.NAMING:
            assert case.component in {x.component for x in told}, (case, told)


def lease_tells(lease) -> list:
    return [x for x in lease.reasons if x.code not in ("no_match", "granularity")]


@pytest.mark.parametrize("kind", sorted({x.kind for x in ROWS}))
def test_evidence_tells_what_it_can_of_a_row(kind: str) -> None:
    cold = world.cold(A, STEM, LENGTH)
    for case in (x for x in ROWS if x.kind == kind):
        cache = injector().damage_row(case, cold, 0)
        verdict = validators.evidence(SPEC, cache)
        told = validate.describe(SPEC, verdict, 0)
        assert bool(told) == (case.guard == kinds.EVIDENCE), (case, told)
        assert not told or any(case.component in x for x in told), (case, told)
        assert told or world.wrong(cache, 0, A, STEM), f"{case}: nothing is wrong"


def test_other_blocks_are_left_alone(tmp_path) -> None:
    for component in ("csa entries", "full kv", "nsa entries"):
        case = kinds.Case(kinds.ZERO, component, kinds.HOST, kinds.REMADE, kinds.AUDIT, kinds.LAST)
        cache, _ = restored(case, tmp_path)
        row = kinds.Case(kinds.ZERO, component, kinds.ROW, kinds.NONE, kinds.AUDIT, kinds.LAST)
        other = injector().damage_row(row, world.cold(A, STEM, LENGTH), 0)
        for slot in SPEC.slots():
            if slot.leaf.component != component:
                continue
            right = np.asarray(world.cold(A, STEM, LENGTH).leaf(slot))[:, 0]
            first, last = SPEC.entries_of_block(slot.leaf, SPEC.blocks_in(LENGTH) - 1)
            for found in (np.asarray(cache.leaf(slot))[:, 1], np.asarray(other.leaf(slot))[:, 0]):
                assert found[:, :first].tobytes() == right[:, :first].tobytes()
                assert not found[:, first:last].any()


def test_a_fault_where_nothing_is_stored_is_an_error() -> None:
    case = next(x for x in STORED if x.moment == kinds.HOST)
    with pytest.raises(ValueError, match="not stored"):
        injector().damage(case, world.opened())
    with pytest.raises(ValueError, match="not a fault of a row"):
        injector().damage_row(case, world.cold(A, STEM, LENGTH), 0)
    with pytest.raises(ValueError, match="nothing is forged"):
        injector().damage(ROWS[0], world.opened())
