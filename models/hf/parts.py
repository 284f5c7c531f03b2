"""Tensors of files and their places in our weights: names, orientations, halves."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from models.forms import Form


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a file and its place: `leaf[index]` is the tensor in our orientation."""

    name: str  # canonical
    shape: tuple[int, ...]  # in the file
    index: tuple[int | slice, ...]
    form: Form

    @property
    def place(self) -> tuple[tuple[int, ...], int]:
        """Layer and expert (those that `index` picks), and the first column of ours."""
        picked = tuple(i for i in self.index if not isinstance(i, slice))
        last = self.index[-1] if self.index else None
        return picked, (last.start or 0) if isinstance(last, slice) else 0

    def theirs(self, value: np.ndarray) -> np.ndarray:
        """The file's tensor for a piece of our weight."""
        return self.form.values_out(self.form.view(value)).reshape(self.shape)


Layout = tuple[Part, ...]


def part(name: str, form: str, shape: Sequence[int], *index: int | slice) -> Part:
    """The tensor that fills a piece of `shape` (ours) at `index`."""
    how = Form(form, shape[0]) if form == "groups" else Form(form)
    return Part(name, how.file_shape(shape), index, how)


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
