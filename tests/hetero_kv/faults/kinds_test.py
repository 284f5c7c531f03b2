"""The table of faults: complete, and about contracts alone."""

import pytest

from hetero_kv.contract import Derived, Evidence, History, Point, Scratch, Window
from hetero_kv.faults import kinds
from tests.hetero_kv.faults.world import LENGTH
from tests.hetero_kv.prefix.world import SPEC

STORED = (History(4), History(4, span=8), Window(8), Point(4, keep=4), Point())
EVERY = kinds.cases(SPEC, LENGTH, (kinds.ALL, kinds.LAST))


def test_every_kind_moment_and_check_is_in_the_table() -> None:
    assert len(kinds.KINDS) >= 14
    assert {x.kind for x in kinds.TABLE} == set(kinds.KINDS)
    assert {m for x in kinds.TABLE for m in x.moments} == set(kinds.MOMENTS)
    assert {x.guard for x in kinds.TABLE} == set(kinds.CHECKS) == set(kinds.CODES)


def test_no_two_lines_say_the_same() -> None:
    seen = [
        (x.kind, contract, moment, x.seal)
        for x in kinds.TABLE
        for contract in x.contracts
        for moment in x.moments
    ]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("contract", STORED, ids=str)
def test_every_contract_has_faults_at_every_moment(contract) -> None:
    for moment in kinds.MOMENTS:
        found = {x for x in kinds.KINDS if kinds.applies(x, contract, moment)}
        assert len(found) >= 8, (moment, found)
    ever = {x for x in kinds.KINDS for m in kinds.MOMENTS if kinds.applies(x, contract, m)}
    no_pages = {kinds.COUNT, kinds.ENTRY, kinds.RELEASED}
    missing = {
        "History": set(),
        "Window": no_pages,
        "Point": no_pages
        if getattr(contract, "group", 1)
        else no_pages | {kinds.POSITION, kinds.SHIFT_ENTRY},
    }[type(contract).__name__]
    assert ever == set(kinds.KINDS) - missing


@pytest.mark.parametrize("contract", [Derived(), Scratch(), Evidence(of="x", kind="count")])
def test_what_is_not_stored_has_none(contract) -> None:
    assert not any(kinds.applies(x, contract, m) for x in kinds.KINDS for m in kinds.MOMENTS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no such fault"):
        kinds.applies("gamma_ray", Window(8), kinds.HOST)
    with pytest.raises(ValueError, match="no such fault"):
        kinds.applies(kinds.ZERO, Window(8), "never")


def test_cases_cover_all_components_of_any_model() -> None:
    assert len(EVERY) == len(set(EVERY))
    stored = {"csa entries", "csa index keys", "nsa entries", "full kv"}
    stored |= {"windows", "tails", "recurrent state"}
    for kind in (kinds.ZERO, kinds.BIT, kinds.TORN, kinds.STALE, kinds.DTYPE):
        for moment in kinds.MOMENTS:
            some = {x.component for x in EVERY if (x.kind, x.moment) == (kind, moment)}
            assert some == stored
    assert {x.extent for x in EVERY if x.component == "windows"} == {kinds.ALL}
    # A group goes as a whole: one case per group.
    gone = [x for x in EVERY if x.kind == kinds.EVICTED and x.extent == kinds.ALL]
    assert [x.component for x in gone] == ["csa entries", "windows"]


def test_the_sample_covers_every_line() -> None:
    def lines(some) -> set:
        return {(x.kind, x.moment, x.seal, x.guard) for x in some}

    sample = kinds.covering(EVERY)
    assert lines(sample) == lines(EVERY) and len(sample) == len(lines(EVERY))
    assert {x.component for x in sample} == {x.component for x in EVERY}


@pytest.mark.parametrize("length", [0, SPEC.granularity, SPEC.granularity * 2 + 1])
def test_there_must_be_something_before(length: int) -> None:
    with pytest.raises(ValueError, match="at least two"):
        kinds.cases(SPEC, length)
