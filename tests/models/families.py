"""The families but DeepSeek-V4 as small models: those of the goldens, one a family for most tests.

A family is here when it has a golden called `<model_type>-<case>`.
"""

import functools
import json
import pathlib

import numpy as np

from hetero_kv.params import Params
from models import hf
from models.decoder import Decoder

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


def model(name: str) -> tuple[Decoder, Params]:
    """A family's first golden."""
    return load(next(x for x in goldens() if x.startswith(f"{name}-")))


def fields(golden: str) -> dict:
    """Its `config.json`."""
    return json.loads((GOLDENS / golden / "config.json").read_text())


def expected(golden: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[B, T] and logits f32[B, T, V]."""
    with np.load(GOLDENS / golden / "golden.npz") as file:
        return file["tokens"], file["logits"]
