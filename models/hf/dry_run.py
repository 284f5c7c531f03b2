"""What loading a directory would do, as data and as text; of the weights only headers are read."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from models.hf.loading import Plan


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter."""

    path: str
    shape: tuple[int, ...]
    held: str  # dtype in memory, or the layout that it stays in
    files: tuple[str, ...]  # dtypes of its tensors
    nbytes: int  # in memory
    fits: bool  # beside those before it


@dataclasses.dataclass(frozen=True, eq=False)
class DryRun:
    """A plan, and its parameters one by one.

    limit: bytes of memory for parameters, None: no limit.
    """

    plan: Plan
    rows: tuple[Row, ...]
    limit: int | None

    @property
    def fits(self) -> bool:
        """Whether all parameters fit together."""
        return all(row.fits for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether loading would succeed, as far as headers tell."""
        return self.fits and not self.plan.problems

    def text(self) -> str:
        """A table, and what is wrong."""
        cells = [
            (row.path, f"{list(row.shape)}", row.held, "+".join(row.files), _size(row.nbytes),
             "" if row.fits else "does not fit")
            for row in self.rows
        ]  # fmt: skip
        lines = _table(("parameter", "shape", "in memory", "in files", "size", ""), cells)
        nbytes, read = self.plan.nbytes, self.plan.read_nbytes
        lines += ["", f"in memory {_size(nbytes)}, read from files {_size(read)}"]
        if self.limit is not None:
            over = nbytes - self.limit
            verdict = f"{_size(over)} too much" if over > 0 else f"{_size(-over)} to spare"
            lines.append(f"limit {_size(self.limit)}: {verdict}")
        lines += list(self.plan.problems) or ["every tensor is accounted for"]
        return "\n".join(line.rstrip() for line in lines) + "\n"


def dry_run(plan: Plan, limit: int | None = None) -> DryRun:
    """The parameters of a plan, and which of them do not fit into `limit` bytes with the others.

    Small ones are placed first, so that those that do not fit are as few as can be.
    """
    order = sorted(plan.sources, key=lambda source: source.nbytes)
    ends = np.cumsum([source.nbytes for source in order], dtype=np.int64)
    fits = {
        source.weight.path: limit is None or end <= limit
        for source, end in zip(order, ends.tolist(), strict=True)
    }
    rows = tuple(
        Row(
            "/".join(source.weight.path),
            source.weight.shape,
            source.weight.dtype.name if source.packed is None else source.packed.name,
            source.dtypes,
            source.nbytes,
            fits[source.weight.path],
        )
        for source in plan.sources
    )
    return DryRun(plan, rows, limit)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    rows = [head, ["-" * width for width in widths], *cells]
    return ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
