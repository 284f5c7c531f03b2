"""The record that a training leaves in its work directory, and whose directory it is."""

import os
import pathlib

from experiments import config_tools, metrics_writer, run_record, train_checkpoints, train_config


def holds_work(workdir: str | os.PathLike) -> bool:
    """Whether a run has left anything there: results, a checkpoint, or a row of metrics.

    One that ended before its first row, in a model or a task that could not be, has not.
    """
    place = pathlib.Path(workdir)
    return (
        (place / "results.json").is_file()
        or train_checkpoints.holds_one(place / "checkpoints")
        or bool(metrics_writer.read(place / "metrics.jsonl"))
    )


def begin(config: train_config.TrainConfig) -> None:
    """Writes config.json and run.json.

    Raises:
      ValueError: The directory holds another run's work, or the same run's on another corpus.
    """
    workdir, values = pathlib.Path(config.workdir), train_config.to_dict(config)
    before, record = {}, {}
    if holds_work(workdir):
        before, record = (
            run_record.read_json(workdir / name) or {} for name in ("config.json", "run.json")
        )
    changed = [
        path
        for path in config_tools.differences(before, values)
        if path not in train_config.FREE_FIELDS
    ]
    if before and changed:
        raise ValueError(
            f"{workdir} holds a run with other values of {', '.join(changed)}; "
            "use another workdir, or delete that one"
        )
    extra = {}
    if hasattr(config.task, "corpus_digest"):
        extra["corpus_digest"] = config.task.corpus_digest()
        if record and record.get("corpus_digest") != extra["corpus_digest"]:
            raise ValueError(
                f"{workdir} was trained on another corpus: the standard library's sources differ "
                "between interpreters, and this is not the one that began the run"
            )
    run_record.write(workdir, values, seed=config.seed, **extra)
