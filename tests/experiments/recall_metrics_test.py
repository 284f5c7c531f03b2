"""Measures of recall against values counted by hand."""

import numpy as np
import pytest

from experiments import recall_metrics, tasks


@pytest.mark.parametrize(
    "changes, ratio, overlap, expected",
    [
        ({}, 2, False, 1.0),
        ({}, 4, False, 2.0),
        ({}, 16, False, 8.0),
        ({}, 2, True, 15 / 8),  # an entry holds its own fact and the one before; the first has none
        ({"stride": 4}, 4, False, 1.0),
        ({"stride": 4}, 8, False, 2.0),
        ({"pairs": 3}, 4, False, 5 / 3),  # two facts share an entry, the third is alone
        # Values at 2, 4, 6, …: groups of four tokens hold 2 | 4, 6 | 8, 10 | … | 16.
        ({"offset": 1}, 4, False, 14 / 8),
    ],
)
def test_facts_per_entry(changes: dict, ratio: int, overlap: bool, expected: float) -> None:
    task = tasks.Recall(**changes)
    assert recall_metrics.facts_per_entry(task, ratio, overlap) == pytest.approx(expected)


def test_fact_places() -> None:
    # Facts 3 → 9 at 1 and 5 → 8 at 3, a gap of one; then queries.
    tokens = np.array([[7, 3, 9, 5, 8, 9, 5, 3, 5]])
    assert recall_metrics.fact_places(tokens, 6).tolist() == [[-1] * 6 + [3, 1, 3]]


def test_places_are_those_of_the_task_s_answers() -> None:
    task = tasks.Recall(pairs=4, slots=9, offset=3, stride=3, length=60, gap=4)
    batch = task.batch(0)
    places = recall_metrics.fact_places(batch["tokens"], task.document_length)
    asked = batch["weights"] > 0
    row = np.nonzero(asked)[0]
    np.testing.assert_array_equal(batch["tokens"][row, places[asked] + 1], batch["targets"][asked])
    assert (places[~asked] == -1).all()


def test_top_prefers_lower_indices_and_sees_the_visible_only() -> None:
    scores = np.array([[1.0, 3.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
    visible = np.array([[True, True, True, False], [True, False, False, False]])
    assert recall_metrics.top(scores, visible, 2).tolist() == [
        [False, True, True, False],
        [True, False, False, False],
    ]
    assert recall_metrics.top(scores, visible, 1).tolist()[0] == [False, True, False, False]


def test_recall_at_and_mass() -> None:
    picked = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], bool)
    wanted = np.array([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    assert recall_metrics.recall_at(picked, wanted) == pytest.approx((0.5 + 1) / 2)
    shares = np.array([[0.2, 0.3, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0] * 4])
    assert recall_metrics.mass(picked, shares) == pytest.approx((0.5 + 0.5) / 2)


def test_found() -> None:
    picked = np.array([[0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]], bool)
    places = np.array([2, 1, 2, 4])  # values at 3, 2, 3, 5: groups of two tokens 1, 1, 1, 2
    assert recall_metrics.found(picked, places, 2, overlap=False) == 0.75
    # With overlap entry 2 holds group 1 as well; the last group has no entry behind it.
    assert recall_metrics.found(picked, places, 2, overlap=True) == 1.0
    assert recall_metrics.found(picked[:1], np.array([4]), 2, overlap=True) == 0.0
