"""Every mutant of the store is seen by the checks that name it, which pass without it."""

import contextlib
import dataclasses
import traceback

import pytest

from hetero_kv.prefix.identity import Identity
from tests.hetero_kv.prefix import (
    mutants,
    mutants_of_tiers,
)

FILES = {mutants.__file__, mutants_of_tiers.__file__}
CHECKS = {
    f"{name}-{i}": (change, one)
    for name, (change, checks) in mutants_of_tiers.MUTANTS.items()  # those of mutants.py too
    for i, one in enumerate(checks)
}


def test_there_are_mutants_enough():
    assert len(mutants_of_tiers.MUTANTS) >= 40
    fields = {x.name for x in dataclasses.fields(Identity)}
    assert {f"the identity ignores {x}" for x in fields} <= set(mutants.MUTANTS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_suite_sees_it(name):
    change, one = CHECKS[name]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        change(patch)
        try:
            one()
        except (AssertionError, LookupError, AttributeError, pytest.fail.Exception) as error:
            # By what the check found, and not because the mutant itself is broken.
            assert traceback.extract_tb(error.__traceback__)[-1].filename not in FILES
            return
    pytest.fail(f"nothing saw it: {one.__name__}")


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_passes_without_it(name):
    CHECKS[name][1]()
