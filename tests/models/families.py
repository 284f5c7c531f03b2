"""The families but DeepSeek-V4 as small models: those of the goldens, one a family for most tests.

A family is here when it has a golden called `<model_type>-<case>`. `every` has those as well that
are in no library: native sparse attention, and mechanisms whose caches are packed.
"""

import functools
import json
import pathlib

import numpy as np

import models
from hetero_kv.params import Params
from models import geometries, hf
from models.config import DecoderConfig
from models.decoder import Decoder
from tests.models.weights import random_params

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
CHUNK, BLOCK = 16, 8


def goldens() -> list[str]:
    """Every golden of a family."""
    return sorted(path.parent.name for path in GOLDENS.glob("*-*/golden.npz"))


def names() -> list[str]:
    """Every family that has one, by its `model_type`."""
    return sorted({name.partition("-")[0] for name in goldens()})


@functools.cache
def load(golden: str) -> tuple[Decoder, Params]:
    """A golden's model and weights, with G = 16."""
    return hf.from_pretrained(GOLDENS / golden, chunk=CHUNK, block=BLOCK)


NSA_SIZES = ("span", "stride", "select", "top")
NSA = DecoderConfig(
    vocab_size=64,
    d_model=24,
    layer_types=("nsa",) * 2,
    mlp_types=("dense",) * 2,
    attention={"nsa": {"nsa_span": 8, "nsa_stride": 4, "nsa_select": 8, "nsa_top": 4}},
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    rope_dim=4,
    rope_theta=100.0,
    window=6,
    d_ff=16,
    init_scale=1.0,
    chunk=CHUNK,
    block=BLOCK,
)


# By name: two layers each, which store all of their rows packed.
PACKED = {
    "packed_v4": NSA.replace(
        layer_types=("csa", "hca"),
        attention={},
        hca_ratio=8,
        index_dim=8,
        index_topk=3,
        compress_rope_theta=1000.0,
        cache_layouts=dict(geometries.V4_LAYOUTS),
    ),
    "packed_heads": NSA.replace(
        layer_types=("local", "full"),
        attention={"local": {"cache_layouts": {"window": "int8"}}},
        cache_layouts={"kv": "fp4"},
    ),
    "packed_mla": NSA.replace(
        layer_types=("mla",) * 2,
        attention={"mla": {"kv_lora_rank": 12, "nope_dim": 6, "v_dim": 5}},
        index_dim=8,
        index_topk=5,
        cache_layouts=dict(geometries.V32_LAYOUTS),
    ),
    "packed_nsa": NSA.replace(
        cache_layouts={"entries": "int8", "tokens": "fp8_f32", "window": "fp4"}
    ),
}


def every() -> list[str]:
    """Every family, in the library or not."""
    return [*names(), "nsa", *PACKED]


@functools.cache
def _random(name: str) -> tuple[Decoder, Params]:
    made = models.build(PACKED.get(name, NSA))
    return made, random_params(made, seed=2)


def model(name: str) -> tuple[Decoder, Params]:
    """A family's first golden, or its random model."""
    if name == "nsa" or name in PACKED:
        return _random(name)
    return load(next(x for x in goldens() if x.startswith(f"{name}-")))


def fields(golden: str) -> dict:
    """Its `config.json`."""
    return json.loads((GOLDENS / golden / "config.json").read_text())


def expected(golden: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[B, T] and logits f32[B, T, V]."""
    with np.load(GOLDENS / golden / "golden.npz") as file:
        return file["tokens"], file["logits"]
