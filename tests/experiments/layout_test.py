"""Seen before as a prefix, and seen before anywhere: against a search by hand."""

import numpy as np
import pytest

from experiments import layout


def by_hand(prompts: list[list[int]], block: int) -> layout.Layout:
    """Runs of tokens are compared as they are."""
    pieces: set[tuple[int, ...]] = set()
    prefixes: set[tuple[int, ...]] = set()
    tokens = prefix = anywhere = 0
    for prompt in prompts:
        stops = range(block, len(prompt) + 1, block)
        matched = 0
        for stop in stops:
            if tuple(prompt[:stop]) not in prefixes:
                break
            matched = stop
        place = covered = matched
        while place + block <= len(prompt):
            if tuple(prompt[place : place + block]) in pieces:
                covered, place = covered + block, place + block
            else:
                place += 1
        tokens, prefix, anywhere = tokens + len(prompt), prefix + matched, anywhere + covered
        for stop in stops:
            prefixes.add(tuple(prompt[:stop]))
            pieces.add(tuple(prompt[stop - block : stop]))
    return layout.Layout(tokens, prefix, anywhere)


def test_against_a_search_by_hand() -> None:
    rng = np.random.default_rng(0)
    for block in (1, 3, 8):
        prompts: list[list[int]] = []
        for _ in range(30):
            parts = [list(rng.integers(0, 4, int(rng.integers(0, 20))))]
            if prompts:
                old = prompts[int(rng.integers(len(prompts)))]
                start = int(rng.integers(len(old) + 1))
                parts.insert(int(rng.integers(2)), old[start * int(rng.integers(2)) :])
            prompts.append([int(x) for part in parts for x in part])
        assert layout.measure(prompts, block) == by_hand(prompts, block)


def test_a_date_in_front_forfeits_what_follows() -> None:
    shared = list(range(100, 420))
    first = layout.measure([[day, *shared] for day in range(10)], 32)
    last = layout.measure([[*shared, day] for day in range(10)], 32)
    assert first.prefix == 0 and last.prefix == last.anywhere == 9 * 320
    assert last.forfeited == 0 and first.forfeited > 0.8


def test_equal_runs_have_equal_hashes_wherever_they_stand() -> None:
    run = [5, 0, 7, 7]
    found = layout.windows(np.asarray([1, 2, *run, 3, *run]), 4)
    assert found[2] == found[7] and len(set(found.tolist())) == len(found) - 1
    assert len(layout.windows(np.asarray([1, 2]), 4)) == 0
    with pytest.raises(ValueError):
        layout.measure([], 0)
