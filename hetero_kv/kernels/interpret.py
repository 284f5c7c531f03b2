"""Interpreters that run a kernel on a CPU, in their strict settings.

Uninitialised memory is NaN, out-of-bounds reads raise, races are looked for. An interpreter shows
that a kernel computes the right thing; it does not show that a device's compiler takes it.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu


def tpu() -> Any:
    """What `pl.pallas_call(interpret=...)` takes for a TPU kernel."""
    return pltpu.InterpretParams(
        uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True
    )


def gpu(detect_races: bool = True) -> Any:
    """What `plgpu.kernel(interpret=...)` takes.

    Each warpgroup that waits holds a thread of XLA's pool, which has as many as the machine has
    cores: where these are fewer than a block's warpgroups, set NPROC=16 before JAX is imported.

    Raises NotImplementedError before JAX 0.12: 0.10 has no interpreter of Mosaic GPU, and that of
    0.11 wants every warpgroup to have waited at every barrier of its block.
    """
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(
            f"JAX {jax.__version__} has no interpreter of Mosaic GPU that takes these kernels; "
            "0.12 has one"
        )
    return plgpu.InterpretGPUParams(
        uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=detect_races
    )
