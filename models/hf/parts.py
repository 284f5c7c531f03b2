"""Tensors of files and their places in our weights: names, orientations, halves."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]


def _swap(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def _apart(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _woven(x: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


# From the file's form to ours and back. "swap": [out, in] in the file, ours [in, out]. "plus_one":
# the file has what a norm's factor exceeds 1 by. "woven": gate and up columns in turns, ours gate
# columns first. "groups" (file [G * out, in], ours [G, in, out]) is in `Part`: it needs G.
FORMS: dict[str, tuple[Transform, Transform]] = {
    "same": (lambda x: x, lambda x: x),
    "swap": (_swap, _swap),
    "plus_one": (
        lambda x: np.float32(1) + x.astype(np.float32),
        lambda x: x.astype(np.float32) - np.float32(1),
    ),
    "woven": (_apart, _woven),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a file and its place: `leaf[index]` is the tensor in our orientation."""

    name: str  # canonical
    shape: tuple[int, ...]  # in the file
    index: tuple[int | slice, ...]
    form: str
    groups: int = 1  # of the form "groups"

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """From the file's form."""
        if self.form == "groups":
            return tensor.reshape(self.groups, -1, tensor.shape[-1]).swapaxes(-1, -2)
        return FORMS[self.form][0](tensor)

    def theirs(self, value: np.ndarray) -> np.ndarray:
        """To the file's form."""
        if self.form == "groups":
            return value.swapaxes(-1, -2).reshape(self.shape)
        return FORMS[self.form][1](value)


Layout = tuple[Part, ...]


def part(name: str, form: str, shape: Sequence[int], *index: int | slice) -> Part:
    """The tensor that fills a piece of `shape` (ours) at `index`."""
    shape = tuple(shape)
    if form == "swap":
        return Part(name, (*shape[:-2], shape[-1], shape[-2]), index, form)
    if form == "groups":
        groups, wide, rank = shape
        return Part(name, (groups * rank, wide), index, form, groups)
    return Part(name, shape, index, form)


def gated(
    prefix: str, names: tuple[str, str, str], leaf: str, shape: Sequence[int], *index: int
) -> Iterator[Part]:
    """Gate and up beside each other, or down, of one feed-forward block (`leaf`: which of ours)."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    if leaf == "down":
        yield part(down, "swap", shape, *index)
        return
    width = shape[1] // 2
    yield part(gate, "swap", (shape[0], width), *index, slice(None), slice(0, width))
    yield part(up, "swap", (shape[0], width), *index, slice(None), slice(width, 2 * width))


Table = Mapping[str, tuple[str, str]]  # our path: name in the file, form


def listed(table: Table, prefix: str, path: str, shape: Sequence[int], *index: int) -> Layout:
    """The one tensor that a table of names has for a weight; ValueError where it has none."""
    if path not in table:
        raise ValueError(f"no tensor name is known for the weight {path}")
    name, form = table[path]
    return (part(prefix + name, form, shape, *index),)
