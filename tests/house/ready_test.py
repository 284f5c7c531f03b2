"""A fresh clone is ready to use: commands, requirement ranges, extras and tested versions agree."""

import os
import re
import tomllib

import pytest
from packaging import requirements, utils

from tests.house import import_graph

ROOT = import_graph.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
JAX = {"3.11": "0.10", "3.12": "0.11", "3.13": "0.12", "3.14": "0.12"}


def read(text: str) -> list[requirements.Requirement]:
    """Requirements of a requirements file."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [requirements.Requirement(line) for line in lines if line]


BASE = read((ROOT / "requirements.txt").read_text())
PINS = read((ROOT / "constraints.txt").read_text())


def pins(python: str) -> dict[str, str]:
    """Version of every constrained distribution on a Python version."""
    environment = {"python_version": python, "python_full_version": python + ".0"}
    found: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(environment):
            name = utils.canonicalize_name(pin.name)
            assert name not in found, f"{name} is pinned twice on Python {python}"
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            found[name] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_tested_versions_lie_in_the_ranges(python: str) -> None:
    versions = pins(python)
    for wanted in [
        *BASE,
        *(requirements.Requirement(r) for extra in EXTRAS.values() for r in extra),
    ]:
        version = versions.get(utils.canonicalize_name(wanted.name))
        assert version, f"{wanted.name} is not in constraints.txt for Python {python}"
        assert wanted.specifier.contains(version), f"{wanted} does not admit {version}"
    assert versions["jax"].startswith(JAX[python] + ".")


def test_everything_imported_is_required() -> None:
    base = {utils.canonicalize_name(wanted.name) for wanted in BASE}
    extras = {
        utils.canonicalize_name(requirements.Requirement(text).name)
        for texts in EXTRAS.values()
        for text in texts
    }
    for source in import_graph.read().values():
        allowed = base if source.path.startswith("hetero_kv/") else base | extras
        used = {utils.canonicalize_name(name) for name in source.external}
        assert used <= allowed, f"{source.path}: {sorted(used - allowed)}"


def test_commands_named_anywhere_exist() -> None:
    commands = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"make ([a-z][a-z-]*)\b(?= *[`#\n(|])", readme))
    assert {"demo", "test"} <= named
    assert named <= commands, named - commands
    steps = re.findall(r"^step ([a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert steps == ["test", "parity", "test-latest"] and set(steps) <= commands


def test_scripts_can_be_run() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
