"""What an op becomes on a platform that is not at hand: its lowered text, and a kernel's memory."""

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import matplotlib.figure
import numpy as np
from jax.extend import core

from experiments.exhibit import COLOURS, plain

# What a kernel is called in a lowered program: for TPU, and (Mosaic GPU) for CUDA.
KERNEL_CALLS = ("tpu_custom_call", "mosaic_gpu")
BITS = {"i1": 8}  # bits of an element that its type's name does not tell


def text(run: Callable, platform: str, *args: Any) -> str:
    """The StableHLO text of `run`, lowered for one platform: "cpu", "tpu" or "cuda".

    args: arrays, or `jax.ShapeDtypeStruct`; only their shapes matter.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)
    return jax.export.export(jax.jit(run), platforms=[platform])(*shapes).mlir_module()


def kernels(lowered: str) -> int:
    """How many calls of kernels a lowered program has."""
    return sum(lowered.count(f"custom_call @{name}") for name in KERNEL_CALLS)


def operations(lowered: str) -> collections.Counter:
    """How often each operation stands in a lowered program."""
    return collections.Counter(re.findall(r"stablehlo\.(\w+)", lowered))


def largest(lowered: str) -> int:
    """Bytes of the largest value that a lowered program makes; reshapes make none."""
    found = [0]
    for line in lowered.splitlines():
        made = re.match(r"\s*%[\w:]+ = \"?stablehlo\.(\w+)", line)
        if made and made[1] not in ("reshape", "constant", "case", "while"):
            types = re.findall(r"tensor<([^>]*)>", line)
            found.append(_bytes(types[-1]) if types else 0)
    return max(found)


def _bytes(kind: str) -> int:
    """Of `4x8xf32`."""
    *sizes, element = kind.split("x")
    bits = BITS.get(element) or int(re.sub(r"\D", "", element) or 32)
    return math.prod(map(int, sizes)) * bits // 8


class Buffer(NamedTuple):
    """Memory of a TPU kernel. space: "any" (the device's), "vmem", "smem", "semaphore_mem".

    use: "block": brought in by the kernel's grid, one step ahead; "scratch": the kernel's own.
    """

    space: str
    use: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def kernel_memory(run: Callable, *args: Any) -> list[list[Buffer]]:
    """Per TPU kernel of `run(*args)`, what it works on; nothing is run.

    args: arrays, or `jax.ShapeDtypeStruct`.
    """
    traced = jax.make_jaxpr(run)(*args)
    return [[*_buffers(x)] for x in _kernels(traced.jaxpr)]


def _buffers(call: core.JaxprEqn) -> Iterator[Buffer]:
    refs = [x.aval for x in call.params["jaxpr"].invars]
    scratch = call.params["grid_mapping"].num_scratch_operands
    for place, ref in enumerate(refs):
        space = str(getattr(ref, "memory_space", None) or "vmem")
        space = "vmem" if space in ("default", "None") else space
        use = "scratch" if place >= len(refs) - scratch else "block"
        dtype = ref.dtype
        size = getattr(dtype, "itemsize", 4) if "sem" not in str(dtype) else 4
        yield Buffer(space, use, tuple(ref.shape), str(dtype), math.prod(ref.shape) * size)


def _kernels(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in inner_jaxprs(equation):
            yield from _kernels(inner)


def inner_jaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs within an operation: bodies, branches, what it calls."""
    kinds = core.Jaxpr | core.ClosedJaxpr
    params = list(equation.params.values())
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(leaf, kinds):
            yield leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf


def draw_operations(programs: Mapping[str, str], most: int = 14) -> matplotlib.figure.Figure:
    """The commonest operations of lowered programs by name, side by side."""
    counts = {name: operations(x) for name, x in programs.items()}
    total = sum(counts.values(), collections.Counter())
    names = [name for name, _ in total.most_common(most)]
    if "custom_call" in total and "custom_call" not in names:
        names.append("custom_call")
    fig = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    axis = fig.subplots()
    plain(axis)
    wide = 0.8 / len(counts)
    for i, (label, of) in enumerate(counts.items()):
        at = [x + wide * i for x in range(len(names))]
        axis.bar(at, [of[x] for x in names], width=wide, color=COLOURS[i], label=label)
    middle = wide * (len(counts) - 1) / 2
    axis.set_xticks([x + middle for x in range(len(names))], names, rotation=50, ha="right")
    axis.tick_params(labelsize=7)
    axis.set_ylabel("times in the program")
    axis.legend(fontsize=7)
    return fig


def draw_memory(buffers: Sequence[Buffer]) -> matplotlib.figure.Figure:
    """A kernel's buffers, bytes on a log axis, coloured by the memory they are in."""
    spaces = list(dict.fromkeys(x.space for x in buffers))
    fig = matplotlib.figure.Figure(figsize=(8, 0.28 * len(buffers) + 0.9), layout="constrained")
    axis = fig.subplots()
    plain(axis)
    for y, buffer in enumerate(buffers):
        axis.barh(y, buffer.nbytes, color=COLOURS[spaces.index(buffer.space)])
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        place = "the device's, as it is" if buffer.space == "any" else (
            f"{buffer.space}, {buffer.use}"
        )  # fmt: skip
        axis.text(buffer.nbytes, y, f" {place}: {buffer.dtype} {shape}",
                  va="center", fontsize=7)  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlim(1, 1e3 * max(x.nbytes for x in buffers))
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xlabel("bytes")
    return fig
