"""Metrics of an experiment: JSONL and CSV always, TensorBoard if asked for.

Rows hold what the run computed and no clock times, so a run that was killed and resumed leaves
byte for byte the files of one that was not.
"""

import csv
import json
import os
import pathlib
from collections.abc import Mapping


class MetricsWriter:
    """Appends rows of scalars to `metrics.jsonl` and `metrics.csv` of a directory."""

    def __init__(
        self, workdir: str | os.PathLike, *, resume_step: int = 0, tensorboard: bool = False
    ):
        """Opens the files.

        Args:
          resume_step: Rows of later steps, and a row torn by a kill, are dropped: the run will
            write them again.
          tensorboard: Also write event files; needs `tensorboardX`.
        """
        directory = pathlib.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        self._jsonl_path = directory / "metrics.jsonl"
        self._csv_path = directory / "metrics.csv"
        self.rows = [row for row in read(self._jsonl_path) if row["step"] <= resume_step]
        self._columns: list[str] = ["step"]
        self._rewrite(self._jsonl_path, "".join(map(_line, self.rows)))
        self._jsonl = self._jsonl_path.open("a")
        self._grow([name for row in self.rows for name in row])
        self._rewrite_csv()
        self._events = None
        if tensorboard:
            import tensorboardX  # an extra

            # Events after the resumed step are marked as purged, for TensorBoard drops no lines.
            self._events = tensorboardX.SummaryWriter(
                str(directory / "tensorboard"), purge_step=resume_step + 1
            )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds a row; floats keep all their digits."""
        row = {"step": step, **{name: float(value) for name, value in scalars.items()}}
        self.rows.append(row)
        self._jsonl.write(_line(row))
        if self._grow(row):
            self._rewrite_csv()
        else:
            csv.writer(self._csv, lineterminator="\n").writerow(self._cells(row))
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, float(value), step)

    def flush(self) -> None:
        """Returns when every row written so far is on disk."""
        for file in (self._jsonl, self._csv):
            file.flush()
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self.flush()
        self._jsonl.close()
        self._csv.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cells(self, row: Mapping[str, float]) -> list:
        return [row.get(column, "") for column in self._columns]

    def _grow(self, names) -> bool:
        new = [name for name in dict.fromkeys(names) if name not in self._columns]
        self._columns += new
        return bool(new)

    def _rewrite_csv(self) -> None:
        # A new column changes every line. It happens a few times in a run, at its beginning.
        if hasattr(self, "_csv"):
            self._csv.close()
        lines = [self._columns, *map(self._cells, self.rows)]
        self._rewrite(self._csv_path, "".join(",".join(map(str, line)) + "\n" for line in lines))
        self._csv = self._csv_path.open("a", newline="")

    @staticmethod
    def _rewrite(path: pathlib.Path, text: str) -> None:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text)
        os.replace(temporary, path)


def read(path: str | os.PathLike) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, none if there is no file; stops at a torn line."""
    rows = []
    try:
        lines = pathlib.Path(path).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return rows
    for line in lines:
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(row) + "\n"
