"""Checks of configurations that need nothing but their fields, made before anything is computed."""

import dataclasses
import math
import typing
from collections.abc import Sequence

_PLAIN = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string"}


def check_types(config: object, where: str = "") -> None:
    """Raises ValueError naming the first field whose value is not of the field's type.

    Numbers, strings, tuples of them (a list passes for one) and nested dataclasses are looked at; a
    whole number is a number, True is neither.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        path, value = where + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_types(value, f"{path}.")
        else:
            _check(path, value, hints[field.name])


def _check(path: str, value: object, kind: object) -> None:
    if kind in _PLAIN and not _is(value, kind):
        raise ValueError(f"{path}={value!r}: {_PLAIN[kind]} is needed")
    if typing.get_origin(kind) is not tuple:
        return
    kinds = typing.get_args(kind)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{path}={value!r}: several values are needed, as in {path}=a,b")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{path}={value!r}: {len(kinds)} values are needed, not {len(value)}")
    for item, of in zip(value, kinds, strict=True):
        if dataclasses.is_dataclass(item):
            check_types(item, f"{path}: ")
        elif of in _PLAIN and not _is(item, of):
            raise ValueError(f"{path}={value!r}: {item!r} is not {_PLAIN[of]}")


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def at_least(config: object, least: float, *names: str) -> None:
    """Raises ValueError naming a field below `least`; of a tuple, one that has such a value."""
    for name in names:
        if any(x < least for x in _values(config, name)):
            raise ValueError(f"{name}={getattr(config, name)} must be at least {least}")


def above(config: object, bound: float, *names: str) -> None:
    """Raises ValueError naming a field not above `bound`; of a tuple, one that has such a value."""
    for name in names:
        if any(x <= bound for x in _values(config, name)):
            raise ValueError(f"{name}={getattr(config, name)} must be above {bound}")


def _values(config: object, name: str) -> Sequence:
    value = getattr(config, name)
    return value if isinstance(value, Sequence) else (value,)


def not_empty(config: object, *names: str) -> None:
    """Raises ValueError naming a field that has nothing in it."""
    for name in names:
        if not getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r}: give at least one")


def check_workdir(config: object) -> None:
    """Raises ValueError where there is no place for the results."""
    if not config.workdir:
        raise ValueError("workdir is empty: a run writes its record and results there")
