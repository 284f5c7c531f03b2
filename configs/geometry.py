"""Sizes of released models: `--config=configs/geometry.py:v4_pro`, or another name of NAMES.

`v4_1_flash` is V4.1's change to V4-Flash: windows are not kept with the entries; on a miss the last
128 tokens are replayed with their windows cut off there, which is approximate.
"""

from experiments.geometry_config import GeometryConfig
from models import geometries

POLICIES = {"v4_1_flash": ("v4_flash", "bounded:128")}
NAMES = (*geometries.RELEASED, *POLICIES)


def get_config(name: str = "v4_flash") -> GeometryConfig:
    if name not in NAMES:
        raise ValueError(f"no geometry {name!r}; use one of {NAMES}")
    model, policy = POLICIES.get(name, (name, "full"))
    return GeometryConfig(name=name, model=geometries.RELEASED[model](), policy=policy)
