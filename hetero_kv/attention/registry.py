"""Mechanisms by name.

A mechanism is a module with a function `build(fields) -> Mechanism`. Those of this package are
called by the module's name, any other by its dotted path (`my_package.my_mechanism`): a new one is
a new file and nothing else.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

from hetero_kv import attention
from hetero_kv.attention.call import Mechanism
from hetero_kv.attention.fields import Fields

ALIASES = {"swa": "sliding"}


def names() -> list[str]:
    """The mechanisms of this package."""
    found = (info.name for info in pkgutil.iter_modules(attention.__path__))
    built = {name for name in found if hasattr(_module(name), "build")}
    return sorted(built - set(ALIASES.values()) | set(ALIASES))


def find(name: str) -> Callable[[Fields], Mechanism]:
    """What builds the mechanism of that name; ValueError if there is none."""
    try:
        return (importlib.import_module(name) if "." in name else _module(name)).build
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"no mechanism {name!r} ({error}); use one of {', '.join(names())}, or the dotted path "
            "of a module with a function build(fields)"
        ) from error


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"hetero_kv.attention.{ALIASES.get(name, name)}")
