"""Tile sizes of kernels: a heuristic, improved by a table of what was measured per kind of device.

Every op has a frozen dataclass of tile sizes. An explicit one always wins; else the op's heuristic
is changed by the table's entry for this device kind, op and bucket of shapes, if there is one. The
table is `tuning_table.json` beside this file, written by `experiments/tune.py`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

PATH = pathlib.Path(__file__).with_name("tuning_table.json")
VERSION = 1
_BACKENDS = {"tpu": "tpu", "cuda": "gpu"}  # lowering platform -> name of JAX's backend

Tiles = TypeVar("Tiles")
Table = dict[str, dict[str, dict[str, dict[str, int]]]]  # device kind, op, bucket, field


def bucket(**sizes: int | str) -> str:
    """A key of shapes: sizes by name, each int rounded up to a power of two."""
    rounded = {k: v if isinstance(v, str) else 1 << (v - 1).bit_length() for k, v in sizes.items()}
    return ",".join(f"{k}={v}" for k, v in sorted(rounded.items()))


def device_kind(platform: str) -> str | None:
    """The kind of device that a lowering for "tpu" or "cuda" is meant for, if it is known.

    That of the abstract device in the context, else of the devices at hand where they are of that
    platform. A CPU host that lowers for another platform knows none: the heuristic decides.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and getattr(device, "platform", platform) == platform:
        return device.device_kind
    if jax.default_backend() == _BACKENDS.get(platform):
        return jax.devices()[0].device_kind
    return None


def pick(op: str, platform: str, key: str, heuristic: Tiles, table: Table | None = None) -> Tiles:
    """The heuristic's tile sizes with what the table says about them.

    Args:
        op: for instance "indexer/pallas_tpu".
        key: see `bucket`.
        table: default the one in the package.
    """
    table = load() if table is None else table
    fields = table.get(device_kind(platform) or "", {}).get(op, {}).get(key, {})
    return dataclasses.replace(heuristic, **fields) if fields else heuristic


@functools.cache
def load(path: pathlib.Path = PATH) -> Table:
    """The table. Raises ValueError for a file of another version or form."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("version") != VERSION or "devices" not in data:
        raise ValueError(
            f"{path}: not a tuning table of version {VERSION}; run experiments/tune.py"
        )
    return data["devices"]


def note(table: Table, kind: str, op: str, key: str, tiles: Any) -> Table:
    """A copy of the table in which the tile sizes of one bucket are set."""
    new = json.loads(json.dumps(table))
    new.setdefault(kind, {}).setdefault(op, {})[key] = dataclasses.asdict(tiles)
    return new


def save(table: Mapping, path: pathlib.Path = PATH) -> None:
    """Writes a table in the form that `load` reads."""
    text = json.dumps({"version": VERSION, "devices": table}, indent=2, sort_keys=True)
    path.write_text(text + "\n")
    load.cache_clear()
