"""The prefix store: requests per second of its control plane, MB/s of its disk tier.

`--config.quick=True` is a smoke run, `--config.parts=control_plane` one part.
"""

from experiments.bench import store_config


def get_config() -> store_config.StoreBenchConfig:
    return store_config.StoreBenchConfig()
