"""One random model of a family, and one random batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """One random model and one random batch, longer than every window and selection."""

    name: str
    hf: Mapping[str, Any]  # overrides of `BASE`
    batch: int = 1
    length: int = 45
    seed: int = 0
