"""Packed weights written back: the tensors, names and `config.json` fields of their layouts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from models.hf.parts import Part
from models.hf.stored import BLOCKS, GROUP, SCALES
from models.hf.weights import Weight, lead, pieces
from models.quantised.blocks import FP8
from models.quantised.leaf import Packed

Tensor = tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]
BYTE = np.dtype(np.uint8)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
CODES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e2m1": np.dtype(np.int8)}


def tensors(weight: Weight, leaf: Packed) -> Iterator[Tensor]:
    """Name, shape, dtype and maker of every tensor of a packed weight.

    Raises ValueError where the family has no names for weights in these pieces.
    """
    blocks = leaf.meaning.blocks
    chosen = [_matching(weight, leaf, i) for i in range(len(weight.choices))]
    for layout in chosen:
        starts = sorted(pieces(layout))
        for part in layout:
            at, start = part.place
            i = starts.index(start)
            codes, scales = leaf.codes[i], leaf.scales[i]
            shape, kind = blocks.code_shape(part.shape), CODES[blocks.element]
            scale_shape = blocks.scale_shape(part.shape)
            scale_kind = E8M0 if blocks.scale == "e8m0" else blocks.scale_dtype
            name, scale_name = part.name, f"{part.name}_scale_inv"
            if name.endswith(BLOCKS):
                scale_name = name.removesuffix(BLOCKS) + SCALES
                shape, kind = (*shape[:-1], shape[-1] * 2 // GROUP, GROUP // 2), BYTE
                scale_kind = BYTE
            yield name, shape, kind, _maker(codes, at, kind, shape)
            yield scale_name, scale_shape, scale_kind, _maker(scales, at, scale_kind, scale_shape)


def _maker(
    held: Any, at: tuple[int, ...], dtype: np.dtype, shape: tuple[int, ...]
) -> Callable[[], np.ndarray]:
    return lambda: taken(held, at).view(dtype).reshape(shape)


def taken(held: Any, at: tuple[int, ...]) -> np.ndarray:
    """`held[at]` on the host; of an array that is there already nothing is copied or compiled."""
    there = isinstance(held, jax.Array) and [x.platform for x in held.devices()] == ["cpu"]
    return np.asarray(held)[at] if there else np.asarray(held[at])


def _matching(weight: Weight, leaf: Packed, layer: int) -> Sequence[Part]:
    """The layout of one layer's files that has the pieces of the leaf."""
    blocks, form, apart = leaf.meaning.blocks, leaf.meaning.form, leaf.meaning.apart
    for layout in weight.choices[layer]:
        found = pieces(layout)
        ahead = [lead(weight.shape, found[start]) for start in sorted(found)]
        shapes = [
            (*axes, *blocks.code_shape(found[start].shape))
            for axes, start in zip(ahead, sorted(found), strict=True)
        ]
        same = {x.form for x in layout} == {form} and {len(x) for x in ahead} == {apart}
        if same and shapes == [x.shape for x in leaf.codes]:
            return layout
    raise ValueError(
        f"{'/'.join(weight.path)} is packed as {leaf.meaning} in {len(leaf.codes)} pieces, for "
        "which this family has no tensors; load the weights without keep_quantised to save them"
    )


def fields(leaves: Sequence[Packed], names: Iterable[str]) -> dict[str, Any]:
    """What `config.json` says of packed weights; nothing where there are none.

    names: of all tensors that are written. Raises ValueError for layouts that cannot be told in one
    file.
    """
    layouts = {leaf.meaning.blocks for leaf in leaves}
    eights = [x for x in layouts if x.element == "e4m3"]
    if not layouts:
        return {}
    if any(name.endswith(BLOCKS) for name in names):
        if eights:
            raise ValueError(f"no config.json has MXFP4 beside {eights}")
        return {"quantization_config": {"quant_method": "mxfp4"}}
    if len({x.block for x in eights}) > 1:
        raise ValueError(f"one config.json has one size of blocks, not those of {eights}")
    scales = {x.scale for x in eights}
    about = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(eights[0].block if eights else FP8.block),
        "scale_fmt": "float" if scales == {"float32"} else "ue8m0",
    }
    return {"quantization_config": about} | (
        {"expert_dtype": "fp4"} if len(layouts) > len(eights) else {}
    )
