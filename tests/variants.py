"""Which variants of a test run in `make test`, and which in `make test-full` alone."""

from collections.abc import Collection, Iterable

import pytest


def some(every: Iterable, quick: Collection) -> list:
    """Parameters for `pytest.mark.parametrize`: those that are not in `quick` are marked full.

    A tuple is the values of several names; one value that is a sequence must be a list.

    Compiling takes most of the time of tests, so variants that compile a model or kernel of their
    own are worth their time in `make test` only where no other variant is like them.
    """
    return [x if x in quick else _full(x) for x in every]


def _full(case: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
