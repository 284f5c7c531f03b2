"""Faults of resident pages and slots: what they change, and whom they must not touch."""

import functools

import numpy as np
import pytest

from hetero_kv import snapshot, validate
from hetero_kv.faults import kinds, residence, resident
from hetero_kv.faults.residence import MATE, ROW, Residence
from tests.hetero_kv import validators
from tests.hetero_kv.engine import world
from tests.hetero_kv.faults.matrix_test import bench

SPEC = world.model()[0].cache_spec
CASES = kinds.cases(SPEC, 2 * SPEC.granularity, (kinds.ALL, kinds.LAST))
ELSEWHERE = next(x for x in CASES if x.moment == kinds.ROW)
CASES = [x for x in CASES if x.moment == kinds.DEVICE]


@functools.cache
def made() -> Residence:
    return bench().residence


def leaves(cache, row: int) -> dict[str, np.ndarray]:
    return snapshot.take_leaves(made().spec, cache, made().length, row)


def damaged(case: kinds.Case):
    base = residence._copy(made().base)
    return resident.damage(SPEC, case, made().material, base, ROW, MATE)


@pytest.mark.parametrize("kind", sorted({x.kind for x in CASES}))
def test_only_what_is_said_changes(kind: str) -> None:
    before = {row: leaves(made().base, row) for row in (ROW, MATE)}
    owner = {x.path: validate.owner(SPEC, x).leaf.component for x in SPEC.slots()}
    for case in (x for x in CASES if x.kind == kind):
        cache = damaged(case)
        for path, value in leaves(cache, MATE).items():
            assert value.tobytes() == before[MATE][path].tobytes(), (case, path)
        changed = {
            owner[path]
            for path, value in leaves(cache, ROW).items()
            if value.tobytes() != before[ROW][path].tobytes()
        }
        if kind == kinds.POSITION and case.component not in ("windows", "tails"):
            assert int(cache.length[ROW]) == made().length - SPEC.granularity
            assert not changed
        else:
            assert changed == {case.component}, case


def test_released_pages_are_in_nobodys_books() -> None:
    case = next(x for x in CASES if x.kind == kinds.RELEASED)
    assert not bool(validators.ledgers(damaged(case))[case.component].exact)
    assert all(bool(x.exact) for x in validators.ledgers(made().base).values())


def test_masking_nothing_is_checking_everything() -> None:
    """The program of the ablation, with every bit on, gives what `models.checked` gives."""
    steps = made()._steps
    want, none = steps(residence._copy(made().base), frozenset())
    have, none_either = steps(residence._copy(made().base), frozenset({kinds.AUDIT}))
    assert none == none_either == () and want.tobytes() == have.tobytes()
    assert want.tobytes() == made().right.tobytes()
    for kind in (kinds.ENTRY, kinds.GENERATION, kinds.POSITION, kinds.REUSED):
        case = next(x for x in CASES if x.kind == kind)
        _, one = steps(damaged(case), frozenset())
        _, two = steps(damaged(case), frozenset({kinds.AUDIT}))
        assert one == two and one


def test_other_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="not a fault of resident state"):
        damaged(ELSEWHERE)
