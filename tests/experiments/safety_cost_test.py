"""The cost of safety on a tiny model: every arm runs the steps it says, and all is written."""

import json
import pathlib

import pytest

import models
from experiments import safety_cost
from experiments.safety_config import FIRST_TOKEN, PARTS, RATE, STEP, SafetyConfig
from tests import variants

CLAIMS = {STEP: 3, RATE: 2, FIRST_TOKEN: 1}


def config(workdir: pathlib.Path, **fields) -> SafetyConfig:
    model = models.DecoderConfig(
        layer_types=("csa",), mlp_types=("dense",), window=8, vocab_size=64, chunk=16, block=16
    )
    sizes = dict(rows=2, capacity=64, spans=(0,), length=20, steps=2, burst=2, repeats=2)
    sizes |= dict(prefix=32, suffix=5, seconds=60.0, workdir=str(workdir), model=model)
    return SafetyConfig(**(sizes | fields))


@pytest.mark.parametrize("parts", variants.some([[*PARTS], [STEP], [FIRST_TOKEN]], [[FIRST_TOKEN]]))
def test_parts_are_measured_and_written(tmp_path: pathlib.Path, parts: list[str]) -> None:
    results = safety_cost.run(config(tmp_path, parts=tuple(parts)))
    assert set(results["parts"]) == set(parts)
    claims = [x for part in results["parts"].values() for x in part["claims"]]
    assert len(claims) == sum(CLAIMS[part] for part in parts)
    assert all(x["turns"] == 2 and x["ratio"] > 0 for x in claims)
    if FIRST_TOKEN in parts:
        facts = results["parts"][FIRST_TOKEN]["facts"]
        assert (facts["resumed"], facts["computed"]) == (32, 5) and facts["restored_bytes"] > 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["parts"]) == set(parts)
    report = (tmp_path / "report.md").read_text()
    assert ("2 rows x 4 pages" in report) == (STEP in parts)
    assert (tmp_path / "safety_cost.png").stat().st_size > 1_000


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(parts=("steps",)), "parts="),
        (dict(steps=3), "whole bursts"),
        (dict(prefix=60), "do not fit"),
        (dict(workdir=""), "workdir is empty"),
        (dict(model=models.DecoderConfig(window=-1)), "model: window=-1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**({"workdir": tmp_path} | fields)).check()
