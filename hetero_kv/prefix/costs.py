"""What routes cost in seconds, so that a plan takes the cheapest one (DESIGN §4)."""

import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import xxhash

SMALL, LARGE = 1 << 12, 1 << 22  # bytes of the objects that are timed


@dataclasses.dataclass(frozen=True)
class TierCost:
    """What it takes to bring objects back from a tier: bytes over a bandwidth, and so much each.

    bytes_per_s: inf for a tier whose bytes cost nothing. seconds_per_read: of one object.
    """

    bytes_per_s: float
    seconds_per_read: float = 0.0

    def __post_init__(self):
        if not (self.bytes_per_s > 0 and self.seconds_per_read >= 0):
            raise ValueError(f"a tier needs bytes_per_s > 0 and seconds_per_read >= 0, got {self}")

    def seconds(self, nbytes: int, reads: int) -> float:
        """Seconds for `reads` objects of `nbytes` bytes together."""
        return nbytes / self.bytes_per_s + reads * self.seconds_per_read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of computing, replaying and reading.

    prefill_per_token: seconds to compute a token. prefill_per_pair: more of them for each token
    before it (attention over a longer history). replay_per_token: seconds to replay a token.
    host, disk: of a group in host memory, and of one that is only on disk.
    """

    prefill_per_token: float
    prefill_per_pair: float = 0.0
    replay_per_token: float
    host: TierCost
    disk: TierCost | None = None

    def __post_init__(self):
        times = (self.prefill_per_token, self.prefill_per_pair, self.replay_per_token)
        if not all(0 <= x < float("inf") for x in times):
            raise ValueError(f"seconds per token are finite and >= 0, got {self}")

    def prefill(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens [start, stop) of a prompt."""
        count = stop - start
        return count * self.prefill_per_token + count * (start + stop) / 2 * self.prefill_per_pair

    def replay(self, tokens: float) -> float:
        """Seconds to replay so many tokens."""
        return tokens * self.replay_per_token

    def read_disk(self, nbytes: int, reads: int) -> float:
        """Seconds to read from disk; raises ValueError if these costs know of none."""
        if not reads:
            return 0.0
        if self.disk is None:
            raise ValueError("these costs say nothing of a disk: give Costs(disk=TierCost(…))")
        return self.disk.seconds(nbytes, reads)

    @classmethod
    def measured(
        cls,
        *,
        prefill_per_token: float,
        replay_per_token: float,
        prefill_per_pair: float = 0.0,
        directory: pathlib.Path | str | None = None,
        repeats: int = 5,
    ) -> Self:
        """Times the tiers of this machine now; seconds of computing are the caller's to time.

        A read is a copy, its checksum, and one more copy to where the device takes it from. What
        the disk has to give is read past the page cache where the system allows for it.

        directory: of the disk tier; made if need be, and left as it was otherwise.

        Raises:
            OSError: the directory cannot be written or read.
        """
        disk = None
        if directory is not None:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
            disk = _timed(lambda size: _disk_reader(directory, size), repeats)
        return cls(
            prefill_per_token=prefill_per_token,
            prefill_per_pair=prefill_per_pair,
            replay_per_token=replay_per_token,
            host=_timed(_host_reader, repeats),
            disk=disk,
        )


def _timed(reader: Callable[[int], Callable[[], float]], repeats: int) -> TierCost:
    """From the median times of a small and of a large object."""
    small, large = (
        statistics.median([run() for _ in range(max(1, repeats))])
        for run in (reader(SMALL), reader(LARGE))
    )
    # Noise may not make a bandwidth infinite or negative.
    per_byte = max(large - small, large / 2, 1e-9) / (LARGE - SMALL)
    return TierCost(1 / per_byte, max(0.0, small - SMALL * per_byte))


def _host_reader(size: int) -> Callable[[], float]:
    source, target = np.full(size, 7, np.uint8), np.zeros(size, np.uint8)

    def run() -> float:
        began = time.perf_counter()
        copy = source.copy()
        xxhash.xxh3_64(copy).intdigest()
        np.copyto(target, copy)
        return time.perf_counter() - began

    return run


def _disk_reader(directory: pathlib.Path | str, size: int) -> Callable[[], float]:
    payload = np.random.default_rng(0).bytes(size)
    target = np.zeros(size, np.uint8)

    def run() -> float:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            found = os.pread(file.fileno(), size, 0)
            if len(found) != size:
                raise OSError(f"a read of {size} bytes in {directory} delivered {len(found)}")
            xxhash.xxh3_64(found).intdigest()
            np.copyto(target, np.frombuffer(found, np.uint8))
            return time.perf_counter() - began

    return run
