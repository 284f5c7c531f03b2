"""The files of a bundle: written whole or not at all, and read only if every byte is right."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

import numpy as np
import xxhash

from hetero_kv import tensors

FORMAT, VERSION = "hetero_kv bundle", 1
ABOUT, STATE = "bundle.json", "state.safetensors"
SERVED, RECOMPUTED = "logits/served", "logits/recomputed"  # f32[V] among the arrays


class DamagedBundleError(ValueError):
    """A bundle that is not as it was written, or none at all."""


def save(directory: pathlib.Path, about: dict, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Writes a bundle whole or not at all; its path."""
    data = tensors.dump(arrays)
    sums = {name: _sum(value) for name, value in arrays.items()}
    about = about | {"tensors": {"bytes": len(data), "checksums": sums}}
    about["checksum"] = _digest(about)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
    try:
        _put(scratch / STATE, data)
        _put(scratch / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
        final = directory / f"request-{about['request']['number']}-{about['checksum'][:12]}"
        os.rename(scratch, final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _sync(directory)
    return final


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle that was read: bundle.json, and the arrays by name."""

    about: dict
    arrays: dict[str, np.ndarray]

    def leaves(self) -> dict[str, np.ndarray]:
        """The restored state, by LeafSlot.path."""
        return {k: v for k, v in self.arrays.items() if k not in (SERVED, RECOMPUTED)}


def load(path: str | os.PathLike) -> Bundle:
    """Reads a bundle. Raises DamagedBundleError, which says what is wrong with it."""
    place = pathlib.Path(path)
    try:
        about = json.loads((place / ABOUT).read_bytes())
        data = (place / STATE).read_bytes()
    except OSError as error:
        raise DamagedBundleError(f"{place} is no bundle: {error}") from None
    except ValueError as error:
        raise DamagedBundleError(f"{place / ABOUT} is no JSON: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise DamagedBundleError(f"{place / ABOUT} is not of a {FORMAT}")
    if about.get("version") != VERSION:
        raise DamagedBundleError(
            f"{place} is a bundle of version {about.get('version')}, this program reads {VERSION}"
        )
    if about.pop("checksum", None) != _digest(about):
        raise DamagedBundleError(f"{place / ABOUT} is damaged: its checksum does not agree")
    wanted = about["tensors"]
    if len(data) != wanted["bytes"]:
        raise DamagedBundleError(
            f"{place / STATE} has {len(data)} bytes, and {wanted['bytes']} were written"
        )
    try:
        arrays = tensors.parse(data)
    except ValueError as error:
        raise DamagedBundleError(f"{place / STATE} is damaged: {error}") from None
    have = {name: _sum(value) for name, value in arrays.items()}
    if have != wanted["checksums"]:
        names = have.keys() ^ wanted["checksums"].keys()
        wrong = {x for x, total in have.items() if wanted["checksums"].get(x) != total}
        raise DamagedBundleError(f"{place / STATE} is damaged in {sorted(names | wrong)}")
    return Bundle(about, arrays)


def _digest(about: Mapping) -> str:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sum(value: np.ndarray) -> str:
    total = xxhash.xxh3_64(f"{value.dtype.name}{value.shape}".encode())
    total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return total.hexdigest()


def _put(path: pathlib.Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: pathlib.Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
