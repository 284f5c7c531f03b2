"""Checks of configurations that need nothing but their fields, made before anything is computed."""

import dataclasses
import math
import operator
import os
import pathlib
import typing
from collections.abc import Sequence

import models

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
    """Raises ValueError naming a field below `least`; of a tuple, one that has such a value.

    names: fields, or dotted paths to fields of fields; here and below.
    """
    for name in names:
        if any(x < least for x in _values(config, name)):
            raise ValueError(f"{name}={_value(config, name)} must be at least {least}")


def above(config: object, bound: float, *names: str) -> None:
    """Raises ValueError naming a field not above `bound`; of a tuple, one that has such a value."""
    for name in names:
        if any(x <= bound for x in _values(config, name)):
            raise ValueError(f"{name}={_value(config, name)} must be above {bound}")


def _values(config: object, name: str) -> Sequence:
    value = _value(config, name)
    return value if isinstance(value, Sequence) else (value,)


def _value(config: object, path: str) -> object:
    return operator.attrgetter(path)(config)


def not_empty(config: object, *names: str) -> None:
    """Raises ValueError naming a field that has nothing in it."""
    for name in names:
        if not _value(config, name):
            raise ValueError(f"{name}={_value(config, name)!r}: give at least one")


def check_workdir(config: object) -> None:
    """Raises ValueError where there is no place for the results, or none can be made."""
    if not config.workdir:
        raise ValueError("workdir is empty: a run writes its record and results there")
    place = pathlib.Path(config.workdir)
    # A link that leads nowhere is in the way too.
    nearest = next(x for x in (place, *place.parents) if os.path.lexists(x))
    if not nearest.is_dir():
        raise ValueError(f"workdir={config.workdir!r}: {nearest} is not a directory; give another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"workdir={config.workdir!r}: {nearest} may not be written to")


def check_directory(config: object, name: str = "directory") -> None:
    """Raises ValueError where a directory is named that is not there; "" names none."""
    value = getattr(config, name)
    if value and not pathlib.Path(value).is_dir():
        raise ValueError(f"{name}={value!r} is no directory; make it, or leave it empty for that "
                         "of temporary files")  # fmt: skip


def built(config: models.DecoderConfig, where: str) -> models.Decoder:
    """The model of a field named `where`; a ValueError says of which field it is."""
    try:
        return models.build(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_parts(config: object, *names: str) -> None:
    """Calls `check` of these fields; a ValueError says of which field it is."""
    for name in names:
        try:
            getattr(config, name).check()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
