"""Safetensors files of a directory: what is in them, and reading and writing tensor by tensor."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}


class Reader:
    """Tensors of a directory by the name they have in it; nothing is read before `tensor`."""

    def __init__(self, directory: str | pathlib.Path):
        self.directory = pathlib.Path(directory)
        self.files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed else [SINGLE]:
            self._scan(file)
        lost = sorted(name for name, file in listed.items() if self.files.get(name) != file)
        if lost:
            raise ValueError(
                f"{self.directory / INDEX} lists tensors that their files do not hold: "
                f"{', '.join(lost)}; fetch the files again"
            )
        self._open: tuple[str, object] | None = None

    def _listed(self) -> dict[str, str]:
        index = self.directory / INDEX
        return json.loads(index.read_text())["weight_map"] if index.is_file() else {}

    def _scan(self, file: str) -> None:
        path = self.directory / file
        if not path.is_file():
            raise ValueError(f"{path} does not exist; fetch it or point to another directory")
        try:
            opened = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged or incomplete ({error}); fetch it again"
            ) from error
        with opened as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in self.files:
                    raise ValueError(f"{name} is in {self.files[name]} and in {file}; keep one")
                piece = handle.get_slice(name)
                self.files[name] = file
                self.shapes[name] = tuple(piece.get_shape())
                self.dtypes[name] = piece.get_dtype()

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, read now. Neighbours are cheap: the last file stays open."""
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            self._open = file, safe_open(self.directory / file, framework="numpy")
        return self._open[1].get_tensor(name)


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
        save_file(held, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=1)
        (directory / INDEX).write_text(text + "\n")


def bytes_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Size of a tensor."""
    return math.prod(shape) * np.dtype(dtype).itemsize
