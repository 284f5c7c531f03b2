"""A test process begins anew before it has compiled more than Linux lets it map.

A process may have 65,530 mappings. Every compiled function takes some, and where there are no more
the compiler dies.
"""

import gc
import pathlib
import sys
import time
from collections.abc import Callable

MOST = 30_000  # mappings from which on it begins anew
EVERY = 3.0  # seconds between counts, which take milliseconds; some 200 a second are made


def count() -> int:
    """Mappings of this process; 0 where that is unknown."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def forget() -> None:
    """Drops what is compiled, and what test modules keep that holds it."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("tests.") else ():
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()
    import jax

    jax.clear_caches()
    gc.collect()


class Watch:
    """Called between tests: forgets where there are too many mappings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._next = clock() + EVERY

    def __call__(self) -> None:
        if self._clock() < self._next:
            return
        if count() >= MOST:
            forget()
        self._next = self._clock() + EVERY
