"""Reports: runs of several kinds on one page, and what cannot be shown."""

import json
import pathlib

import pytest

from experiments import report, run_record, sweep, sweep_report
from tests.experiments import sweep_test

at_root = sweep_test.at_root


def run_of(place: pathlib.Path, runner: str, results: dict) -> str:
    """A finished run's directory."""
    run_record.write(place, {}, seed=0, runner=runner)
    run_record.write_results(place, results)
    return str(place)


def replayed(name: str, hit: float) -> dict:
    cell = {
        "part": "ideal",
        "candidate_blocks": round(1_000 * hit),
        "prompt_blocks": 1_000,
        "candidate_tokens": 1,
        "prompt_tokens": 2,
        "saved_flops": 1,
        "prompt_flops": 2,
    }
    sizes = {"spec": "s", "block_bytes": 1, "block_tokens": 512, "checkpoint_bytes": 1,
             "replay_tokens": 1}  # fmt: skip
    return {"trace": {"name": name, "digest": "", "requests": 4_000}, "sizes": sizes,
            "cells": {"ideal": cell}}  # fmt: skip


def test_runs_on_one_page(tmp_path: pathlib.Path) -> None:
    sweep.run(sweep_test.RUNNER, sweep_test.FILE, ["inner.m=1,4", "scale=1,2"],
              out=str(tmp_path / "sweep"), seeds=2, jobs=2)  # fmt: skip
    runs = [
        run_of(tmp_path / "a", "replay", replayed("mooncake_conversation", 0.37)),
        run_of(tmp_path / "b", "replay", replayed("mooncake_synthetic", 0.30)),
        run_of(tmp_path / "c", "replay", replayed("mine", 0.30)),
        str(tmp_path / "sweep"),
    ]
    out = tmp_path / "out"
    claims = report.join(runs, str(out), "All", ["loss"])
    assert [(x.found, x.verdict) for x in claims] == [
        (0.37, "reproduced"),
        (0.3, "direction only"),
    ]
    text = (out / "report.md").read_text()
    assert text.startswith("# All\n\n1 reproduced, 1 direction only.\n")
    assert text.count("## Claims") == 1 and text.count("# Trace replay: ") == 3
    for picture in ("1-replay.png", "3-replay.png", "4-sweep-loss.png"):
        assert f"({picture})" in text and (out / picture).stat().st_size
    assert "loss: inner.m = 4, scale = 2" in text and "deep.of.0" not in text
    stored = json.loads((out / "claims.json").read_text())["claims"]
    assert [x["verdict"] for x in stored] == [x.verdict for x in claims]


def test_a_sweep_is_summed_up_over_seeds(tmp_path: pathlib.Path) -> None:
    sweep.run(sweep_test.RUNNER, sweep_test.FILE, ["inner.m=1,4"], out=str(tmp_path), seeds=2,
              jobs=2)  # fmt: skip
    shown = sweep_report.exhibit(tmp_path)
    rows = {row[0]: row[1:] for row in shown.tables[0].rows}
    # loss = (m + seed) / 7.
    assert rows["loss: inner.m = 4"] == ["0.6429", "0.101", "0.5714", "0.7143", "2"]
    deep = sweep_report.exhibit(tmp_path, ["deep.of.1", "loss", "of another"])
    asked = ["deep.of.1: inner.m = 1", "deep.of.1: inner.m = 4", "loss: inner.m = 1",
             "loss: inner.m = 4"]  # fmt: skip
    assert [row[0] for row in deep.tables[0].rows] == asked
    assert list(deep.figures) == ["sweep-deep-of-1", "sweep-loss"]
    none = sweep_report.exhibit(tmp_path, ["of another"])
    assert not none.tables and not none.figures and "none of the metrics" in none.intro
    assert sweep_report.metrics_of(tmp_path) == ["loss", "deep.of.0", "deep.of.1"]
    out = str(tmp_path / "out")
    message = r"no metric 'accuracy'; There are: loss; deep\.of\.0; deep\.of\.1 "
    with pytest.raises(ValueError, match=message):
        report.join([str(tmp_path)], out, metrics=["loss", "accuracy"])
    with pytest.raises(ValueError, match="did you mean 'loss'"):
        report.join([str(tmp_path)], out, metrics=["los"])


def test_what_cannot_be_shown(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="one run or more"):
        report.join([], str(tmp_path))
    with pytest.raises(ValueError, match="no finished run"):
        report.join([str(tmp_path)], str(tmp_path / "out"))
    with pytest.raises(ValueError, match="no run is one"):
        report.join([str(tmp_path)], str(tmp_path / "out"), metrics=["loss"])
    run = run_of(tmp_path / "x", "nothing", {})
    with pytest.raises(ValueError, match="nothing"):
        report.join([run], str(tmp_path / "out"))
