"""No cache, a cache within a request, reuse across requests: seconds and operations; minutes.

`:quick` takes less than one.
"""

from experiments import levels_config


def get_config(size: str = "") -> levels_config.LevelsConfig:
    sizes = {"": {}, "quick": dict(prompts=(256, 512, 1_024), answer=8, repeats=3, seconds=15.0)}
    if size not in sizes:
        raise ValueError(f"no size {size!r}; use one of {tuple(sizes)}")
    return levels_config.LevelsConfig(**sizes[size])
