"""What of a checkpoint's tensors is one weight: a tensor, or codes with their scales beside them.

Known are block-scaled e4m3 (`x.weight` with `x.weight_scale_inv` or `x.scale`), e2m1 two to a byte
(I8 or U8, the same companions), and MXFP4 (`x_blocks` with `x_scales`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from models.hf.shards import Reader
from models.quantised.blocks import FP4, FP8, Blocks

METHODS = ("fp8", "mxfp4")
GROUP = FP4.block[1]
BLOCKS, SCALES = "_blocks", "_scales"  # endings of MXFP4
FLOAT_SCALES, POWER_SCALES = ("F32", "BF16"), ("F8_E8M0", "U8")
CODES = ("F8_E4M3", "I8", "U8")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One weight in the files.

    shape: of the weight, whatever its codes' is. blocks: None for a plain tensor. scales: name of
    the tensor with the scales.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Blocks | None = None
    scales: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return (self.name, self.scales) if self.scales else (self.name,)


def block_size(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block of e4m3, from a `config.json`.

    Raises ValueError where its `quantization_config` is one that is not implemented: weights are
    then not what their dtypes say, or activations were meant to be quantised by stored scales.
    """
    about = fields.get("quantization_config") or {}
    method = about.get("quant_method", "fp8")
    wrong = {}
    if method not in METHODS:
        wrong["quant_method"] = f"{method!r}, not one of {METHODS}"
    if about.get("fmt", "e4m3") != "e4m3":
        wrong["fmt"] = f"{about['fmt']!r}, not 'e4m3'"
    if about.get("activation_scheme", "dynamic") != "dynamic":
        wrong["activation_scheme"] = f"{about['activation_scheme']!r}, not 'dynamic'"
    if about.get("scale_fmt") not in (None, "float", "ue8m0"):
        wrong["scale_fmt"] = f"{about['scale_fmt']!r}, not 'float' or 'ue8m0'"
    block = about.get("weight_block_size", FP8.block)
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        wrong["weight_block_size"] = f"{block!r}, not two integers > 0"
    if wrong:
        text = "; ".join(f"{name} is {x}" for name, x in wrong.items())
        raise ValueError(
            f"config.json: quantization_config is not implemented: {text}. Convert the weights to "
            "bfloat16 with the tool that made them, and remove the field"
        )
    return tuple(block)


def find(reader: Reader, block: tuple[int, int]) -> tuple[dict[str, Stored], list[str]]:
    """Every weight of the files by the name of its (codes') tensor, and what is wrong with some.

    Scales that belong to no codes are returned as plain tensors.
    """
    found: dict[str, Stored] = {}
    taken: set[str] = set()
    problems: list[str] = []
    for name, dtype in reader.dtypes.items():
        scales = _companion(reader, name) if dtype in CODES else ""
        if scales:
            taken.add(scales)
            try:
                found[name] = _quantised(reader, name, scales, block)
            except ValueError as error:
                problems.append(str(error))
        else:
            if dtype == "F8_E4M3":
                problems.append(f"{name} is F8_E4M3 without scales (as {_companions(name)})")
            found[name] = Stored(name, reader.shapes[name])
    return {name: x for name, x in found.items() if name not in taken}, problems


def _companions(name: str) -> list[str]:
    """Names that the scales of a tensor may have."""
    if name.endswith(BLOCKS):
        return [name.removesuffix(BLOCKS) + SCALES]
    stem = name.removesuffix(".weight")
    return [f"{name}_scale_inv", *([f"{stem}.scale"] if stem != name else [])]


def _companion(reader: Reader, name: str) -> str:
    return next((x for x in _companions(name) if x in reader.files), "")


def _quantised(reader: Reader, name: str, scales: str, block: tuple[int, int]) -> Stored:
    shape, dtype, kind = reader.shapes[name], reader.dtypes[name], reader.dtypes[scales]
    if kind not in (*FLOAT_SCALES, *POWER_SCALES):
        raise ValueError(f"{scales} is {kind}, not one of {(*FLOAT_SCALES, *POWER_SCALES)}")
    scale = "e8m0" if kind in POWER_SCALES else "float32"
    if name.endswith(BLOCKS):
        if len(shape) < 3 or shape[-1] != GROUP // 2:
            raise ValueError(f"{name} is {list(shape)}: MXFP4 blocks end in {GROUP // 2} bytes")
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) < 2:
        raise ValueError(f"{name} is {list(shape)}: only matrices have block scales")
    if dtype == "F8_E4M3":
        blocks = Blocks("e4m3", block, scale)
    else:
        blocks = Blocks("e2m1", FP4.block, scale)
    shape = blocks.shape_of(shape)
    wanted = blocks.scale_shape(shape)
    if reader.shapes[scales] != wanted:
        raise ValueError(
            f"{scales} is {list(reader.shapes[scales])}, not {list(wanted)}: {name} is "
            f"{list(shape)} in blocks of {list(blocks.block)} (quantization_config: "
            "weight_block_size)"
        )
    if math.prod(reader.shapes[name]) != math.prod(blocks.code_shape(shape)):
        raise ValueError(f"{name} is {list(reader.shapes[name])}, not codes of {list(shape)}")
    return Stored(name, shape, blocks, scales)
