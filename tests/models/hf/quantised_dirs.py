"""Small checkpoints in the released quantised layouts, each with its dequantised twin."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

import models
from models import hf
from models.quantised.blocks import FP4, Blocks
from tests.models import families
from tests.models.weights import random_params

FP8_BLOCK = (6, 10)  # small matrices, several blocks with ragged last ones
E8M0 = ml_dtypes.float8_e8m0fnu
V4_FP8 = re.compile(
    r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight|shared_experts\.w\d\.weight"
)
V4_FP4 = re.compile(r"experts\.\d+\.w\d\.weight")
V32_FP8 = re.compile(
    r"self_attn\.(q_a|q_b|kv_a\w*|kv_b|o)_proj\.weight|mlp\.\w*_proj\.weight"
    r"|indexer\.w(q_b|k)\.weight|mlp\.experts\.(gate_up|down)_proj"
)
GPT_OSS = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4}


def _write(
    directory: pathlib.Path, tensors: Mapping[str, np.ndarray], fields: Mapping[str, Any]
) -> pathlib.Path:
    directory.mkdir(parents=True)
    held = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def _fp8(scales: str, inverse: bool, name: str, value: np.ndarray) -> tuple[dict, np.ndarray]:
    blocks = Blocks("e4m3", FP8_BLOCK, scales)
    codes, held = blocks.encode(value)
    beside = f"{name}_scale_inv" if inverse else f"{name.removesuffix('.weight')}.scale"
    held_as = held.view(E8M0) if scales == "e8m0" else held
    tensors = {name: codes.view(ml_dtypes.float8_e4m3fn), beside: held_as}
    return tensors, blocks.decode(codes, held)


def v4(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """DeepSeek-V4 as released: e4m3 with e8m0 scales, experts e2m1, companions `.scale`."""
    source = families.GOLDENS / "legacy"
    packed, plain = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        if V4_FP4.search(name):
            codes, scales = FP4.encode(value)
            beside = f"{name.removesuffix('.weight')}.scale"
            packed |= {name: codes.view(np.int8), beside: scales.view(E8M0)}
            plain[name] = FP4.decode(codes, scales)
        elif V4_FP8.search(name):
            tensors, plain[name] = _fp8("e8m0", False, name, value)
            packed |= tensors
        else:
            packed[name] = plain[name] = value
    fields = json.loads((source / "config.json").read_text())
    about = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK), "scale_fmt": "ue8m0",
    }  # fmt: skip
    quantised = fields | {"quantization_config": about, "expert_dtype": "fp4"}
    return _write(root / "packed", packed, quantised), _write(root / "plain", plain, fields)


def v32(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """DeepSeek-V3.2: e4m3 with float32 scales, `weight_scale_inv`; experts in one tensor."""
    source = families.GOLDENS / "deepseek_v32-dense_then_moe"
    packed, plain = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        if V32_FP8.search(name):
            tensors, plain[name] = _fp8("float32", True, name, value)
            packed |= tensors
        else:
            packed[name] = plain[name] = value
    fields = json.loads((source / "config.json").read_text())
    about = {"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK)}
    quantised = fields | {"quantization_config": about}
    return _write(root / "packed", packed, quantised), _write(root / "plain", plain, fields)


def gpt_oss(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """gpt-oss as released: MXFP4 experts, [E, out, groups, 16] and [E, out, groups]."""
    fields = families.fields("gpt_oss-turns") | GPT_OSS
    model = models.build(hf.family("gpt_oss").parse(fields))
    made = hf.family("gpt_oss").state_dict(model, random_params(model))
    packed, plain = {}, {}
    for name, value in made:
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = value
            continue
        codes, scales = FP4.encode(value.swapaxes(-1, -2))
        blocks = codes.reshape(*codes.shape[:-1], -1, 16)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = FP4.decode(codes, scales).swapaxes(-1, -2)
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    quantised = fields | {"quantization_config": about}
    return _write(root / "packed", packed, quantised), _write(root / "plain", plain, fields)


MAKERS = {"v4": v4, "v32": v32, "gpt_oss": gpt_oss}
