"""Advice for a released model: `--config=configs/advise.py:v4_pro`, or another of `geometries`."""

from experiments.advise_config import AdviseConfig
from models import geometries


def get_config(name: str = "v4_flash") -> AdviseConfig:
    if name not in geometries.RELEASED:
        raise ValueError(f"no geometry {name!r}; use one of {tuple(geometries.RELEASED)}")
    return AdviseConfig(name=name, model=geometries.RELEASED[name]())
