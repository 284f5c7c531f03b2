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
# columns first. "flat" (axes of
# length 1 in the file, ours without) and "groups" (file [G * out, in], ours [G, in, out]) are in
# `Part`: they need its shape, or G.
FORMS: dict[str, tuple[Transform, Transform]] = {
    "same": (lambda x: x, lambda x: x),
    "swap": (_swap, _swap),
    "plus_one": (
        lambda x: np.float32(1) + x.astype(np.float32),
        lambda x: x.astype(np.float32) - np.float32(1),
    ),
    "woven": (_apart, _woven),
    "taps": (lambda x: x[..., 0, :].swapaxes(-1, -2), lambda x: _swap(x)[..., None, :]),
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
        if self.form == "flat":
            return tensor.reshape(-1)
        if self.form == "groups":
            return tensor.reshape(self.groups, -1, tensor.shape[-1]).swapaxes(-1, -2)
        return FORMS[self.form][0](tensor)

    def theirs(self, value: np.ndarray) -> np.ndarray:
        """To the file's form."""
        if self.form == "flat":
            return value.reshape(self.shape)
        if self.form == "groups":
            return value.swapaxes(-1, -2).reshape(self.shape)
        return FORMS[self.form][1](value)


Layout = tuple[Part, ...]


def part(name: str, form: str, shape: Sequence[int], *index: int | slice) -> Part:
    """The tensor that fills a piece of `shape` (ours) at `index`."""
    shape = tuple(shape)
    if form == "swap":
        return Part(name, (*shape[:-2], shape[-1], shape[-2]), index, form)
    if form == "taps":
        return Part(name, (shape[-1], 1, shape[-2]), index, form)
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


def experts(
    prefix: str, names: tuple[str, str, str], leaf: str, shape: Sequence[int], *index: int
) -> Iterator[Layout]:
    """Gate and up, or down, of all experts [E, in, out]: packed, or one by one as released."""
    yield (part(f"{prefix}{leaf}_proj", "swap", shape, *index),)
    yield tuple(
        piece
        for e in range(shape[0])
        for piece in gated(f"{prefix}{e}.", names, leaf, shape[1:], *index, e)
    )


Table = Mapping[str, tuple[str, str]]  # our path: name in the file, form


def listed(table: Table, prefix: str, path: str, shape: Sequence[int], *index: int) -> Layout:
    """The one tensor that a table of names has for a weight; ValueError where it has none."""
    if path not in table:
        raise ValueError(f"no tensor name is known for the weight {path}")
    name, form = table[path]
    return (part(prefix + name, form, shape, *index),)


# Names that most families share: the top of the model, and gate, up and down of an MLP.
TOP: Table = {
    "embed": ("model.embed_tokens.weight", "same"),
    "norm": ("model.norm.weight", "same"),
    "head": ("lm_head.weight", "swap"),
}
NAMES = ("gate_proj", "up_proj", "down_proj")


def feed_forward(
    prefix: str,
    path: str,
    shape: Sequence[int],
    *index: int,
    shared: str,
    each: tuple[str, str, str] = NAMES,
) -> Iterator[Layout]:
    """Gate and up, or down, of a dense MLP, of the shared experts, or of all experts.

    prefix: of the layer. shared: what the shared experts are called; each: names of one expert's.
    """
    where, _, leaf = path.rpartition("/")
    if len(shape) == 2:
        inner = "mlp." if where == "mlp" else f"mlp.{shared}."
        yield tuple(gated(prefix + inner, NAMES, leaf, shape, *index))
    else:
        yield from experts(f"{prefix}mlp.experts.", each, leaf, shape, *index)
