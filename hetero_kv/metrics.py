"""Counters and gauges by Prometheus-style names."""

import collections
import functools
from collections.abc import Mapping


@functools.lru_cache(maxsize=4096)
def series(name: str, **labels: str) -> str:
    """`name{label="value",…}`, labels sorted and escaped."""
    if not labels:
        return name
    quoted = (f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{','.join(quoted)}}}"


class Counters:
    """Monotonic counters. Names end in `_total` and carry their unit: tokens, bytes, groups."""

    def __init__(self):
        self._values: collections.Counter[str] = collections.Counter()

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Counts up."""
        self._values[series(name, **labels)] += amount

    def get(self, name: str, **labels: str) -> int:
        """The present value, 0 if never counted."""
        return self._values[series(name, **labels)]

    def snapshot(self) -> Mapping[str, int]:
        """All counters that were ever counted, by name."""
        return dict(sorted(self._values.items()))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
