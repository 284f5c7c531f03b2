"""Counters and histograms by Prometheus-style names, exact under threads; text and JSON of them.

A series is `name{label="value",…}`. What is counted often is bound once and then counted by its
handle: finding a series by its labels costs more than counting.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import math
import threading
from collections.abc import Mapping, Sequence

Number = int | float
Snapshot = dict[str, Number]

# Seconds, a factor of about 2 to 3 apart.
LATENCY_BOUNDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
AGE_BOUNDS = (
    *(0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0),
    *(86400.0, 604800.0),
)


@functools.lru_cache(maxsize=4096)
def series(name: str, **labels: str) -> str:
    """`name{label="value",…}`, labels sorted and escaped."""
    if not labels:
        return name
    quoted = (f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{','.join(quoted)}}}"


class Counter:
    """One series. `value` may be added to by whoever holds the lock of its Counters."""

    __slots__ = ("_lock", "value")

    def __init__(self, lock: threading.Lock):
        self.value = 0
        self._lock = lock

    def add(self, amount: int = 1) -> None:
        """Counts up."""
        with self._lock:
            self.value += amount


class Histogram:
    """How often values fell under each of some bounds (ascending; the last one is infinity)."""

    __slots__ = ("_lock", "bounds", "counts", "total")

    def __init__(self, lock: threading.Lock, bounds: Sequence[float]):
        if list(bounds) != sorted(set(bounds)) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"bounds must be finite and ascend, got {bounds}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0  # of all values
        self._lock = lock

    def observe(self, value: float, count: int = 1) -> None:
        """A value, `count` times. It falls under every bound that is not smaller."""
        with self._lock:
            self.count(value, count)

    def count(self, value: float, count: int = 1) -> None:
        """`observe`, for whoever holds the lock of its Counters."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count

    def samples(self, name: str, labels: Mapping[str, str]) -> Snapshot:
        """Its series: cumulative buckets, sum and count."""
        totals = itertools.accumulate(self.counts)
        names = [*map(repr, self.bounds), "+Inf"]
        found: Snapshot = {
            series(f"{name}_bucket", **labels, le=le): n
            for le, n in zip(names, totals, strict=True)
        }
        found[series(f"{name}_sum", **labels)] = self.total
        found[series(f"{name}_count", **labels)] = sum(self.counts)
        return found


class Counters:
    """Monotonic counters and histograms.

    Counters end in `_total`; names carry their unit: tokens, bytes, groups, seconds.

    Args:
        namespace: put before every name of a snapshot.
    """

    def __init__(self, namespace: str = ""):
        self.namespace = namespace
        self.lock = threading.Lock()  # of all values; nothing else is ever taken under it
        self._bound: dict[str, Counter] = {}  # by series
        self._known: dict[tuple, Counter] = {}  # by name and labels, in the order given
        self._histograms: dict[str, tuple[str, dict[str, str], Histogram]] = {}  # by series

    def bind(self, name: str, **labels: str) -> Counter:
        """The handle of a series, which is shown from now on even if it stays 0."""
        key = series(name, **labels)
        with self.lock:
            found = self._bound.get(key)
            if found is None:
                found = self._bound[key] = Counter(self.lock)
            self._known[name, *labels.items()] = found
        return found

    def histogram(self, name: str, bounds: Sequence[float], **labels: str) -> Histogram:
        """The histogram of a series, made with these bounds if need be."""
        key = series(name, **labels)
        with self.lock:
            if key not in self._histograms:
                self._histograms[key] = name, labels, Histogram(self.lock, bounds)
            return self._histograms[key][2]

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Counts up, by name."""
        found = self._known.get((name, *labels.items()))
        if found is None:
            found = self.bind(name, **labels)
        with self.lock:
            found.value += amount

    def get(self, name: str, **labels: str) -> int:
        """The present value, 0 if never counted."""
        found = self._bound.get(series(name, **labels))
        return 0 if found is None else found.value

    def snapshot(self) -> Snapshot:
        """All series by name, as they were at one moment."""
        with self.lock:
            values = {x: y.value for x, y in sorted(self._bound.items())}
            for _, (name, labels, histogram) in sorted(self._histograms.items()):
                values |= histogram.samples(name, labels)
        return self.named(values)

    def named(self, values: Mapping[str, Number]) -> Snapshot:
        """Values with the namespace before their names."""
        return {self.namespace + x: y for x, y in values.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What all series of a name are. kind: "counter", "gauge" or "histogram"."""

    kind: str
    help: str


def to_text(
    snapshot: Mapping[str, Number], families: Mapping[str, Family], namespace: str = ""
) -> str:
    """The Prometheus text format, version 0.0.4. `families`: by name without the namespace.

    Series of an unknown family are shown as "untyped".
    """
    grouped: dict[str, list[str]] = {}
    for key, value in snapshot.items():
        name = _family_of(key.partition("{")[0], families, namespace)
        grouped.setdefault(name, []).append(f"{key} {_number(value)}")
    lines = []
    for name in sorted(grouped):
        family = families.get(name.removeprefix(namespace))
        if family is not None:
            text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
            lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {family.kind if family else 'untyped'}")
        lines += grouped[name]
    return "".join(f"{x}\n" for x in lines)


def to_json(snapshot: Mapping[str, Number], when: float) -> str:
    """One line of JSON: {"time": seconds since 1970, "metrics": {series: value}}."""
    return json.dumps({"time": when, "metrics": dict(snapshot)}, allow_nan=False) + "\n"


def _family_of(name: str, families: Mapping[str, Family], namespace: str) -> str:
    """The name that a sample's HELP and TYPE stand under: several samples make a histogram."""
    stem, _, end = name.rpartition("_")
    family = families.get(stem.removeprefix(namespace))
    is_part = end in ("bucket", "sum", "count") and family is not None
    return stem if is_part and family.kind == "histogram" else name


def _number(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
