"""Timing in turns, and how much of the machine others used meanwhile."""

import contextlib
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping


def in_turns(
    blocks: Mapping[str, Callable[[], float]],
    *,
    repeats: int,
    least_repeats: int,
    seconds: float,
    on_round: Callable[[Mapping[str, list[float]]], None] = lambda samples: None,
) -> dict[str, list[float]]:
    """Runs the blocks A, B, A, B, … and returns what each returned, round by round.

    A first round, which compiles and fills caches, is not counted. Slow drift of the machine meets
    all blocks alike, so their ratios survive it.

    Args:
      blocks: Each returns its own time: what it sets up is not timed.
      seconds: After so much time no further round is begun, once there are `least_repeats`.
      on_round: Called after every counted round.
    """
    for block in blocks.values():
        block()
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    began = time.monotonic()
    for done in range(repeats):
        if done >= least_repeats and time.monotonic() - began > seconds:
            break
        for name, block in blocks.items():
            samples[name].append(block())
        on_round(samples)
    return samples


def median(samples: list[float]) -> float:
    """The middle sample."""
    return statistics.median(samples)


@contextlib.contextmanager
def usage() -> Iterator[dict[str, float | None]]:
    """Fills the dictionary on exit.

    Yields:
      {"seconds": wall time, "other_cores": cores that other processes kept busy (None: unknown)}.
    """
    found: dict[str, float | None] = {}
    began, machine, own = time.monotonic(), _machine_seconds(), _own_seconds()
    yield found
    wall = time.monotonic() - began
    others = None
    if machine is not None:
        others = (_machine_seconds() - machine) - (_own_seconds() - own)
        others = round(max(0.0, others / wall), 2)
    found |= {"seconds": round(wall, 2), "other_cores": others}


def _own_seconds() -> float:
    """Processor time of this process and of children that ended."""
    return sum(os.times()[:4])


def _machine_seconds() -> float | None:
    """Processor time that anyone used, or that a hypervisor took away."""
    try:
        first = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in first[1:9])
    return (user + nice + system + irq + softirq + steal) / ticks
