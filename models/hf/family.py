"""What a family of models needs to be read and written, one tensor at a time.

Every weight of the model must be found once and in its shape, and every tensor of the files must
be used, except those that the family leaves out.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.params import Params
from models.config import DecoderConfig
from models.decoder import Decoder
from models.hf import shards
from models.hf.parts import Layout, Part

SHARD_BYTES = 4 << 30
FLOATS = ("F32", "BF16", "F16")
INTEGERS = ("I64", "I32")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf of the parameter tree and the tensors that fill it, layer by layer."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    choices: tuple[tuple[Layout, ...], ...]  # per layer: the ways in which files hold it


Layouts = Callable[..., Iterator[Layout]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    parse, write: a `config.json` to our configuration and back; ValueError for what the other side
        has no place for.
    layouts: `(config, path, shape, layer, *index)` to the ways in which files hold one weight; the
        first is the one that is written. path: of the weight below its layer, or at the top (layer
        None); shape: in one layer; index: of the layer in the stacked leaf.
    canonical: the name that `layouts` knows a tensor of a file by.
    left_out: whether a tensor (by canonical name) is of a part that this model does not have.
    """

    parse: Callable[[Mapping[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    layouts: Layouts
    canonical: Callable[[str], str] = lambda name: name
    left_out: Callable[[DecoderConfig, str], bool] = lambda config, name: False

    def weights(self, model: Decoder) -> tuple[Weight, ...]:
        """All leaves of a model's parameters."""
        out = []
        for key, leaf in jax.tree_util.tree_flatten_with_path(model.abstract_params())[0]:
            path = tuple(entry.key for entry in key)
            if path[0] == "segments":
                run, position = model.runs[int(path[1])], int(path[2])
                name, shape = "/".join(path[3:]), leaf.shape[1:]
                places = [(run.layer(repeat, position), repeat) for repeat in range(run.repeats)]
            else:
                name, shape, places = "/".join(path), leaf.shape, [(None,)]
            found = tuple(tuple(self.layouts(model.config, name, shape, *at)) for at in places)
            out.append(Weight(path, leaf.shape, np.dtype(leaf.dtype), found))
        return tuple(out)

    # -- reading -------------------------------------------------------------------------------

    def load(
        self, directory: str | pathlib.Path, fields: Mapping[str, Any], **changes: Any
    ) -> tuple[Decoder, Params]:
        """Model and weights of a directory whose `config.json` has these fields.

        Float tensors may be float32, bfloat16 or float16; they are converted to the model's
        `param_dtype`. Beside the parameters at most one weight is in memory twice.
        """
        model = Decoder(self.parse(fields).replace(**changes))
        reader = shards.Reader(directory)
        names = self._by_canonical_name(reader, model.config)
        wanted = [(weight, _choose(weight, names)) for weight in self.weights(model)]
        _check(reader, names, wanted)
        params: Params = {}
        for weight, parts in wanted:
            value = np.empty(weight.shape, weight.dtype)
            for part in parts:
                tensor = reader.tensor(names[part.name])
                if weight.path[-1] == "table":
                    _check_table(part.name, tensor, model.config.n_experts)
                value[part.index] = part.ours(tensor).astype(weight.dtype)
            _put(params, weight.path, jnp.asarray(value))
        return model, params

    def _by_canonical_name(self, reader: shards.Reader, config: DecoderConfig) -> dict[str, str]:
        """Names in the files by canonical name, without those that are left out."""
        names: dict[str, str] = {}
        for name in reader.files:
            known = self.canonical(name)
            if self.left_out(config, known):
                continue
            if known in names:
                raise ValueError(f"{names[known]} and {name} are both {known}; remove one of them")
            names[known] = name
        return names

    # -- writing -------------------------------------------------------------------------------

    def state_dict(
        self, model: Decoder, params: Params, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors of a model, all or the named ones, in the file's orientation.

        Works for every model whose weights have names; those of parts that the family lacks are
        made after its pattern.
        """
        only = None if names is None else set(names)
        for weight in self.weights(model):
            leaf = params
            for key in weight.path:
                leaf = leaf[key]
            for choices in weight.choices:
                for part in choices[0]:
                    if only is None or part.name in only:
                        yield part.name, part.theirs(_stored(np.asarray(leaf[part.index])))

    def save(
        self,
        model: Decoder,
        params: Params,
        directory: str | pathlib.Path,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write `config.json` and the weights, in the dtypes of `params`.

        Raises ValueError before anything is written where the family has no place for the model.
        """
        fields = self.write(model.config)
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        sizes = {}
        for weight in self.weights(model):
            kind = np.int64 if np.issubdtype(weight.dtype, np.integer) else weight.dtype
            for choices in weight.choices:
                sizes |= {part.name: shards.bytes_of(part.shape, kind) for part in choices[0]}
        shards.write(
            directory,
            sizes,
            lambda names: self.state_dict(model, params, names),
            limit=shard_bytes,
        )
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _choose(weight: Weight, names: Mapping[str, str]) -> list[Part]:
    """The parts of every layer, in the layout that the files have (else the first, to report)."""
    parts: list[Part] = []
    for choices in weight.choices:
        present = [c for c in choices if any(part.name in names for part in c)]
        parts += (present or choices)[0]
    return parts


def _check(
    reader: shards.Reader,
    names: Mapping[str, str],
    wanted: Sequence[tuple[Weight, list[Part]]],
) -> None:
    """Raise ValueError that names every tensor that is missing, extra, misshapen or mistyped."""
    parts = [(part, weight) for weight, found in wanted for part in found]
    used = {part.name for part, _ in parts}
    missing = sorted(used - set(names))
    extra = sorted(name for known, name in names.items() if known not in used)
    shapes, dtypes = [], []
    for part, weight in parts:
        if part.name not in names:
            continue
        name = names[part.name]
        kinds = INTEGERS if np.issubdtype(weight.dtype, np.integer) else FLOATS
        if reader.shapes[name] != part.shape:
            shapes.append(f"{name} is {list(reader.shapes[name])}, not {list(part.shape)}")
        if reader.dtypes[name] not in kinds:
            dtypes.append(f"{name} is {reader.dtypes[name]}, not one of {kinds}")
    problems = []
    if missing:
        problems.append(
            f"missing tensors: {', '.join(missing)} (fetch all files, or make config.json match)"
        )
    if extra:
        problems.append(
            f"tensors that this model has no place for: {', '.join(extra)} (remove them, or make "
            "config.json match)"
        )
    if shapes:
        problems.append(f"wrong shapes: {'; '.join(shapes)} (make config.json match)")
    if dtypes:
        problems.append(
            f"wrong dtypes: {'; '.join(dtypes)} (convert quantised weights to bfloat16 first)"
        )
    if problems:
        raise ValueError(f"{reader.directory}: " + ". ".join(problems))


def _check_table(name: str, table: np.ndarray, experts: int) -> None:
    """A hash layer's table must name experts that exist."""
    if table.min() < 0 or table.max() >= experts:
        raise ValueError(
            f"{name} names experts {table.min()}..{table.max()} of {experts}; the file is damaged "
            "or n_routed_experts is wrong"
        )


def _put(params: Params, path: tuple[str, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def _stored(value: np.ndarray) -> np.ndarray:
    """Integer tables are int64 in the library's files."""
    return value.astype(np.int64) if np.issubdtype(value.dtype, np.integer) else value
