"""The cells of a sweep: from grids to configurations, each named by its digest."""

import dataclasses
import difflib
import importlib.util
import itertools
import pathlib
import pkgutil
from collections.abc import Mapping, Sequence

from experiments import cli, config_tools, run_record

MODES = ("product", "zip", "list")


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """changes: fields by dotted path, the seed's included. digest: of the whole configuration."""

    changes: Mapping[str, object]
    seed: int
    digest: str


def check_runner(runner: str) -> None:
    """Raises ValueError where there is no such module to run; it names near ones."""
    parent = runner.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(runner)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{runner}.__main__")
    except (ModuleNotFoundError, ValueError):  # of a parent that is none, of no name at all
        found = None
    if found is not None:
        return
    places = getattr(importlib.util.find_spec("experiments"), "submodule_search_locations", [])
    names = [f"experiments.{x.name}" for x in pkgutil.iter_modules(places)]
    near = difflib.get_close_matches(runner if parent else f"experiments.{runner}", names)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else "it is a name such as experiments.train"
    )
    raise ValueError(f"runner={runner!r}: there is no such module to run; {hint}")


def axis(text: str) -> tuple[str, list[object]]:
    """`model.m=2,4,8` as a path and its values; commas within parentheses belong to a value.

    Raises:
        ValueError: there is no `=`, or no value.
    """
    path, equals, values = text.partition("=")
    found, depth, start = [], 0, 0
    for place, sign in enumerate(values + ","):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            found.append(values[start:place].strip())
            start = place + 1
    if not (equals and path.strip() and all(found)):
        raise ValueError(f"a grid is path=value,value,…, got {text!r}")
    return path.strip(), [_value(x) for x in found]


def _value(text: str) -> object:
    if text.startswith("(") and text.endswith(")"):
        return tuple(_value(x.strip()) for x in text[1:-1].split(",") if x.strip())
    return {"true": True, "false": False}.get(text, cli.literal(text))


def combine(grids: Sequence[str], mode: str) -> list[dict[str, object]]:
    """Changes of every cell but the seed.

    product: every combination. zip: values of the same place together. list: each grid is one cell,
    `path=value path=value`.

    Raises:
        ValueError: a grid makes no sense, or the axes of a zip differ in length.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {MODES}")
    if mode == "list":
        cells = []
        for text in grids:
            items = [axis(x) for x in text.split()]
            if any(len(values) != 1 for _, values in items):
                raise ValueError(f"a cell of a list has one value a path, got {text!r}")
            cells.append({path: values[0] for path, values in items})
        return cells or [{}]
    axes = [axis(x) for x in grids]
    paths = [path for path, _ in axes]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a path stands in two grids: {paths}")
    lengths = {len(values) for _, values in axes}
    if mode == "zip" and len(lengths) > 1:
        raise ValueError(f"a zip needs axes of one length, got {sorted(lengths)}")
    join = itertools.product if mode == "product" else zip
    rows = join(*(values for _, values in axes)) if axes else [()]
    return [dict(zip(paths, row, strict=True)) for row in rows]


def cells(
    runner: str,
    config_file: str,
    fixed: Sequence[str],
    grids: Sequence[str],
    mode: str,
    seeds: int,
    seed_field: str,
) -> list[Cell]:
    """Every cell, in order; the seeds 0 .. seeds - 1 of one after the other.

    fixed: `path=value` of all cells. seed_field: the field that takes the seed.

    Raises:
        ValueError: a field does not exist, or two cells are the same.
    """
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    if not pathlib.Path(config_file.split(":", 1)[0]).is_file():
        raise ValueError(f"config={config_file}: no such file")
    common = combine([" ".join(fixed)] if fixed else [], "list")[0]
    found: dict[str, Cell] = {}
    for changes in combine(grids, mode):
        for seed in range(seeds):
            chosen = {**common, **changes}
            if seed_field in chosen or "workdir" in chosen:
                raise ValueError(f"{seed_field} and workdir are the sweep's own: {sorted(chosen)}")
            chosen[seed_field] = seed
            config = config_tools.load(config_file)
            chosen = {path: _fitting(config, path, value) for path, value in chosen.items()}
            values = config_tools.to_dict(config_tools.override(config, chosen))
            values.pop("workdir", None)
            digest = run_record.digest({"runner": runner, "config": values})[:16]
            if digest in found:
                raise ValueError(f"two cells are the same: {chosen}")
            found[digest] = Cell(chosen, seed, digest)
    return list(found.values())


def _fitting(config: object, path: str, value: object) -> object:
    """A single value for a field of several is one of them; a whole number may be a real one."""
    try:
        present = config_tools.get(config, path)
    except config_tools.UnknownFieldError as error:
        raise ValueError(str(error)) from None
    if isinstance(present, tuple) and not isinstance(value, tuple):
        return (value,)
    if isinstance(present, float) and isinstance(value, int):
        return float(value)
    if isinstance(present, str) and not isinstance(value, str):
        return str(value)
    return value


def arguments(cell: Cell, config_file: str, workdir: str) -> list[str]:
    """What the runner is called with."""
    flags = [f"--config.{path}={_text(value)}" for path, value in cell.changes.items()]
    return [f"--config={config_file}", *flags, f"--config.workdir={workdir}"]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
