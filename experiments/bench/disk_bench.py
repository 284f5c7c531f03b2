"""The disk tier beside a bare append log with the same group commit.

The log is what no store can beat: payloads one after the other in one file, synced after every
group, read back by position; no headers, no checksums, no index, no budget.
"""

import dataclasses
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from experiments import config_checks
from experiments.bench import timing
from hetero_kv.prefix.disk.tier import SMALLEST, DiskTier
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, label

MIB = 1 << 20


@dataclasses.dataclass(kw_only=True)
class DiskConfig:
    """What to measure, and where."""

    directory: str = ""  # on the disk in question; "": that of temporary files
    object_bytes: tuple[int, ...] = (256 << 10, 4 * MIB)
    total_bytes: int = 256 * MIB  # put and got back in one turn
    group_bytes: int = 16 * MIB  # between two syncs
    capacity_bytes: int = 8 << 30  # budget of the tier; decides how large its segments are
    repeats: int = 7
    seconds: float = 60.0  # per object size, after which no further turn is begun

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        config_checks.check_directory(self)
        config_checks.not_empty(self, "object_bytes")
        config_checks.at_least(self, 1, "object_bytes", "total_bytes", "group_bytes", "repeats")
        config_checks.at_least(self, SMALLEST, "capacity_bytes")
        config_checks.at_least(self, 0, "seconds")


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """The same objects for both arms."""

    payloads: tuple[ArrayPayload, ...]
    group: int  # objects between two syncs


def run(config: DiskConfig) -> list[dict]:
    """A row per object size and direction: MB/s of both (medians), and the median of the ratios.

    Turns go tier, log, tier, log, …; a ratio is taken within a turn. Reads come from the disk as
    far as the operating system lets go of what it holds of a file.
    """
    rows = []
    for nbytes in config.object_bytes:
        work = _work(nbytes, config)
        with tempfile.TemporaryDirectory(dir=config.directory or None) as directory:
            samples = _measure(work, pathlib.Path(directory), config)
        total = nbytes * len(work.payloads)
        for direction in ("put", "get"):
            tier, log = samples[f"tier {direction}"], samples[f"log {direction}"]
            rows.append(
                {
                    "part": "disk",
                    "object_bytes": nbytes,
                    "direction": direction,
                    "tier_mb_per_s": total / statistics.median(tier) / 1e6,
                    "log_mb_per_s": total / statistics.median(log) / 1e6,
                    "ratio": statistics.median(b / a for a, b in zip(tier, log, strict=True)),
                    "turns": len(tier),
                }
            )
    return rows


def _work(nbytes: int, config: DiskConfig) -> _Work:
    layout = GroupLayout(
        (), (("entries", 0, nbytes // 2), ("index keys", nbytes // 2, nbytes)), nbytes
    )
    random = np.random.default_rng(0)
    count = max(1, config.total_bytes // nbytes)
    payloads = tuple(
        ArrayPayload.seal(layout, _label(i), random.integers(0, 256, nbytes, dtype=np.uint8))
        for i in range(count)
    )
    return _Work(payloads, max(1, config.group_bytes // nbytes))


def _measure(work: _Work, directory: pathlib.Path, config: DiskConfig) -> dict[str, list[float]]:
    tier, log = (
        _Tier(work, directory / "tier", config.capacity_bytes),
        _Log(work, directory / "log"),
    )
    blocks: dict[str, Callable[[], float]] = {
        "tier put": tier.put,
        "log put": log.put,
        "tier get": tier.get,
        "log get": log.get,
    }
    try:
        return timing.in_turns(
            blocks, repeats=config.repeats, least_repeats=3, seconds=config.seconds
        )
    finally:
        tier.close()


class _Tier:
    def __init__(self, work: _Work, directory: pathlib.Path, capacity: int):
        self._work = work
        self._directory = directory
        self._capacity = capacity
        self._tier: DiskTier | None = None

    def put(self) -> float:
        self.close()
        layout = self._work.payloads[0].layout
        tier = self._tier = DiskTier(
            self._directory, self._capacity, bytes(32), lambda *_: layout, background=False
        )
        began = time.perf_counter()
        for i, payload in enumerate(self._work.payloads, 1):
            if tier.put("history", _key(i - 1), 1, payload) is None:
                raise RuntimeError("the tier has no room: measure on a larger disk")
            if i % self._work.group == 0 and not tier.flush().ok:
                raise RuntimeError("a flush failed: measure on a disk that works")
        tier.flush()
        return time.perf_counter() - began

    def get(self) -> float:
        for path in self._directory.glob("*.seg"):
            let_go(path)
        tickets = [x.ticket for x in self._tier.stored()]
        began = time.perf_counter()
        for i, ticket in enumerate(tickets):
            if self._tier.read(ticket, _label(i)).payload is None:
                raise RuntimeError("an object did not come back: measure on a disk that works")
        return time.perf_counter() - began

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
            shutil.rmtree(self._directory)
            self._tier = None


class _Log:
    def __init__(self, work: _Work, path: pathlib.Path):
        self._work = work
        self._path = path

    def put(self) -> float:
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT)
        offset = 0
        began = time.perf_counter()
        for i, payload in enumerate(self._work.payloads, 1):
            os.pwrite(fd, payload.buffer, offset)
            offset += payload.nbytes
            if i % self._work.group == 0:
                os.fdatasync(fd)
        os.fdatasync(fd)
        taken = time.perf_counter() - began
        os.close(fd)
        return taken

    def get(self) -> float:
        let_go(self._path)
        fd = os.open(self._path, os.O_RDONLY)
        offset = 0
        began = time.perf_counter()
        for payload in self._work.payloads:
            os.preadv(fd, [np.empty(payload.nbytes, np.uint8)], offset)
            offset += payload.nbytes
        taken = time.perf_counter() - began
        os.close(fd)
        return taken


def let_go(path: pathlib.Path) -> None:
    """Asks the operating system to forget what it holds of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _key(i: int) -> bytes:
    return i.to_bytes(32)


def _label(i: int) -> bytes:
    return label("history", _key(i), 1)
