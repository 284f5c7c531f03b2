"""Nested dataclass configurations: files, overrides by path, JSON."""

import dataclasses
import difflib
import importlib.util
import json
import pathlib
import typing
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class UnknownFieldError(ValueError):
    """A path that leads to no field; the message names near matches."""


def load(path: str) -> object:
    """Calls `get_config()` of a Python file; "file.py:word" calls `get_config("word")`."""
    path, *argument = path.split(":", 1)
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path=} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*argument)


def get(config: object, path: str) -> object:
    """The value at a dotted path.

    Raises:
      UnknownFieldError: The path leads to no field.
    """
    holder = config
    for depth, name in enumerate(path.split(".")):
        is_config = dataclasses.is_dataclass(holder)
        names = [field.name for field in dataclasses.fields(holder)] if is_config else []
        if name not in names:
            prefix = "".join(part + "." for part in path.split(".")[:depth])
            raise UnknownFieldError(f"unknown field {prefix}{name}; {_suggest(name, names)}")
        holder = getattr(holder, name)
    return holder


def override(config: T, changes: Mapping[str, object]) -> T:
    """Sets fields by dotted path, in place, as `--config.a.b=` does; returns the same object."""
    for path, value in changes.items():
        get(config, path)
        parents, _, name = path.rpartition(".")
        setattr(get(config, parents) if parents else config, name, value)
    return config


def to_dict(config: object) -> dict:
    """The configuration as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type[T], values: Mapping) -> T:
    """Builds a dataclass from JSON values; missing fields keep their defaults."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    arguments = {}
    for name, value in values.items():
        if name not in names:
            raise UnknownFieldError(
                f"unknown field {kind.__name__}.{name}; {_suggest(name, names)}"
            )
        if dataclasses.is_dataclass(hints[name]):
            value = from_dict(hints[name], value)
        elif isinstance(value, list):
            value = tuple(value)  # JSON has no tuples, configurations have no lists
        arguments[name] = value
    return kind(**arguments)


def differences(left: Mapping, right: Mapping, prefix: str = "") -> list[str]:
    """Dotted paths at which two `to_dict` results differ."""
    paths = []
    for name in sorted({*left, *right}):
        a, b = left.get(name), right.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            paths += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            paths.append(prefix + name)
    return paths


def _suggest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known fields: {', '.join(names)}" if names else "it has no fields"
