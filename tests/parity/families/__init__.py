"""Tiny random models of every family but DeepSeek-V4: one module a family, found by its name.

A module has `BASE`, fields of the library's configuration class for that `model_type`, `CASES`, and
`GOLDENS`, the names of the cases that are kept as goldens.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """One random model and one random batch, longer than every window and selection."""

    name: str
    hf: Mapping[str, Any]  # overrides of `BASE`
    batch: int = 1
    length: int = 45
    seed: int = 0


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
