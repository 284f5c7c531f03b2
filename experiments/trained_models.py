"""Models that the rows of an ablation share: each is trained once, named by its configuration.

A model's directory is that of `training.run`: one that was killed goes on where it was, a finished
one is read. `python -m experiments.trained_models DIRECTORY CONFIG.json` trains one.
"""

import collections
import copy
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import models
from experiments import (
    host_memory,
    metrics_writer,
    progress,
    run_record,
    sweep_jobs,
    train_checkpoints,
    train_config,
    training,
)


def digest(config: train_config.TrainConfig) -> str:
    """Names a model: 16 hex digits of everything that decides its parameters."""
    values = train_config.to_dict(config)
    for name in train_config.FREE_FIELDS:
        del values[name]
    if hasattr(config.task, "corpus_digest"):  # text differs between interpreters
        values["corpus"] = config.task.corpus_digest()
    return run_record.digest(values)[:16]


def read(config: train_config.TrainConfig) -> training.TrainResult:
    """The model that `training.run` has left in the configuration's work directory."""
    place = pathlib.Path(config.workdir)
    state = training.init_state(config, models.build(config.model))
    with train_checkpoints.TrainCheckpoints(place / "checkpoints", keep=1) as saved:
        state, _ = saved.restore(saved.latest_step, state)
    results = run_record.read_json(place / "results.json")
    return training.TrainResult(state.params, results, metrics_writer.read(place / "metrics.jsonl"))


class Models:
    """The models below a directory."""

    def __init__(self, place: str | os.PathLike):
        self.place = pathlib.Path(place)

    def workdir(self, config: train_config.TrainConfig) -> pathlib.Path:
        """Where a model is trained."""
        return self.place / digest(config)

    def get(self, config: train_config.TrainConfig) -> training.TrainResult:
        """The trained model; it is trained, or its training goes on, where that is not done yet."""
        config = copy.deepcopy(config)
        config.workdir, config.keep = str(self.workdir(config)), 1
        return read(config) if self.done(config) else training.run(config)

    def done(self, config: train_config.TrainConfig) -> bool:
        """Whether the model is trained."""
        return (self.workdir(config) / "results.json").is_file()

    def train(self, configs: Sequence[train_config.TrainConfig], jobs: int) -> None:
        """Trains what is missing: in this process, or in `jobs` pinned to cores of their own.

        Raises:
            RuntimeError: A process failed; the message ends with what it said last.
        """
        todo = {digest(x): x for x in configs if not self.done(x)}
        if jobs == 1:
            for config in todo.values():
                self.get(config)  # which shows its own progress
        else:
            with progress.Progress(len(todo), title="models trained") as bar:
                self._train_apart(todo, jobs, bar)

    def _train_apart(
        self, todo: dict[str, train_config.TrainConfig], jobs: int, bar: progress.Progress
    ) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        done = 0

        def start(name: str, cores: sweep_jobs.Cores) -> subprocess.Popen:
            return self._start(name, todo[name], cores)

        def ended(name: str, process: subprocess.Popen) -> None:
            nonlocal done
            if process.returncode:
                text = (self.place / f"{name}.txt").read_text(errors="replace").strip()
                raise RuntimeError(f"training {name} failed: {text[-sweep_jobs.TAIL :]}")
            done += 1
            bar.update(done)

        sweep_jobs.run_pinned(collections.deque(todo), jobs, start, ended)

    def _start(
        self, name: str, config: train_config.TrainConfig, cores: sweep_jobs.Cores
    ) -> subprocess.Popen:
        wanted = self.place / f"{name}.json"
        run_record.write_json(wanted, train_config.to_dict(config))
        command = [sys.executable, "-m", "experiments.trained_models", str(self.place), str(wanted)]
        with (self.place / f"{name}.txt").open("w") as output:
            return sweep_jobs.start_pinned(command, output, cores)


if __name__ == "__main__":
    host_memory.keep_freed_buffers()
    wanted = train_config.from_dict(run_record.read_json(pathlib.Path(sys.argv[2])))
    Models(sys.argv[1]).get(wanted)
