"""The families but DeepSeek-V4 as small models: those of the goldens, one a family for most tests.

A family is here when it has a golden called `<model_type>-<case>`. `every` has those as well that
are in no library: native sparse attention.
"""

import functools
import json
import pathlib

import numpy as np

import models
from hetero_kv.params import Params
from models import hf
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


def every() -> list[str]:
    """Every family, in the library or not."""
    return [*names(), "nsa"]


@functools.cache
def _nsa() -> tuple[Decoder, Params]:
    made = models.build(NSA)
    return made, random_params(made, seed=2)


def model(name: str) -> tuple[Decoder, Params]:
    """A family's first golden, or its random model."""
    if name == "nsa":
        return _nsa()
    return load(next(x for x in goldens() if x.startswith(f"{name}-")))


def fields(golden: str) -> dict:
    """Its `config.json`."""
    return json.loads((GOLDENS / golden / "config.json").read_text())


def expected(golden: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[B, T] and logits f32[B, T, V]."""
    with np.load(GOLDENS / golden / "golden.npz") as file:
        return file["tokens"], file["logits"]
