"""What kernels for Mosaic GPU share, whatever the JAX version."""

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of one product of a warpgroup
GROUP = 8  # rows of a unit of swizzled memory
SHARED = 227 << 10  # bytes of shared memory that a block can have

_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_NEEDS_INDEX = _INDEX is not None and _INDEX.default is inspect.Parameter.empty  # before 0.11


def load(ref: Any, layout: Any) -> jax.Array:
    """A whole reference in registers; unlike `ref[...]` with any layout, at any cost."""
    index = ((),) if _NEEDS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Writes a whole reference of shared memory; unlike `ref[...] = value` whatever the layout of
    the value, at any cost."""
    if hasattr(plgpu, "store"):  # since 0.12
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def swizzled(*shape: int) -> Any:
    """Shared memory of bfloat16 that products read; the last axis is a multiple of 64."""
    transforms = (plgpu.TilingTransform((GROUP, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def size(memory: Any) -> int:
    """Bytes of what is asked for: a tree of shared memory and barriers, those as a page of it."""
    arrays = [x for x in jax.tree.leaves(memory) if hasattr(x, "dtype")]
    return 1024 + sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
