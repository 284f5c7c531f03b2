"""Safetensors files of a directory: what is in them, and reading and writing tensor by tensor.

Reads go through `pread` into memory that the caller owns, never through a map of the file: mapped
pages would count as this process's memory beside the weights.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class Reader:
    """Tensors of a directory by the name they have in it; nothing but headers is read before `into`
    or `tensor`."""

    def __init__(self, directory: str | pathlib.Path):
        self.directory = pathlib.Path(directory)
        self.files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}  # bytes of the file, from and to
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed else [SINGLE]:
            self._scan(file)
        lost = sorted(name for name, file in listed.items() if self.files.get(name) != file)
        if lost:
            raise ValueError(
                f"{self.directory / INDEX} lists tensors that their files do not hold: "
                f"{', '.join(lost)}; fetch the files again"
            )
        self._open: tuple[str, int] | None = None

    def _listed(self) -> dict[str, str]:
        index = self.directory / INDEX
        if not index.is_file():
            return {}
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged ({error!r}); fetch it again") from error

    def _scan(self, file: str) -> None:
        path = self.directory / file
        if not path.is_file():
            raise ValueError(f"{path} does not exist; fetch it or point to another directory")
        try:
            with safe_open(path, framework="numpy"):
                pass  # the header agrees with the length of the file
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged or incomplete ({error}); fetch it again"
            ) from error
        with open(path, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(size))
        header.pop("__metadata__", None)
        for name, about in header.items():
            if name in self.files:
                raise ValueError(f"{name} is in {self.files[name]} and in {file}; keep one")
            self.files[name] = file
            self.shapes[name] = tuple(about["shape"])
            self.dtypes[name] = about["dtype"]
            start, stop = about["data_offsets"]
            self._spans[name] = 8 + size + start, 8 + size + stop

    def nbytes(self, name: str) -> int:
        """Bytes of one tensor in its file."""
        start, stop = self._spans[name]
        return stop - start

    def into(self, name: str, out: np.ndarray, offset: int = 0) -> None:
        """Fills C-contiguous `out` with the tensor's bytes from `offset` on.

        Raises ValueError where the file ends first, or cannot be read.
        """
        if not out.flags.c_contiguous:
            raise ValueError(f"{name}: the array to fill must be C-contiguous")
        place = self._spans[name][0] + offset
        left = memoryview(out.reshape(-1).view(np.uint8))
        if offset + len(left) > self.nbytes(name):
            raise ValueError(f"{name} has {self.nbytes(name)} bytes, not {offset + len(left)}")
        try:
            while left:
                got = os.preadv(self._handle(self.files[name]), [left], place)
                if not got:
                    raise OSError("the file ended")
                left, place = left[got:], place + got
        except OSError as error:
            path = self.directory / self.files[name]
            raise ValueError(
                f"{path}: {name} could not be read ({error}); fetch the file again"
            ) from error

    def tensor(self, name: str) -> np.ndarray:
        """One whole tensor. Raises ValueError for a dtype that is not in DTYPES."""
        if self.dtypes[name] not in DTYPES:
            raise ValueError(f"{name} is {self.dtypes[name]}, not one of {tuple(DTYPES)}")
        out = np.empty(self.shapes[name], DTYPES[self.dtypes[name]])
        self.into(name, out)
        return out

    def _handle(self, file: str) -> int:
        """Neighbours are cheap: the last file stays open."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, os.open(self.directory / file, os.O_RDONLY)
        return self._open[1]

    def close(self) -> None:
        """Closes the file that is open, if any; the next read opens one again."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                os.close(self._open[1])
            self._open = None

    def __del__(self):
        if getattr(self, "_open", None) is not None:
            self.close()


def _plan(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into shards of at most `limit` bytes (or one tensor)."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def write(
    directory: pathlib.Path,
    sizes: Mapping[str, int],
    tensors: Callable[[Sequence[str]], Iterator[tuple[str, np.ndarray]]],
    limit: int,
) -> None:
    """Write tensors into files of at most `limit` bytes, and an index where there are several.

    Args:
        directory: existing directory; older weights in it are removed.
        sizes: bytes of every tensor by name, in the order of writing.
        tensors: yields the named tensors; called once per file, so one file is in memory.
        limit: bytes.
    """
    for old in [*directory.glob("model*.safetensors"), directory / INDEX]:
        old.unlink(missing_ok=True)
    shards, weight_map = _plan(sizes, limit), {}
    for i, names in enumerate(shards, 1):
        single = len(shards) == 1
        file = SINGLE if single else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        held = {name: np.ascontiguousarray(value) for name, value in tensors(names)}
        try:
            save_file(held, directory / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise OSError(f"{directory / file}: could not be written: {error}") from error
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=1)
        (directory / INDEX).write_text(text + "\n")


def bytes_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Size of a tensor."""
    return math.prod(shape) * np.dtype(dtype).itemsize
