"""What every run leaves behind: its configuration, versions, seed and results."""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping

import jax

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def platform_info() -> dict[str, object]:
    """The machine as far as results depend on it."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpus": _cpus(),
    }


def _cpus() -> int | None:
    """Cores this process may use, which a pinned run has fewer of than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def commit() -> str:
    """The checked-out commit of this source tree, "" outside a repository."""
    here = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def digest(values: Mapping) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(workdir: str | os.PathLike, config: Mapping, *, seed: int, **extra: object) -> None:
    """Writes `config.json` and `run.json`.

    Args:
      extra: Further facts of the run, such as the digest of its corpus.
    """
    directory = pathlib.Path(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    record = {
        "seed": seed,
        "config_digest": digest(config),
        "commit": commit(),
        "versions": versions(),
        "platform": platform_info(),
        **extra,
    }
    write_json(directory / "run.json", record)


def write_results(workdir: str | os.PathLike, results: Mapping) -> None:
    """Writes `results.json`."""
    write_json(pathlib.Path(workdir) / "results.json", results)


def read_json(path: str | os.PathLike) -> dict | None:
    """The content of a JSON file, None if there is none."""
    try:
        return json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        return None


def write_json(path: pathlib.Path, values: Mapping) -> None:
    """Writes a JSON file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    os.replace(temporary, path)
