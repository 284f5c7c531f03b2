"""How a tensor of a file lies in a weight of ours: the same numbers with axes in another order.

A form first splits axes of the file's tensor, then permutes them, then joins some. Split and
permuted alone, a piece of our weight can be seen as the file's tensor without a copy.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Maps:
    split: Callable[[Shape, int], Shape]
    ours: Callable[[Array], Array]  # from the split tensor
    theirs: Callable[[Array], Array]  # to the split tensor: a view of a numpy array


def _same(x: Array) -> Array:
    return x


def _swap(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _whole(shape: Shape, groups: int) -> Shape:
    return shape


def _apart(x: Array) -> Array:
    return _swap(x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2))


def _rows_apart(x: Array) -> Array:
    x = _swap(x)
    return x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1]).swapaxes(-2, -3)


def _rows_together(x: Array) -> Array:
    *lead, half, two, columns = x.shape
    return _swap(x.swapaxes(-2, -3).reshape(*lead, half * two, columns))


FORMS = {
    "same": _Maps(_whole, _same, _same),
    "swap": _Maps(_whole, _swap, _swap),
    "plus_one": _Maps(_whole, _same, _same),
    "flat": _Maps(lambda shape, groups: (math.prod(shape),), _same, _same),
    "taps": _Maps(lambda shape, groups: (shape[0], shape[-1]), _swap, _swap),
    "groups": _Maps(
        lambda shape, groups: (*shape[:-2], groups, shape[-2] // groups, shape[-1]), _swap, _swap
    ),
    "woven": _Maps(
        lambda shape, groups: (*shape[:-1], shape[-1] // 2, 2),
        lambda x: _swap(x).reshape(*x.shape[:-2], -1),
        _apart,
    ),
    "woven_rows": _Maps(
        lambda shape, groups: (*shape[:-2], shape[-2] // 2, 2, shape[-1]),
        _rows_together,
        _rows_apart,
    ),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One of these, by name.

    same: as it is. swap: [out, in] in the file, ours [in, out]. plus_one: the file has what a
    norm's factor exceeds 1 by. flat: axes of length 1 in the file, ours without. taps: [c, 1, k],
    ours [k, c]. groups: [groups * out, in], ours [groups, in, out]. woven: gate and up columns in
    turns, ours gate columns first; woven_rows: the same with the file's rows, then swapped. All but
    the third to fifth take leading axes.
    """

    name: str
    groups: int = 1

    def __post_init__(self):
        if self.name not in FORMS:
            raise ValueError(f"unknown form {self.name!r}; use one of {tuple(FORMS)}")

    def split(self, shape: Shape) -> Shape:
        """The file's shape with axes split."""
        return FORMS[self.name].split(tuple(shape), self.groups)

    def view(self, ours: np.ndarray) -> np.ndarray:
        """A piece of our weight as the file's split tensor; what is written to it is in ours."""
        return FORMS[self.name].theirs(ours)

    def ours(self, tensor: Array) -> Array:
        """The file's tensor in our order; its values are not changed."""
        return FORMS[self.name].ours(tensor.reshape(self.split(tensor.shape)))

    def file_shape(self, shape: Shape) -> Shape:
        """Of the tensor in a file, for a piece of our weight (with axes of length 1: see taps)."""
        shape = tuple(shape)
        if self.name in ("swap", "woven_rows"):
            return (*shape[:-2], shape[-1], shape[-2])
        if self.name == "taps":
            return (shape[-1], 1, shape[-2])
        if self.name == "groups":
            groups, wide, rank = shape
            return (groups * rank, wide)
        return shape

    def values_in(self, values: np.ndarray) -> np.ndarray:
        """Our values for the file's."""
        if self.name == "plus_one":
            return np.float32(1) + values.astype(np.float32)
        return values

    def values_out(self, values: np.ndarray) -> np.ndarray:
        """The file's values for ours."""
        if self.name == "plus_one":
            return values.astype(np.float32) - np.float32(1)
        return values
