"""Verdicts, and what an exhibit writes."""

import matplotlib.figure
import pytest

from experiments.bench.report import Table
from experiments.exhibit import DIRECTION, NOT, REPRODUCED, UNTESTED, Claim, Exhibit


def claim(**fields) -> Claim:
    return Claim(**{"name": "x", "source": "s", "margin": 0.1, "published": 10, **fields})


@pytest.mark.parametrize(
    "fields, verdict, off",
    [
        ({"found": 10.9}, REPRODUCED, 0.09),
        ({"found": 8.9}, NOT, -0.11),
        ({"found": 8.9, "neutral": 1}, DIRECTION, -0.11),
        ({"found": 0.9, "neutral": 1}, NOT, -0.91),
        ({"found": 30, "relation": "at least"}, REPRODUCED, 2),
        ({"found": 8, "relation": "at least", "neutral": 1}, DIRECTION, -0.2),
        ({"found": 9.95, "absolute": True}, REPRODUCED, -0.05),
        ({"found": 9.8, "absolute": True}, NOT, -0.2),
        ({"found": -3, "published": -4, "neutral": 0}, DIRECTION, 0.25),
        ({"found": 10, "untested": "nothing was learnt"}, UNTESTED, 0),
    ],
)
def test_verdicts(fields: dict, verdict: str, off: float) -> None:
    made = claim(**fields)
    assert made.verdict == verdict and made.off == pytest.approx(off)
    assert Claim.read(made.values()) == made
    assert verdict in made.row() and made.row()[-1].endswith(made.untested)


@pytest.mark.parametrize(
    "fields", [{"relation": "below"}, {"margin": -1}, {"published": 0, "absolute": False}]
)
def test_claims_that_make_no_sense(fields: dict) -> None:
    with pytest.raises(ValueError):
        claim(found=1, **fields)


def test_an_exhibit_writes_a_page_and_its_figures(tmp_path) -> None:
    figure = matplotlib.figure.Figure()
    shown = Exhibit("Title", "Intro.", [claim(found=10)], [Table("T", ("a",), [["1"]]),
                    Table("empty", ("a",), [])], {"plot": figure})  # fmt: skip
    shown.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    for part in ("# Title", "Intro.", "![plot](plot.png)", "## Claims", "## T", REPRODUCED):
        assert part in text
    assert "## empty" not in text
    assert (tmp_path / "plot.png").stat().st_size
