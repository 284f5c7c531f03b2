"""Tiny random models of every family but DeepSeek-V4: one module a family, found by its name.

A module has `BASE`, fields of the library's configuration class for that `model_type`, `CASES`, and
`GOLDENS`, the names of the cases that are kept as goldens.
"""

import importlib
import pkgutil
from types import ModuleType

import numpy as np

from tests.parity.family_case import FamilyCase


def names() -> list[str]:
    """Every `model_type` here."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def module(model_type: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(f"tests.parity.families.{model_type}")


def cases() -> list[tuple[str, FamilyCase]]:
    """Every family and case."""
    return [(name, case) for name in names() for case in module(name).CASES]


def tokens_of(model_type: str, case: FamilyCase) -> np.ndarray:
    """The case's random tokens, i32[B, T]."""
    vocab = {**module(model_type).BASE, **case.hf}["vocab_size"]
    rng = np.random.default_rng(case.seed)
    return rng.integers(0, vocab, (case.batch, case.length), dtype=np.int32)
