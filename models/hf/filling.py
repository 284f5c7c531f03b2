"""Fills pieces of weights from files, a few megabytes at a time."""

import math
from collections.abc import Iterator

import numpy as np

from models.forms import Form
from models.hf import shards
from models.hf.stored import Stored

CHUNK = 4 << 20  # bytes of a file, at least one row of a tensor
ALIGNMENT = 64  # bytes; what is aligned so becomes an array on the CPU without a copy


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that begins on a multiple of ALIGNMENT."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def fill(reader: shards.Reader, stored: Stored, form: Form, ours: np.ndarray) -> None:
    """Writes one weight of the files to `ours`, a view into one of our weights, in its dtype.

    Raises ValueError, naming the tensor, for integers that the dtype cannot hold.
    """
    view = form.view(ours)
    columns = stored.shape[-1] if stored.shape else 1
    if stored.blocks is None:
        dtype = shards.DTYPES[reader.dtypes[stored.name]]
        step = max(CHUNK // dtype.itemsize, columns)
        for piece, start in _pieces(view, step):
            if piece.flags.c_contiguous and piece.dtype == dtype and form.name != "plus_one":
                reader.into(stored.name, piece, start * dtype.itemsize)
                continue
            part = np.empty(piece.shape, dtype)
            reader.into(stored.name, part, start * dtype.itemsize)
            check_fits(stored.name, part, piece.dtype)
            np.copyto(piece, form.values_in(part), casting="unsafe")
        return
    scales = scales_of(reader, stored)
    rows = stored.shape[-2]
    each = stored.blocks.code_shape((columns,))[0]
    for piece, start in _pieces(view, max(CHUNK // 4, columns)):
        done = []
        first, last = start // columns, (start + piece.size) // columns
        while first < last:  # a piece may hold rows of several matrices
            matrix, row = divmod(first, rows)
            count = min(last - first, rows - row)
            codes = np.empty((count, each), np.uint8)
            reader.into(stored.name, codes, first * each)
            done.append(stored.blocks.rows(codes, scales[matrix], row))
            first += count
        part = np.concatenate(done).reshape(piece.shape)
        np.copyto(piece, form.values_in(part), casting="unsafe")


def check_fits(name: str, values: np.ndarray, dtype: np.dtype) -> None:
    """Raises ValueError for integers outside `dtype`, where both are integers: a cast wraps."""
    if not (np.issubdtype(values.dtype, np.integer) and np.issubdtype(dtype, np.integer)):
        return
    bounds = np.iinfo(dtype)
    for value in (values.min(initial=0), values.max(initial=0)):
        if not bounds.min <= int(value) <= bounds.max:
            raise ValueError(
                f"{name} has the value {value}, which {np.dtype(dtype).name} cannot hold "
                f"({bounds.min}..{bounds.max}); the file is damaged"
            )


def scales_of(reader: shards.Reader, stored: Stored) -> np.ndarray:
    """The scales of a weight: [matrices, rows, columns] of blocks, in their dtype in memory."""
    scales = reader.tensor(stored.scales)
    flat = scales.reshape(-1, *scales.shape[-2:])
    if stored.blocks.scale == "e8m0":
        return flat.view(np.uint8)
    return flat.astype(np.float32)


def _pieces(view: np.ndarray, step: int, start: int = 0) -> Iterator[tuple[np.ndarray, int]]:
    """Views of consecutive elements, at most `step` each, and where they begin.

    A row of the file's tensor is not cut: it has at most `step` elements, and is one index of all
    axes but the last (or the last two).
    """
    if view.size <= step:
        yield view, start
        return
    inner = view.size // len(view)
    if inner > step:
        for i, part in enumerate(view):
            yield from _pieces(part, step, start + i * inner)
        return
    count = step // inner
    for first in range(0, len(view), count):
        yield view[first : first + count], start + first * inner
