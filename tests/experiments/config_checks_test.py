"""Fields of configurations: types, least values, and what is empty."""

import dataclasses

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
