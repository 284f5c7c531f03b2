"""What a function writes to device memory, read off its jaxpr without running it."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from experiments.lowering import inner_jaxprs

VIEWS = ("reshape", "new_ref", "ref", "freeze")
ON_CHIP = ("pallas_call", "mpmd_map", "core_map", "run_scoped")  # what is inside stays on the chip


def arrays(run: Callable, *args: Any) -> list[tuple[int, ...]]:
    """Shapes of every array that `run(*args)` makes, those within kernels left out.

    args: arrays, or `jax.ShapeDtypeStruct`. An output that has the memory of an input (a pool that
    a kernel updates in place, also through a reference) is not made anew and not in the list.
    """
    return [tuple(shape) for shape in _made(jax.make_jaxpr(run)(*args).jaxpr)]


def largest(run: Callable, *args: Any) -> int:
    """Values in the largest of `arrays`."""
    return max((math.prod(shape) for shape in arrays(run, *args)), default=0)


def _made(jaxpr: core.Jaxpr) -> Iterator[tuple[int, ...]]:
    for equation in jaxpr.eqns:
        name, outs = equation.primitive.name, equation.outvars
        inner = [] if name in ON_CHIP else list(inner_jaxprs(equation))
        for one in inner:
            yield from _made(one)
        if name == "pallas_call":
            in_place = {out for _, out in equation.params["input_output_aliases"]}
            outs = [x for i, x in enumerate(outs) if i not in in_place]
        if not inner and name not in VIEWS:
            yield from (x.aval.shape for x in outs if hasattr(x.aval, "shape"))
