"""Command line of the experiments: `--config=file.py --config.a.b=value`.

The only module besides the mains that touches absl, and nothing here runs at import.
"""

import ast
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import rich.console
import rich.table
from absl import app
from ml_collections import config_flags

from experiments import config_tools, host_memory


def run(main: Callable[[object], object], default: str) -> None:
    """Parses the flags and calls `main` with the configuration.

    Args:
      default: The configuration file that is read when `--config` is not given.
    """
    program = sys.argv[0]
    host_memory.keep_freed_buffers()
    try:
        arguments = prepare(sys.argv, default)
    except ValueError as error:
        raise SystemExit(f"{program}: {error}") from None
    holder = config_flags.DEFINE_config_file(
        "config", default, "configuration file; --config.a.b=value overrides a field of it"
    )

    def call(argv: Sequence[str]) -> None:
        # Which backends JAX did not find is told at level INFO, which absl shows.
        logging.getLogger("jax").setLevel(logging.WARNING)
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            main(holder.value)
        except (ValueError, FloatingPointError) as error:
            # Wrong input or a diverged run, not a fault of the program: the message says it all.
            raise SystemExit(f"{program}: {error}") from error

    app.run(call, argv=arguments)


class Shown(Protocol):
    """A table that a terminal can show."""

    def rich(self) -> rich.table.Table:
        """As rich draws it."""


def show(tables: Iterable[Shown], workdir: str, width: int | None = 140) -> None:
    """Prints tables, and where the results are.

    width: in characters, where there is no terminal. None: as rich has it.
    """
    console = rich.console.Console()
    if width is not None and not console.is_terminal:
        console.width = width
    for table in tables:
        console.print(table.rich())
    console.print(f"results.json and report.md are in {workdir}", markup=False)


def prepare(argv: Sequence[str], default: str) -> list[str]:
    """Checks the overrides in `argv` before config_flags does, whose errors name no near match.

    Returns:
      The arguments, with `--config.x=a,b` for a tuple field written as a literal.

    Raises:
      ValueError: There is no such file or field.
    """
    path = default
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if match := re.fullmatch(r"--?config(?:=(.*))?", argument, re.DOTALL):
            path = following if match[1] is None else match[1]
    if not pathlib.Path(path.split(":", 1)[0]).is_file():
        raise ValueError(f"--config={path}: no such file")
    config = config_tools.load(path)
    return [_checked(argument, config) for argument in argv]


def _checked(argument: str, config: object) -> str:
    match = re.fullmatch(r"--?(?:no)?config\.([^=]+)(?:=(.*))?", argument, re.DOTALL)
    if not match:
        return argument
    path, value = match.groups()
    is_tuple = isinstance(config_tools.get(config, path), tuple)
    if not is_tuple or value is None or "," not in value or value.startswith("("):
        return argument
    return f"--config.{path}={tuple(literal(item) for item in value.split(',') if item)}"


def literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
