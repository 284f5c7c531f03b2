"""Rows of trained cells: models are shared, cells are done once, kills change no byte."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import run_record, trained_models, trained_rows, training
from experiments.trained_rows import Row
from tests.experiments import train_test

ROOT = pathlib.Path(__file__).resolve().parents[2]


def stand_in(config) -> training.TrainResult:
    """Training that takes no time; it counts itself, and resumes as training does."""
    place = pathlib.Path(config.workdir)
    place.mkdir(parents=True, exist_ok=True)
    if run_record.read_json(place / "results.json") is None:
        with (place.parent / "trained.txt").open("a") as log:
            log.write(f"{place.name}\n")
        time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
    results = {
        "steps": 10 * (config.seed + 1), "stopped": "steps", "eval_accuracy": 0.1 + config.seed / 3,
        "steps_to_95": None, "parameters": config.model.window, "chance": 0.125,
    }  # fmt: skip
    run_record.write_results(place, results)
    return training.TrainResult({}, results, [])


def rows(settings=()) -> list[Row]:
    base = train_test.tiny("")
    wide = dataclasses.replace(base, model=base.model.replace(window=8))

    def measure(config, result):
        return {**trained_rows.learnt(result), "by": {"window": config.model.window}}

    return [
        Row("X1", {"narrow": base, "wide": wide}, measure),
        Row("X2", {"wide": wide}, measure, dict(settings)),
    ]


def run(place: pathlib.Path, seeds: int = 2, **changes) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "run", stand_in)
        patch.setattr(trained_models, "read", stand_in)
        return trained_rows.run(rows(**changes), place, seeds, jobs=1)


def trained(place: pathlib.Path) -> list[str]:
    return (place / "models" / "trained.txt").read_text().split()


def test_models_are_shared_and_cells_are_done_once(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path)
    assert len(trained(tmp_path)) == 4  # two arms, two seeds: the arm of X2 is one of X1's
    assert found["X2"]["wide"]["1"]["steps"] == 20
    assert found["X1"]["narrow"]["0"]["by"] == {"window": 4}
    run(tmp_path, seeds=3)
    assert len(trained(tmp_path)) == 6
    run(tmp_path, seeds=3, settings=[("k", 2)])  # is measured anew, of the same models
    assert len(trained(tmp_path)) == 6
    assert len(list((tmp_path / "cells").iterdir())) == 6 + 3 + 3


def test_the_tidy_file(tmp_path: pathlib.Path) -> None:
    run(tmp_path)
    lines = (tmp_path / "X2.csv").read_text().splitlines()
    assert lines[0] == "cell,arm,seed,metric,value"
    digest = lines[1].split(",")[0]
    assert lines[1:7] == [
        f"{digest},wide,0,{text}"
        for text in ("steps,10", "stopped,steps", "eval_accuracy,0.1", "parameters,8",
                     "chance,0.125", "by.window,8")
    ]  # fmt: skip
    assert len(lines) == 1 + 2 * 6


def test_all_arms_and_measures_are_checked() -> None:
    good = train_test.tiny("unused")
    bad = dataclasses.replace(good, model=good.model.replace(window=-1))
    row = trained_rows.Row("X", {"good": good, "bad": bad}, lambda *_: {})
    with pytest.raises(ValueError, match=r"X, arm bad: .*window"):
        trained_rows.check([row])

    def refuse() -> None:
        raise ValueError("no such probe")

    row = trained_rows.Row("Y", {"good": good}, lambda *_: {}, check=refuse)
    with pytest.raises(ValueError, match="Y: no such probe"):
        trained_rows.check([row])


def test_digests_name_what_decides_a_model() -> None:
    base = train_test.tiny("a")
    assert trained_models.digest(base) == trained_models.digest(train_test.tiny("b"))
    assert trained_models.digest(base) != trained_models.digest(train_test.tiny("a", seed=1))


CHILD = """
import pathlib, sys
from experiments import training, trained_rows
from tests.experiments import trained_rows_test as t
t.run(pathlib.Path(sys.argv[1]))
"""


def test_a_killed_run_leaves_the_files_of_one_that_was_not(tmp_path: pathlib.Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    environment = {**os.environ, "STAND_IN_SECONDS": "0.2"}
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(killed)], cwd=ROOT,
                               env=environment)  # fmt: skip
    log = killed / "models" / "trained.txt"
    while process.poll() is None and not (log.is_file() and len(trained(killed)) >= 2):
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "X1.csv").exists()
    assert run(killed) == run(whole)
    for name in ("X1.csv", "X2.csv"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    cells = [sorted(x.name for x in (place / "cells").iterdir()) for place in (killed, whole)]
    assert cells[0] == cells[1]


def test_a_training_that_fails_apart_says_why(tmp_path: pathlib.Path) -> None:
    config = train_test.tiny("")
    config.steps = 0
    with pytest.raises(RuntimeError, match="steps=0 must be at least 1"):
        trained_models.Models(tmp_path).train([config], jobs=2)
