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
import numpy as np

from hetero_kv.params import Params
from models.config import DecoderConfig
from models.decoder import Decoder
from models.hf import loading, packing, shards, stored
from models.hf.parts import Layout
from models.hf.weights import Weight, get
from models.quantised.leaf import is_packed

SHARD_BYTES = 4 << 30
# What `config.json` does not tell: how a model is run, and how one would be initialised.
UNTOLD = ("dtype", "cache_dtype", "kernels", "chunk", "block", "scan_layers", "init_scale")

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

    def plan(
        self,
        directory: str | pathlib.Path,
        fields: Mapping[str, Any],
        keep_quantised: bool = False,
        **changes: Any,
    ) -> loading.Plan:
        """What `load` with the same arguments would do; of the weights only headers are read.

        Raises ValueError for a `config.json` that is not understood, and for files that are absent
        or damaged; what does not fit is in the plan's `problems`.
        """
        block = stored.block_size(fields)
        model = Decoder(self.parse(fields).replace(**changes))
        reader = shards.Reader(directory)
        found, problems = stored.find(reader, block)
        named = self._by_canonical_name(found, model.config)
        return loading.plan(model, reader, named, self.weights(model), problems, keep_quantised)

    def load(
        self,
        directory: str | pathlib.Path,
        fields: Mapping[str, Any],
        keep_quantised: bool = False,
        progress: loading.Report | None = None,
        **changes: Any,
    ) -> tuple[Decoder, Params]:
        """Model and weights of a directory whose `config.json` has these fields.

        Float tensors may be float32, bfloat16, float16, or quantised (see `stored`); they are
        converted to the model's `param_dtype`, or with `keep_quantised` those of layers stay in
        their layout. At most a few megabytes are in memory beside the parameters.
        """
        plan = self.plan(directory, fields, keep_quantised, **changes)
        return plan.model, plan.read(progress)

    def _by_canonical_name(
        self, found: Mapping[str, stored.Stored], config: DecoderConfig
    ) -> dict[str, stored.Stored]:
        """What the files have by canonical name, without those that are left out."""
        names: dict[str, stored.Stored] = {}
        for name, weight in found.items():
            known = self.canonical(name)
            if self.left_out(config, known):
                continue
            if known in names:
                raise ValueError(
                    f"{names[known].name} and {name} are both {known}; remove one of them"
                )
            names[known] = weight
        return names

    # -- writing -------------------------------------------------------------------------------

    def _tensors(
        self, model: Decoder, params: Params
    ) -> Iterator[tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]:
        """Name, shape, dtype and maker of every tensor of a model, in the file's orientation."""
        for weight in self.weights(model):
            leaf = get(params, weight.path)
            if is_packed(leaf):
                yield from packing.tensors(weight, leaf)
                continue
            whole = np.issubdtype(weight.dtype, np.integer)
            kind = np.dtype(np.int64) if whole else np.dtype(leaf.dtype)
            for choices in weight.choices:
                for part in choices[0]:

                    def make(part=part, leaf=leaf, kind=kind) -> np.ndarray:
                        return part.theirs(packing.taken(leaf, part.index)).astype(kind, copy=False)

                    yield part.name, part.shape, kind, make

    def state_dict(
        self, model: Decoder, params: Params, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors of a model, all or the named ones, in the file's orientation.

        Works for every model whose weights have names; those of parts that the family lacks are
        made after its pattern. Integer tables are int64, as in the library's files. Packed weights
        are the tensors that they were read from, under names of the library's pattern.
        """
        only = None if names is None else set(names)
        for name, _, _, make in self._tensors(model, params):
            if only is None or name in only:
                yield name, make()

    def fields(self, model: Decoder, params: Params) -> dict[str, Any]:
        """The `config.json` of a model with these weights.

        Raises ValueError where the family has no place for the model: for a part of it, or because
        what is written would be read as another one.
        """
        config = model.config
        fields = self.write(config)
        again = self.parse(fields).replace(**{name: getattr(config, name) for name in UNTOLD})
        if again != config and Decoder(again).stack != model.stack:
            wrong = [
                f"{name}={have!r} would be read as {getattr(again, name)!r}"
                for name, have in vars(config).items()
                if getattr(again, name) != have
            ]
            raise ValueError(
                f"{fields['model_type']} has no place for this model: {', '.join(wrong)}; save it "
                "as a checkpoint instead"
            )
        packed = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(leaf)]
        names = [name for name, *_ in self._tensors(model, params)] if packed else []
        return fields | packing.fields(packed, names)

    def sizes(self, model: Decoder, params: Params) -> dict[str, int]:
        """Bytes of every tensor that `save` writes; shapes and dtypes of `params` suffice."""
        return {
            name: shards.bytes_of(shape, dtype)
            for name, shape, dtype, _ in self._tensors(model, params)
        }

    def save(
        self,
        model: Decoder,
        params: Params,
        directory: str | pathlib.Path,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write `config.json` and the weights, in the dtypes and layouts of `params`.

        Raises ValueError before anything is written where the family has no place for the model or
        the layout of its weights.
        """
        fields = self.fields(model, params)
        sizes = self.sizes(model, params)
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        shards.write(
            directory,
            sizes,
            lambda names: self.state_dict(model, params, names),
            limit=shard_bytes,
        )
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
