"""Time to the first token by hit; minutes on two cores.

`:quick` takes less than one, `:long` goes to 32,768 tokens and takes hours on two cores.
"""

from experiments import ttft_config


def get_config(size: str = "") -> ttft_config.TtftConfig:
    sizes = {
        "": {},
        "quick": dict(
            prompts=(512, 1_024), arms=("full/host", "zero/host", "full/disk"), repeats=3,
            seconds=15.0,
        ),
        "long": dict(
            prompts=(512, 2_048, 8_192, 32_768),
            arms=("full/host", "periodic:4/host", "end/host", "zero/host", "full/disk"),
            repeats=5, seconds=600.0,
        ),
    }  # fmt: skip
    if size not in sizes:
        raise ValueError(f"no size {size!r}; use one of {tuple(sizes)}")
    return ttft_config.TtftConfig(**sizes[size])
