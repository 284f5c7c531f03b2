"""Schedules are cut into the fewest layer bodies, and put together again to the same layers."""

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.schedule import MAX_PATTERN, Run, cut


def layers(runs: tuple[Run, ...]) -> list[str]:
    """The kinds in order; checks that the numbers of the layers are right."""
    out: list[str] = []
    for run in runs:
        assert run.start == len(out)
        for repeat in range(run.repeats):
            for position, kind in enumerate(run.pattern):
                assert run.layer(repeat, position) == len(out)
                out.append(kind)
    return out


def fewest_bodies(kinds: str) -> int:
    """By trying every way of cutting."""

    @functools.cache
    def best(rest: str) -> int:
        if not rest:
            return 0
        found = len(rest)
        for size in range(1, min(MAX_PATTERN, len(rest)) + 1):
            times = 1
            while rest[: size * times] == rest[:size] * times and size * times <= len(rest):
                found = min(found, size + best(rest[size * times :]))
                times += 1
        return found

    return best(kinds)


@given(kinds=st.text("abc", min_size=1, max_size=12))
@example("ababcabc")  # ab, then abc twice
@example("abababcabc")  # not all repeats of ab may be taken
def test_fewest_bodies(kinds: str) -> None:
    runs = cut(kinds, scan=True)
    assert "".join(layers(runs)) == kinds
    assert sum(len(run.pattern) for run in runs) == fewest_bodies(kinds)


@given(kinds=st.text("abcd", min_size=1, max_size=70))
def test_long_schedules_come_back_whole(kinds: str) -> None:
    assert "".join(layers(cut(kinds, scan=True))) == kinds


def test_without_scanning_every_layer_is_its_own() -> None:
    assert cut("aab", scan=False) == (Run(0, ("a",), 1), Run(1, ("a",), 1), Run(2, ("b",), 1))


@pytest.mark.parametrize(
    "kinds, cuts",
    [
        ("a" * 61, [("a", 61)]),
        ("ss" + "ch" * 20 + "c", [("s", 2), ("ch", 20), ("c", 1)]),  # sliding, then pairs
        ("hh" + "ch" * 29 + "c", [("h", 1), ("hc", 30)]),
        ("f", [("f", 1)]),
    ],
)
def test_known_schedules(kinds: str, cuts: list[tuple[str, int]]) -> None:
    found = [("".join(run.pattern), run.repeats) for run in cut(kinds, scan=True)]
    assert sum(len(pattern) for pattern, _ in found) == sum(len(pattern) for pattern, _ in cuts)
    assert len(found) == len(cuts)
