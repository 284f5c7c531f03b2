"""Running the cells of a sweep: processes pinned to cores, records of finished cells, retries."""

import collections
import fcntl
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, TypeVar

from experiments import progress, run_record, sweep_plan
from experiments.sweep_plan import Cell

TAIL = 400  # characters of a failed cell's output that are reported
POLL_SECONDS = 0.05

Job = TypeVar("Job")
Cores = set[int] | None


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


def core_sets(jobs: int) -> list[Cores]:
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


def run_pinned(
    todo: collections.deque[Job],
    jobs: int,
    start: Callable[[Job, Cores], subprocess.Popen],
    ended: Callable[[Job, subprocess.Popen], None],
) -> None:
    """Runs a process for each job, so many at a time, on cores of their own.

    ended: told of every process that has ended; it may put its job back, or raise. Whatever is
    raised, no process is left behind.
    """
    free = collections.deque(core_sets(jobs))
    running: list[tuple[subprocess.Popen, Job, Cores]] = []
    try:
        while todo or running:
            while todo and free:
                job, cores = todo.popleft(), free.popleft()
                running.append((start(job, cores), job, cores))
            over = [x for x in running if x[0].poll() is not None]
            for item in over:
                running.remove(item)
                process, job, cores = item
                free.append(cores)
                ended(job, process)
            if not over:
                time.sleep(POLL_SECONDS)
    finally:
        for process, *_ in running:
            process.terminate()
        for process, *_ in running:
            process.wait()


def start_pinned(
    command: Sequence[str], output: IO, cores: Cores, files: Sequence[int] = ()
) -> subprocess.Popen:
    """A process on these cores. files: descriptors that it has as well."""
    before = os.sched_getaffinity(0) if cores else None
    try:
        if cores:  # a process has the cores of the thread that starts it
            os.sched_setaffinity(0, cores)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=files,
        )
    finally:
        if before:
            os.sched_setaffinity(0, before)


def run_all(
    place: Place, runner: str, config_file: str, cells: Sequence[Cell], jobs: int, retries: int
) -> dict[str, str]:
    """Runs the cells that have no record yet; returns why others failed, by digest."""
    todo = collections.deque((cell, 0) for cell in cells if place.record(cell) is None)
    failed: dict[str, str] = {}
    done = len(cells) - len(todo)

    def start(job: tuple[Cell, int], cores: Cores) -> subprocess.Popen:
        return _start(place, runner, config_file, job[0], cores)

    def ended(job: tuple[Cell, int], process: subprocess.Popen) -> None:
        nonlocal done
        cell, tries = job
        why = _why(place, process, cell)
        if why and tries < retries:
            todo.append((cell, tries + 1))
            return
        done += 1
        if why:
            failed[cell.digest] = f"{dict(cell.changes)}: {why}"
        bar.update(done, {"failed": len(failed)})

    with progress.Progress(len(cells), start=done, title=f"sweep of {runner}") as bar:
        run_pinned(todo, jobs, start, ended)
    return failed


def _start(
    place: Place, runner: str, config_file: str, cell: Cell, cores: Cores
) -> subprocess.Popen:
    workdir = place.workdir(cell)
    workdir.mkdir(exist_ok=True)
    (workdir / "results.json").unlink(missing_ok=True)  # of a try that failed after writing it
    command = [sys.executable, "-m", runner]
    command += sweep_plan.arguments(cell, config_file, str(workdir))
    with (workdir / "output.txt").open("w") as output:
        return start_pinned(command, output, cores, (place.lock.fileno(),))


def _why(place: Place, process: subprocess.Popen, cell: Cell) -> str:
    """ "" where the cell has finished and is recorded now."""
    if process.returncode == 0:
        return "" if place.finish(cell) else "it ended well and left no results.json"
    text = (place.workdir(cell) / "output.txt").read_text(errors="replace")
    return f"exit code {process.returncode}: {text.strip()[-TAIL:]}"
