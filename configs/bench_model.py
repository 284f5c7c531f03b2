"""Decode, prefill and compile times: about an hour on two cores, all of it resumable.

`--config.quick=True` is a smoke run, `--config.sizes=small` measures one size,
`--config.parts=growth` one part.
"""

from experiments.bench import bench_config


def get_config() -> bench_config.BenchConfig:
    return bench_config.BenchConfig()
