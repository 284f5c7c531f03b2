"""From the files of a directory to parameters: planned from headers alone, then read.

Every weight is read in pieces into the memory that it stays in. On a CPU the parameters are that
memory; for other devices one weight at a time is on the host.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from hetero_kv.params import Params
from models.decoder import Decoder
from models.hf import filling, shards
from models.hf.parts import Part
from models.hf.stored import Stored
from models.hf.weights import Weight, lead, pieces, put
from models.quantised.blocks import Blocks
from models.quantised.leaf import Meaning, Packed

FLOATS = ("F32", "BF16", "F16")
INTEGERS = ("I64", "I32")


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far reading has come, after every tensor."""

    tensor: str  # the last one, by its name in the file
    file: str
    tensors: int
    all_tensors: int
    nbytes: int  # of the files
    all_nbytes: int


Report = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A weight of the model and what it is made of."""

    weight: Weight
    parts: tuple[Part, ...]
    packed: Blocks | None  # kept in this layout
    dtypes: tuple[str, ...]  # of its tensors in the files

    @property
    def nbytes(self) -> int:
        """Of the parameter in memory."""
        if self.packed is None:
            return math.prod(self.weight.shape) * self.weight.dtype.itemsize
        count = 0
        for part in self.parts:
            count += math.prod(self.packed.code_shape(part.shape))
            scales = math.prod(self.packed.scale_shape(part.shape))
            count += scales * self.packed.scale_dtype.itemsize
        return count


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What loading a directory will do. Nothing but headers has been read.

    problems: everything for which it would be refused, by tensor.
    """

    model: Decoder
    reader: shards.Reader
    stored: Mapping[str, Stored]  # by canonical name
    sources: tuple[Source, ...]
    missing: tuple[str, ...]  # canonical names
    extra: tuple[str, ...]  # names in the files
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Of all parameters in memory."""
        return sum(source.nbytes for source in self.sources)

    @property
    def read_nbytes(self) -> int:
        """Of all tensors that are read."""
        return sum(self.reader.nbytes(name) for name in self._tensors())

    def _tensors(self) -> Iterator[str]:
        for source in self.sources:
            for part in source.parts:
                if part.name in self.stored:
                    yield from self.stored[part.name].tensors

    def check(self) -> None:
        """Raises ValueError with all problems."""
        if self.problems:
            raise ValueError(f"{self.reader.directory}: " + ". ".join(self.problems))

    def read(self, report: Report | None = None) -> Params:
        """The parameters. Raises ValueError for every problem, and where a file cannot be read."""
        self.check()
        count, total = sum(1 for _ in self._tensors()), self.read_nbytes
        params: Params = {}
        done = size = 0
        for source in self.sources:
            make = _Plain(source, self) if source.packed is None else _Kept(source, self)
            for part in source.parts:
                stored = self.stored[part.name]
                make.add(part, stored)
                for name in stored.tensors:
                    done, size = done + 1, size + self.reader.nbytes(name)
                    if report is not None:
                        file = self.reader.files[name]
                        report(Progress(name, file, done, count, size, total))
            put(params, source.weight.path, make.result())
        self.reader.close()
        return params


class _Plain:
    """A weight in its own dtype."""

    def __init__(self, source: Source, plan: Plan):
        self.weight, self.plan = source.weight, plan
        self.value = filling.aligned(self.weight.shape, self.weight.dtype)

    def add(self, part: Part, stored: Stored) -> None:
        """Reads one part."""
        ours = self.value[part.index]
        filling.fill(self.plan.reader, stored, part.form, ours)
        if self.weight.path[-1] == "table":
            check_table(stored.name, ours, self.plan.model.config.n_experts)

    def result(self) -> jax.Array:
        """The array; it has the memory that was filled where that is possible."""
        return jax.device_put(self.value)


class _Kept:
    """A weight in the layout of its files."""

    def __init__(self, source: Source, plan: Plan):
        self.weight, self.reader, self.blocks = source.weight, plan.reader, source.packed
        self.form, self.codes, self.scales = source.parts[0].form, {}, {}
        for start, part in pieces(source.parts).items():
            ahead = lead(self.weight.shape, part)
            self.apart = len(ahead)
            shape = self.blocks.code_shape(part.shape)
            self.codes[start] = filling.aligned((*ahead, *shape), np.dtype(np.uint8))
            shape = self.blocks.scale_shape(part.shape)
            self.scales[start] = filling.aligned((*ahead, *shape), self.blocks.scale_dtype)

    def add(self, part: Part, stored: Stored) -> None:
        """Reads one part."""
        at, start = part.place
        self.reader.into(stored.name, self.codes[start][at])
        scales = self.scales[start][at]
        scales[...] = filling.scales_of(self.reader, stored).reshape(scales.shape)

    def result(self) -> Packed:
        """The leaf."""
        meaning = Meaning(self.blocks, self.form, self.weight.dtype.name, self.apart)
        return Packed(
            meaning,
            tuple(jax.device_put(self.codes[start]) for start in sorted(self.codes)),
            tuple(jax.device_put(self.scales[start]) for start in sorted(self.scales)),
        )


def plan(
    model: Decoder,
    reader: shards.Reader,
    stored: Mapping[str, Stored],
    weights: Sequence[Weight],
    problems: Sequence[str],
    keep_quantised: bool,
) -> Plan:
    """How the weights of a model are made of what the files have.

    Args:
        stored: by canonical name, without what is left out.
        problems: what is known to be wrong with the files.
        keep_quantised: weights of layers whose tensors all have one quantised layout stay in it.
    """
    sources = []
    for weight in weights:
        parts = _choose(weight, stored)
        have = [stored[part.name] for part in parts if part.name in stored]
        layouts = {x.blocks for x in have}
        same = len(have) == len(parts) and len(layouts) == 1
        keep = keep_quantised and same and weight.path[0] == "segments"
        dtypes = {reader.dtypes[x.name] for x in have}
        sources.append(
            Source(weight, parts, next(iter(layouts)) if keep else None, tuple(sorted(dtypes)))
        )
    wrong = _compare(reader, stored, sources)
    used = {part.name for source in sources for part in source.parts}
    missing = tuple(sorted(used - set(stored)))
    extra = tuple(sorted(x.name for known, x in stored.items() if known not in used))
    found = []
    if missing:
        found.append(
            f"missing tensors: {', '.join(missing)} (fetch all files, or make config.json match)"
        )
    if extra:
        found.append(
            f"tensors that this model has no place for: {', '.join(extra)} (remove them, or make "
            "config.json match)"
        )
    if problems:
        found.append("quantised tensors that are not understood: " + "; ".join(problems))
    return Plan(model, reader, stored, tuple(sources), missing, extra, (*found, *wrong))


def _choose(weight: Weight, stored: Mapping[str, Stored]) -> tuple[Part, ...]:
    """The parts of every layer, in the layout that the files have (else the first, to report)."""
    parts: list[Part] = []
    for choices in weight.choices:
        present = [c for c in choices if any(part.name in stored for part in c)]
        parts += (present or choices)[0]
    return tuple(parts)


def _compare(
    reader: shards.Reader, stored: Mapping[str, Stored], sources: Sequence[Source]
) -> list[str]:
    """Sentences that name every tensor of a wrong shape or dtype."""
    shapes, dtypes = [], []
    for source in sources:
        kinds = INTEGERS if np.issubdtype(source.weight.dtype, np.integer) else FLOATS
        for part in source.parts:
            if part.name not in stored:
                continue
            have = stored[part.name]
            if have.shape != part.shape:
                shapes.append(f"{have.name} is {list(have.shape)}, not {list(part.shape)}")
            plain = have.blocks is None or kinds == INTEGERS
            if plain and reader.dtypes[have.name] not in kinds:
                dtypes.append(f"{have.name} is {reader.dtypes[have.name]}, not one of {kinds}")
    out = []
    if shapes:
        out.append(f"wrong shapes: {'; '.join(shapes)} (make config.json match)")
    if dtypes:
        out.append(
            f"wrong dtypes: {'; '.join(dtypes)} (convert quantised weights of other layouts than "
            "block-scaled FP8 and FP4 to bfloat16 first)"
        )
    return out


def check_table(name: str, table: np.ndarray, experts: int) -> None:
    """Raises ValueError unless a hash layer's table names experts that exist."""
    if table.min() < 0 or table.max() >= experts:
        raise ValueError(
            f"{name} names experts {table.min()}..{table.max()} of {experts}; the file is damaged "
            "or n_routed_experts is wrong"
        )
