"""Converts between Hugging Face directories and orbax checkpoints; the source says which way.

    python -m models.convert --source=DeepSeek-V4-Flash --dry_run
    python -m models.convert --source=DeepSeek-V4-Flash --target=flash --keep_quantised
    python -m models.convert --source=flash --target=back

A target is complete or not there: it is written beside its place and renamed. Only configuration
and weights are converted; a tokeniser's files are not.
"""

import os
import pathlib
import shutil
import sys
import tempfile

import rich.console
import rich.progress
from absl import app, flags

from models import checkpoints, hf
from models.hf import dry_run
from models.hf.loading import Progress, Report


def to_checkpoint(
    source: pathlib.Path,
    target: pathlib.Path,
    *,
    dtype: str = "",
    keep_quantised: bool = False,
    progress: Report | None = None,
) -> None:
    """A Hugging Face directory as an orbax checkpoint.

    dtype: of the parameters, "": as `config.json` says. Raises ValueError, naming file and tensor,
    for what cannot be read, and where the target exists.
    """
    check_target(target)
    model, params = hf.from_pretrained(
        source, keep_quantised=keep_quantised, progress=progress, **_changes(dtype)
    )
    checkpoints.save(target, model, params, hf.model_type(source))


def to_directory(
    source: pathlib.Path, target: pathlib.Path, *, dtype: str = "", model_type: str = ""
) -> None:
    """An orbax checkpoint as a Hugging Face directory; packed weights as they are.

    model_type: the family, "": the one that the checkpoint came from. Raises ValueError where the
    family has no place for the model, and where the target exists.
    """
    check_target(target)
    found = checkpoints.describe(source, **_changes(dtype))
    family = _family(source, model_type or found.model_type)
    family.fields(found.model, found.params)  # refused before anything is read
    model, params = checkpoints.restore(source, **_changes(dtype))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=target.parent))
    try:
        family.save(model, params, scratch)
        os.rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def describe(
    source: pathlib.Path,
    *,
    dtype: str = "",
    keep_quantised: bool = False,
    model_type: str = "",
    limit: int | None = None,
) -> tuple[str, bool]:
    """What a conversion of `source` would do, as text, and whether it would succeed.

    Nothing but headers is read, so values of tensors are not checked. limit: bytes of memory for
    the parameters.
    """
    if checkpoints.is_checkpoint(source):
        found = checkpoints.describe(source, **_changes(dtype))
        family = _family(source, model_type or found.model_type)
        family.fields(found.model, found.params)
        sizes = family.sizes(found.model, found.params)
        total = sum(sizes.values())
        lines = [f"{name}  {size} B" for name, size in sizes.items()]
        fits = limit is None or total <= limit
        lines.append(f"{len(sizes)} tensors, {total} B" + ("" if fits else ": does not fit"))
        return "\n".join(lines) + "\n", fits
    plan = hf.plan_pretrained(source, keep_quantised=keep_quantised, **_changes(dtype))
    report = dry_run.dry_run(plan, limit)
    return report.text(), report.ok


def _changes(dtype: str) -> dict[str, str]:
    return {"param_dtype": dtype} if dtype else {}


def _family(source: pathlib.Path, model_type: str) -> hf.Family:
    if not model_type:
        raise ValueError(f"{source} came from no family; give --model_type: {hf.families()}")
    return hf.family(model_type)


def check_target(target: pathlib.Path) -> None:
    """Raises ValueError where no directory can be made: it exists, or its place cannot be had."""
    if os.path.lexists(target):
        raise ValueError(f"{target} exists; give a new --target, or remove it")
    place = next(x for x in target.absolute().parents if x.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{target}: {place} is no directory that can be written to; give another "
                         "--target")  # fmt: skip


def _check_flags(values: flags.FlagValues, from_checkpoint: bool) -> None:
    """Raises ValueError for flags that this conversion would not look at."""
    idle = {
        "memory_gib": values.memory_gib is not None and not values.dry_run,
        "keep_quantised": values.keep_quantised and from_checkpoint,
        "model_type": values.model_type and not from_checkpoint,
    }
    why = {
        "memory_gib": "it is for --dry_run",
        "keep_quantised": f"{values.source} is a checkpoint, whose packed weights stay as they are",
        "model_type": f"{values.source} is no checkpoint: its own family is read",
    }
    for name in (x for x, ignored in idle.items() if ignored):
        raise ValueError(f"--{name}={getattr(values, name)} would do nothing: {why[name]}")


class _Bar:
    """Progress on standard error: a bar on a terminal."""

    def __init__(self):
        columns = (
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
        )
        console = rich.console.Console(file=sys.stderr)
        self._bar = rich.progress.Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=None)

    def __call__(self, state: Progress) -> None:
        self._bar.update(
            self._task,
            total=state.all_nbytes,
            completed=state.nbytes,
            description=f"{state.file} {state.tensor}",
        )

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def main(values: flags.FlagValues) -> None:
    """Runs what the flags say."""
    source = pathlib.Path(values.source)
    from_checkpoint = checkpoints.is_checkpoint(source)
    _check_flags(values, from_checkpoint)
    if not (values.target or values.dry_run):
        raise ValueError("give --target, or --dry_run")
    target = pathlib.Path(values.target)
    shared = {"dtype": values.dtype}
    quantised = {"keep_quantised": values.keep_quantised}
    if values.dry_run:
        limit = None
        if values.memory_gib is not None:
            if not 0 < values.memory_gib < float("inf"):
                raise ValueError(f"memory_gib={values.memory_gib} is a finite number above 0")
            limit = int(values.memory_gib * (1 << 30))
        text, ok = describe(
            source, **shared, **quantised, model_type=values.model_type, limit=limit
        )
        sys.stdout.write(text)
        if not ok:
            raise ValueError("this conversion would not succeed, see above")
        if values.target:
            check_target(target)
        return
    if from_checkpoint:
        to_directory(source, target, **shared, model_type=values.model_type)
        return
    with _Bar() as bar:
        to_checkpoint(source, target, **shared, **quantised, progress=bar)


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "Hugging Face directory or checkpoint", required=True)
    flags.DEFINE_string("target", "", "directory to make; --dry_run checks its place")
    flags.DEFINE_enum("dtype", "", ["", "float32", "bfloat16"], "of parameters; empty: as stored")
    flags.DEFINE_bool("keep_quantised", False, "keep FP8 and FP4 weights of layers as they are")
    flags.DEFINE_bool("dry_run", False, "print sizes, dtypes and problems; read headers only")
    flags.DEFINE_float("memory_gib", None, "with --dry_run: memory for the parameters")
    flags.DEFINE_string("model_type", "", "family to write; empty: the one it came from")

    def _call(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            main(flags.FLAGS)
        except ValueError as error:
            # Wrong input, not a fault of the program: the message says it all.
            raise SystemExit(f"{argv[0]}: {error}") from error

    app.run(_call)
