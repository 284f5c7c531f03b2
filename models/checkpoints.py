"""A model and its weights as one orbax checkpoint: complete, or not there.

Arrays are saved as plain nested dictionaries, packed weights as their codes and scales; what is not
an array (configuration, layouts, the family that it came from) is JSON beside them.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from hetero_kv.params import Params
from models.config import DecoderConfig
from models.decoder import Decoder
from models.forms import Form
from models.quantised.blocks import Blocks
from models.quantised.leaf import Meaning, Packed, is_packed

FORMAT, VERSION = "hetero_kv model", 1
MARK = "_CHECKPOINT_METADATA"  # orbax writes it when it finishes
TUPLE = "tuple"
PARAMS = "params"  # directory of the arrays
HEAD = 64  # bytes; a file of arrays or of what they are begins with something
DAMAGED = (ValueError, TypeError, KeyError, OSError)  # what orbax raises for damaged files
AGAIN = "copy the checkpoint again"


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """What a checkpoint says of itself, with the shapes and dtypes of its parameters."""

    model: Decoder
    params: Params  # abstract
    model_type: str  # the Hugging Face family that it came from, "" if none


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a directory is a complete checkpoint of any kind."""
    return (directory / MARK).is_file()


def save(directory: pathlib.Path, model: Decoder, params: Params, model_type: str = "") -> None:
    """Writes a checkpoint; it is renamed into place when it is complete.

    Raises ValueError where the directory exists.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists; give a new directory, or remove it")
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "config": _plain(dataclasses.asdict(model.config)),
        "model_type": model_type,
        "packed": {_name(path): _about(leaf) for path, leaf in flat if is_packed(leaf)},
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(_unpacked(params)), about=ocp.args.JsonSave(about)
        )
        checkpointer.save(directory.absolute(), args=arguments)


def describe(directory: pathlib.Path, **changes: Any) -> Stored:
    """What is in a checkpoint, without its arrays. `changes` are fields of the configuration.

    Raises ValueError where the directory is no complete checkpoint of this format, or where its
    arrays are not all there in the shapes of the model. Values are not read.
    """
    if not is_checkpoint(directory):
        raise ValueError(f"{directory} is no complete checkpoint: it has no {MARK}")
    try:
        with _checkpointer() as checkpointer:
            arguments = ocp.args.Composite(about=ocp.args.JsonRestore())
            about = checkpointer.restore(directory.absolute(), args=arguments)["about"]
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise ValueError(f"{directory} is no checkpoint of a model ({error})") from error
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError(
            f"{directory} is {about.get('format')!r} version {about.get('version')!r}; this "
            f"program reads {FORMAT!r} version {VERSION}"
        )
    try:
        config = DecoderConfig(**_tuples(about["config"])).replace(**changes)
        packed = {name: _meant(x) for name, x in about["packed"].items()}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{directory}: its configuration is not understood: {error}") from error
    model = Decoder(config)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: packed.get(_name(path), leaf), model.abstract_params()
    )
    model.stack.check(params)
    _check_arrays(directory / PARAMS, params)
    return Stored(model, params, about["model_type"])


def restore(directory: pathlib.Path, **changes: Any) -> tuple[Decoder, Params]:
    """The model and its weights. `changes` are fields of the configuration.

    Plain weights become the model's `param_dtype`. Raises ValueError as `describe`.
    """
    stored = describe(directory, **changes)
    arguments = ocp.args.Composite(params=ocp.args.StandardRestore(_unpacked(stored.params)))
    try:
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(directory.absolute(), args=arguments)[PARAMS]
    except DAMAGED as error:
        raise ValueError(f"{directory / PARAMS} is damaged ({error}); {AGAIN}") from error

    def repacked(leaf: Any, held: Any) -> Any:
        if not is_packed(leaf):
            return held
        codes, scales = (
            tuple(held[part][str(i)] for i in range(len(leaf.codes)))
            for part in ("codes", "scales")
        )
        return Packed(leaf.meaning, codes, scales)

    return stored.model, jax.tree.map(repacked, stored.params, arrays, is_leaf=is_packed)


def _check_arrays(place: pathlib.Path, params: Params) -> None:
    """Raises ValueError unless a directory has files for all arrays, in their shapes.

    Integers have the dtype of the parameters: orbax would wrap those that do not fit.
    """
    if not place.is_dir():
        raise ValueError(f"{place} does not exist, so there are no arrays; {AGAIN}")
    for path in sorted(x for x in place.rglob("*") if x.is_file()):
        with open(path, "rb") as file:
            if not any(file.read(HEAD)):
                raise ValueError(f"{path} is empty or begins with zeros; {AGAIN}")
    try:
        tree = ocp.StandardCheckpointHandler().metadata(place.absolute()).tree
    except DAMAGED as error:
        raise ValueError(f"{place} is damaged ({error}); {AGAIN}") from error
    flat = jax.tree_util.tree_leaves_with_path
    have = {_name(path): x for path, x in flat(tree)}
    want = {_name(path): x for path, x in flat(_unpacked(params))}
    if have.keys() != want.keys():
        raise ValueError(
            f"{place} lacks arrays {sorted(want.keys() - have.keys())} and has "
            f"{sorted(have.keys() - want.keys())} too; {AGAIN}"
        )
    for name, x in want.items():
        held = have[name]
        dtypes = jnp.dtype(held.dtype), jnp.dtype(x.dtype)
        whole = any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)
        if tuple(held.shape) != x.shape or (whole and dtypes[0] != dtypes[1]):
            raise ValueError(
                f"{place}: {name} is {dtypes[0]}{list(held.shape)}, not {dtypes[1]}"
                f"{list(x.shape)}; {AGAIN}"
            )


def _checkpointer() -> ocp.Checkpointer:
    logging.getLogger("absl").addFilter(_worth_showing)
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _worth_showing(record: logging.LogRecord) -> bool:
    # orbax tells a dozen lines of every save at level INFO.
    return record.levelno >= logging.WARNING or "/orbax/" not in record.pathname


def _name(path: tuple) -> str:
    return "/".join(str(entry.key) for entry in path)


def _unpacked(params: Params) -> Params:
    """With dictionaries of arrays in place of packed leaves."""

    def one(leaf: Any) -> Any:
        if not is_packed(leaf):
            return leaf
        parts = {"codes": leaf.codes, "scales": leaf.scales}
        return {name: {str(i): x for i, x in enumerate(held)} for name, held in parts.items()}

    return jax.tree.map(one, params, is_leaf=is_packed)


def _about(leaf: Packed) -> dict[str, Any]:
    shapes = {
        name: [[list(x.shape), x.dtype.name] for x in held]
        for name, held in {"codes": leaf.codes, "scales": leaf.scales}.items()
    }
    return _plain(dataclasses.asdict(leaf.meaning)) | shapes


def _meant(about: Mapping[str, Any]) -> Packed:
    about = _tuples(dict(about))
    arrays = [
        tuple(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape, dtype in about[part])
        for part in ("codes", "scales")
    ]
    blocks, form = Blocks(**about["blocks"]), Form(**about["form"])
    return Packed(Meaning(blocks, form, about["dtype"], about["apart"]), *arrays)


def _plain(value: Any) -> Any:
    """As JSON can hold it, tuples marked."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_plain(x) for x in value]}
    return [_plain(x) for x in value] if isinstance(value, list) else value


def _tuples(value: Any) -> Any:
    """The inverse."""
    if isinstance(value, dict):
        if set(value) == {TUPLE}:
            return tuple(_tuples(x) for x in value[TUPLE])
        return {name: _tuples(x) for name, x in value.items()}
    return [_tuples(x) for x in value] if isinstance(value, list) else value
