"""Decode, prefill and compile times; `--config.quick=True` is a smoke run, `--config.sizes=small` one size."""

from experiments.bench import bench_config


def get_config() -> bench_config.BenchConfig:
    return bench_config.BenchConfig()
