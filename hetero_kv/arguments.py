"""What arguments may be: errors that name the value and what is taken instead."""

import numpy as np


def is_integer(value: object) -> bool:
    """Whether it is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number of Python or NumPy, infinity and NaN too; a bool is none."""
    return is_integer(value) or isinstance(value, float | np.floating)


def check_integer(name: str, value: object, least: int) -> None:
    """Raises ValueError but for integers >= least."""
    if not is_integer(value):
        raise ValueError(f"{name} is an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}")


def check_number(name: str, value: object, least: float) -> None:
    """Raises ValueError but for real numbers >= least; infinity is one, NaN and bools are none."""
    if not is_number(value):
        raise ValueError(f"{name} is a number, got {value!r}")
    if not value >= least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}")


def check_type(name: str, value: object, kind: type, remedy: str = "") -> None:
    """Raises ValueError for what is not of the type; remedy: what to give."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        more = f": {remedy}" if remedy else ""
        raise ValueError(f"{name} is {article} {kind.__name__}, got {value!r}{more}")


def check_stands_for(name: str, value: object, kind: type, remedy: str) -> None:
    """As `check_type`, but takes what has all public methods of the type: one may be watched."""
    names = (x for x in dir(kind) if not x.startswith("_"))
    if not isinstance(value, kind) and not all(hasattr(value, x) for x in names):
        check_type(name, value, kind, remedy)


def check_callable(name: str, value: object) -> None:
    """Raises ValueError for what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} is a function, got {value!r}")
