"""Fields of configurations: types, least values, and what is empty."""

import dataclasses
import os
import pathlib

import pytest

from experiments import config_checks


@dataclasses.dataclass(kw_only=True)
class Inner:
    m: int = 4


@dataclasses.dataclass(kw_only=True)
class Config:
    count: int = 3
    share: float = 0.5
    on: bool = False
    name: str = "x"
    counts: tuple[int, ...] = (1, 2)
    pair: tuple[int, float] = (1, 2.0)
    names: tuple[str, ...] = ()
    inner: Inner = dataclasses.field(default_factory=Inner)
    inners: tuple[Inner, ...] = (Inner(),)
    more: dict[str, int] = dataclasses.field(default_factory=dict)
    workdir: str = "runs/x"


def test_values_that_pass() -> None:
    config_checks.check_types(Config())
    config_checks.check_types(Config(share=1, counts=[5], pair=(3, 4), names=("a", "b")))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(count=2.0), r"^count=2\.0: a whole number is needed"),
        (dict(count=True), "count=True: a whole number"),
        (dict(share="much"), "share='much': a finite number"),
        (dict(share=float("nan")), "share=nan"),
        (dict(on=1), "on=1: True or False"),
        (dict(name=3), "name=3: a string"),
        (dict(counts=5), "counts=5: several values .* counts=a,b"),
        (dict(names="ab"), "names='ab': several values"),
        (dict(counts=(1, "2")), r"counts=\(1, '2'\): '2' is not a whole number"),
        (dict(pair=(1, 2, 3)), r"pair=\(1, 2, 3\): 2 values are needed, not 3"),
        (dict(inner=Inner(m="4")), "inner.m='4'"),
        (dict(inners=(Inner(), Inner(m=0.5))), r"inners: m=0\.5"),
    ],
)
def test_values_of_another_type_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_checks.check_types(Config(**fields))


def test_bounds() -> None:
    config = Config(counts=(1, 0), share=0.0, workdir="")
    config_checks.at_least(config, 0, "counts", "share")
    with pytest.raises(ValueError, match=r"counts=\(1, 0\) must be at least 1"):
        config_checks.at_least(config, 1, "count", "counts")
    with pytest.raises(ValueError, match=r"share=0\.0 must be above 0"):
        config_checks.above(config, 0, "count", "share")
    with pytest.raises(ValueError, match=r"names=\(\): give at least one"):
        config_checks.not_empty(config, "counts", "names")
    with pytest.raises(ValueError, match="workdir is empty"):
        config_checks.check_workdir(config)


def test_the_work_directory_can_be_made(tmp_path: pathlib.Path) -> None:
    for place in (tmp_path, tmp_path / "a" / "b"):
        config_checks.check_workdir(Config(workdir=str(place)))
    config_checks.check_workdir(Config(workdir="runs/../none/x"))
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path / "none")
    for place in (file, file / "a" / "b", link):
        with pytest.raises(ValueError, match=r"workdir=.* is not a directory"):
            config_checks.check_workdir(Config(workdir=str(place)))
    assert not (tmp_path / "a").exists()


def test_a_work_directory_that_may_not_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="may not be written"):
        config_checks.check_workdir(Config(workdir=str(tmp_path / "a")))


def test_fields_of_fields() -> None:
    config = Config(inner=Inner(m=0))
    with pytest.raises(ValueError, match=r"inner\.m=0 must be at least 1"):
        config_checks.at_least(config, 1, "inner.m")
    with pytest.raises(ValueError, match=r"inner\.m=0: give at least one"):
        config_checks.not_empty(config, "inner.m")
    with pytest.raises(ValueError, match="name='none' is no directory"):
        config_checks.check_directory(Config(name="none"), "name")
