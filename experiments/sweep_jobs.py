"""Running the cells of a sweep: processes pinned to cores, records of finished cells, retries."""

import collections
import fcntl
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments import progress, run_record, sweep_plan
from experiments.sweep_plan import Cell

TAIL = 400  # characters of a failed cell's output that are reported
POLL_SECONDS = 0.05


class Place:
    """A sweep's directory: `cells/<digest>` to work in, `cells/<digest>.json` when finished.

    One sweep at a time has it. The lock belongs to running cells as well, so that one that outlives
    a killed sweep is waited for and not run beside.
    """

    def __init__(self, path: str):
        self.path = pathlib.Path(path)

    def __enter__(self) -> "Place":
        (self.path / "cells").mkdir(parents=True, exist_ok=True)
        self.lock = (self.path / ".lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *exception: object) -> None:
        self.lock.close()

    def workdir(self, cell: Cell) -> pathlib.Path:
        """Where the cell runs."""
        return self.path / "cells" / cell.digest

    def record(self, cell: Cell) -> dict | None:
        """The results of a finished cell."""
        return run_record.read_json(self.path / "cells" / f"{cell.digest}.json")

    def finish(self, cell: Cell) -> bool:
        """Records the results that the cell has left; False if there are none."""
        found = run_record.read_json(self.workdir(cell) / "results.json")
        if found is None:
            return False
        record = {"changes": dict(cell.changes), "seed": cell.seed, "results": found}
        run_record.write_json(self.path / "cells" / f"{cell.digest}.json", record)
        return True


def core_sets(jobs: int) -> list[set[int] | None]:
    """Cores of each job, as equal as they come out; None where they cannot be chosen.

    Raises:
        ValueError: there is no job.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if not hasattr(os, "sched_getaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if jobs >= len(cores):
        return [{cores[i % len(cores)]} for i in range(jobs)]
    return [set(cores[i::jobs]) for i in range(jobs)]


def run_all(
    place: Place, runner: str, config_file: str, cells: Sequence[Cell], jobs: int, retries: int
) -> dict[str, str]:
    """Runs the cells that have no record yet; returns why others failed, by digest."""
    todo = collections.deque((cell, 0) for cell in cells if place.record(cell) is None)
    free = collections.deque(core_sets(jobs))
    running: list[tuple[subprocess.Popen, Cell, int, set[int] | None]] = []
    failed: dict[str, str] = {}
    done = start = len(cells) - len(todo)
    title = f"sweep of {runner}"
    with progress.Progress(len(cells), start=start, title=title) as bar:
        try:
            while todo or running:
                while todo and free:
                    cell, tries = todo.popleft()
                    cores = free.popleft()
                    running.append((_start(place, runner, config_file, cell, cores), cell, tries,
                                    cores))  # fmt: skip
                ended = [x for x in running if x[0].poll() is not None]
                for job in ended:
                    running.remove(job)
                    process, cell, tries, cores = job
                    free.append(cores)
                    why = _why(place, process, cell)
                    if why and tries < retries:
                        todo.append((cell, tries + 1))
                        continue
                    done += 1
                    if why:
                        failed[cell.digest] = f"{dict(cell.changes)}: {why}"
                    bar.update(done, {"failed": len(failed)})
                if not ended:
                    time.sleep(POLL_SECONDS)
        finally:
            for process, *_ in running:
                process.terminate()
            for process, *_ in running:
                process.wait()
    return failed


def _start(
    place: Place, runner: str, config_file: str, cell: Cell, cores: set[int] | None
) -> subprocess.Popen:
    workdir = place.workdir(cell)
    workdir.mkdir(exist_ok=True)
    (workdir / "results.json").unlink(missing_ok=True)  # of a try that failed after writing it
    command = [sys.executable, "-m", runner]
    command += sweep_plan.arguments(cell, config_file, str(workdir))
    before = os.sched_getaffinity(0) if cores else None
    with (workdir / "output.txt").open("w") as output:
        try:
            if cores:  # a process has the cores of the thread that starts it
                os.sched_setaffinity(0, cores)
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(place.lock.fileno(),),
            )
        finally:
            if before:
                os.sched_setaffinity(0, before)


def _why(place: Place, process: subprocess.Popen, cell: Cell) -> str:
    """ "" where the cell has finished and is recorded now."""
    if process.returncode == 0:
        return "" if place.finish(cell) else "it ended well and left no results.json"
    text = (place.workdir(cell) / "output.txt").read_text(errors="replace")
    return f"exit code {process.returncode}: {text.strip()[-TAIL:]}"
