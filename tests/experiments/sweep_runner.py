"""A runner that takes no time, for tests of sweeps: it fails, waits or counts its runs if asked.

Also its own configuration file. It reads its flags by hand: what the runners share takes seconds to
import.
"""

import ast
import dataclasses
import json
import pathlib
import sys
import time


@dataclasses.dataclass
class Inner:
    """Nested fields."""

    m: int = 1
    types: tuple[str, ...] = ("a",)


@dataclasses.dataclass
class Config:
    """fail: runs that fail before one succeeds; -1: all."""

    inner: Inner = dataclasses.field(default_factory=Inner)
    scale: float = 1.0
    seed: int = 0
    fail: int = 0
    wait: float = 0.0
    log: str = ""
    workdir: str = ""


def get_config() -> Config:
    """The defaults."""
    return Config()


def main(config: Config) -> None:
    """Writes results that depend on the configuration alone, and a time."""
    workdir = pathlib.Path(config.workdir)
    runs = len(list(workdir.glob("run-*")))
    (workdir / f"run-{runs}").touch()
    if config.log:
        with open(config.log, "a") as log:
            log.write(f"{config.inner.m} {config.seed}\n")
    time.sleep(config.wait)
    if config.fail < 0 or runs < config.fail:
        raise SystemExit("asked to fail")
    loss = (config.inner.m * config.scale + config.seed) / 7
    results = {
        "config": {"workdir": config.workdir},
        "loss": loss,
        "seconds": time.time(),
        "deep": {"of": [len(config.inner.types), 2]},
    }
    (workdir / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    made = get_config()
    for argument in sys.argv[1:]:
        path, _, value = argument.partition("=")
        if path == "--config":
            continue
        holder, names = made, path.removeprefix("--config.").split(".")
        for name in names[:-1]:
            holder = getattr(holder, name)
        kind = type(getattr(holder, names[-1]))
        setattr(holder, names[-1], value if kind is str else ast.literal_eval(value))
    main(made)
