"""Sweeps: the cells of a grid, resuming after kills, retries, the tidy file."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from experiments import sweep, sweep_jobs, sweep_plan, sweep_results

RUNNER = "tests.experiments.sweep_runner"
FILE = str(pathlib.Path(__file__).with_name("sweep_runner.py"))
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_grids() -> None:
    assert sweep_plan.axis("a.b=1,2.5,(x,y), z") == ("a.b", [1, 2.5, ("x", "y"), "z"])
    assert sweep_plan.axis("a=true,()") == ("a", [True, ()])
    two = ["a=1,2", "b=x,y"]
    assert sweep_plan.combine(two, "product") == [
        {"a": a, "b": b} for a in (1, 2) for b in ("x", "y")
    ]
    assert sweep_plan.combine(two, "zip") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert sweep_plan.combine(["a=1 b=x", "b=y"], "list") == [{"a": 1, "b": "x"}, {"b": "y"}]
    assert sweep_plan.combine([], "product") == [{}]


@pytest.mark.parametrize(
    "grids, mode",
    [(["a"], "product"), (["a="], "product"), (["a=1,,2"], "zip"), (["a=1", "a=2"], "product"),
     (["a=1,2", "b=1"], "zip"), (["a=1,2"], "list"), (["a=1"], "random")],
)  # fmt: skip
def test_grids_that_make_no_sense(grids: list[str], mode: str) -> None:
    with pytest.raises(ValueError):
        sweep_plan.combine(grids, mode)


def cells(*grids: str, seeds: int = 1, fixed: tuple[str, ...] = ()) -> list[sweep_plan.Cell]:
    return sweep_plan.cells(RUNNER, FILE, fixed, grids, "product", seeds, "seed")


def test_a_cell_is_named_by_its_whole_configuration() -> None:
    first = {x.digest for x in cells("inner.m=1,2", seeds=2)}
    assert len(first) == 4
    assert first < {x.digest for x in cells("inner.m=2,1,3", seeds=3)}
    # The default spelt out is the same cell; another value of a fixed field is not.
    assert first == {x.digest for x in cells("inner.m=1,2", seeds=2, fixed=("scale=1",))}
    assert first.isdisjoint(x.digest for x in cells("inner.m=1,2", seeds=2, fixed=("scale=2",)))


@pytest.mark.parametrize(
    "grid, seeds", [("inner.n=1", 1), ("inner.m=1,1", 1), ("seed=1", 1), ("inner.m=1", 0)]
)
def test_cells_that_make_no_sense(grid: str, seeds: int) -> None:
    with pytest.raises(ValueError):
        cells(grid, seeds=seeds)


@pytest.mark.parametrize(
    "runner, message",
    [
        ("experiments.trian", "did you mean experiments.train"),
        ("tabels", "did you mean experiments.tables"),
        ("no.such.place", "a name such as experiments.train"),
        ("experiments", "no such module to run"),  # a package that cannot be run
        ("", "no such module to run"),
    ],
)
def test_a_runner_that_is_none_is_refused_before_anything_runs(
    tmp_path: pathlib.Path, runner: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep.run(runner, FILE, ["inner.m=1"], out=str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_a_file_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.py: no such file"):
        sweep.run(RUNNER, str(tmp_path / "nowhere.py"), [], out=str(tmp_path / "s"))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(drop="("), "drop='.' is no regular expression"),
        (dict(jobs=0), "jobs=0"),
        (dict(retries=-1), "retries=-1"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    tmp_path: pathlib.Path, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep.run(RUNNER, FILE, ["inner.m=1"], out=str(tmp_path / "s"), **options)
    assert not (tmp_path / "s").exists()


def test_cores_are_shared_out() -> None:
    have = os.sched_getaffinity(0)
    whole = sweep_jobs.core_sets(1)
    assert whole == [have]
    many = sweep_jobs.core_sets(len(have) + 1)
    assert len(many) == len(have) + 1 and all(len(x) == 1 for x in many)
    assert set().union(*many) == have
    with pytest.raises(ValueError):
        sweep_jobs.core_sets(0)


def test_results_are_flattened() -> None:
    found = dict(sweep_results.flat({"a": {"b": [1, {"c": "x"}]}, "n": None, "t": True}))
    assert found == {"a.b.0": 1, "a.b.1.c": "x", "t": True}


def test_a_sweep_runs_every_cell_once_and_retries(tmp_path: pathlib.Path) -> None:
    out, log = str(tmp_path / "s"), tmp_path / "log"
    fixed = [f"log={log}", "fail=1"]
    failed = sweep.run(RUNNER, FILE, ["inner.m=2,3"], out=out, fixed=fixed, jobs=2, retries=1)
    assert not failed
    assert sorted(log.read_text().split("\n")) == ["", "2 0", "2 0", "3 0", "3 0"]
    lines = sweep_results.read(tmp_path / "s" / "results.csv")
    assert [(x["inner.m"], x["metric"], x["value"]) for x in lines] == [
        (m, name, value)
        for m in ("2", "3")
        for name, value in (("loss", str(int(m) / 7)), ("deep.of.0", "1"), ("deep.of.1", "2"))
    ]
    before = (tmp_path / "s" / "results.csv").read_bytes()
    sweep.run(RUNNER, FILE, ["inner.m=2,3"], out=out, fixed=fixed)
    assert len(log.read_text().splitlines()) == 4  # nothing was run again
    assert (tmp_path / "s" / "results.csv").read_bytes() == before


def test_a_cell_that_keeps_failing_is_reported(tmp_path: pathlib.Path) -> None:
    grids = ["fail=-1,0"]
    failed = sweep.run(RUNNER, FILE, grids, out=str(tmp_path), jobs=2, retries=0)
    (why,) = failed.values()
    assert "asked to fail" in why and "-1" in why
    assert {x["fail"] for x in sweep_results.read(tmp_path / "results.csv")} == {"0"}


def test_a_killed_sweep_resumes_to_the_same_bytes(tmp_path: pathlib.Path) -> None:
    grids = ["inner.m=1,2", "inner.types=(a,b),c"]

    def command(out: str) -> list[str]:
        flags = [f"--runner={RUNNER}", f"--config={FILE}", "--seeds=2", "--jobs=2", "--out", out]
        flags += ["--set=wait=0.5"]  # so that it is never over before it is killed
        return [sys.executable, "-m", "experiments.sweep", *flags,
                *(f"--grid={x}" for x in grids)]  # fmt: skip

    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    sweep.run(RUNNER, FILE, grids, out=whole, seeds=2, jobs=2, fixed=["wait=0.5"])
    finished, chance = 0, random.Random(0)
    for _ in range(2):
        process = subprocess.Popen(command(killed), stderr=subprocess.DEVNULL)
        # Let it get on by a cell, and then by chance.
        wanted = finished + 1
        while process.poll() is None and finished < wanted:
            finished = len(list(pathlib.Path(killed).glob("cells/*.json")))
            time.sleep(0.01)
        time.sleep(chance.random() / 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = len(list(pathlib.Path(killed).glob("cells/*.json")))
    assert 0 < finished < 8
    subprocess.run(command(killed), check=True, capture_output=True)
    assert pathlib.Path(killed, "results.csv").read_bytes() == (
        pathlib.Path(whole, "results.csv").read_bytes()
    )
