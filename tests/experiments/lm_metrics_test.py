"""Measures of byte models against values counted by hand."""

import lzma
import math

import numpy as np
import pytest

from experiments import lm_metrics


def test_buckets() -> None:
    assert lm_metrics.buckets((2, 5), 8) == [
        ("0-1", slice(0, 2)),
        ("2-4", slice(2, 5)),
        ("5-7", slice(5, 8)),
    ]


def test_bits_by_bucket() -> None:
    nats = math.log(2) * np.array([[1.0, 3.0, 4.0, 4.0], [3.0, 1.0, 0.0, 8.0]])
    found = lm_metrics.bits_by_bucket(nats, (2,))
    assert found == pytest.approx({"all": 3.0, "0-1": 2.0, "2-3": 4.0})
    weights = np.array([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 2.0]])
    found = lm_metrics.bits_by_bucket(nats, (2,), weights)
    assert found == pytest.approx({"all": 29 / 7, "0-1": 5 / 3, "2-3": 6.0})


def test_what_xz_needs() -> None:
    text = b"def f(x):\n    return x\n" * 40
    whole = lm_metrics.xz_stream(text)
    assert whole == 8 * len(lzma.compress(text, preset=6)) / len(text)
    # Windows know nothing of each other, and have no headers.
    windows = [text[:64], text[64:128]]
    alone = lm_metrics.xz_windows(windows)
    assert whole < alone < 8
    assert lm_metrics.xz_windows([b"x" * 4_096]) < lm_metrics.xz_stream(b"x" * 4_096)


def test_the_line_through_two_points() -> None:
    assert lm_metrics.line_at(3.0, (1.0, 10.0), (5.0, 20.0)) == 15.0
