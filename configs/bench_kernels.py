"""Kernels at the sizes of DeepSeek-V4-Flash; on a CPU, small ones."""

from experiments.bench import kernel_config


def get_config() -> kernel_config.KernelBenchConfig:
    return kernel_config.KernelBenchConfig()
