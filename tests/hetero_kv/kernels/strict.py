"""Runs kernels under strict interpreters, and lowers them for accelerators, on a CPU host."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax.experimental.pallas import tpu as pltpu

from experiments.lowering import text as lowered
from hetero_kv.kernels import interpret

__all__ = ["gpu_interpreter", "kernels_in", "largest", "lowered", "tpu"]

CUSTOM_CALL = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """An interpreter without state of earlier runs; also after an exception."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def tpu(run: Callable, *args: Any) -> Any:
    """`run(*args)` as numpy arrays; run calls TPU kernels with `interpret=interpret.tpu()`.

    Fails where the interpreter saw a race.
    """
    with _fresh():
        out = jax.tree.map(np.asarray, jax.block_until_ready(run(*args)))
        races = tpu_interpreter.races
        assert races is not None, "no kernel ran under the interpreter"
        assert not races.races_found, "a race"
    return out


def gpu_interpreter(detect_races: bool = True) -> Any:
    """For `plgpu.kernel(interpret=...)`; skips the test where this JAX has no interpreter."""
    try:
        return interpret.gpu(detect_races)
    except NotImplementedError as error:
        pytest.skip(str(error))


def kernels_in(text: str, platform: str) -> int:
    """How many kernel calls a lowered module has."""
    return text.count(f"@{CUSTOM_CALL[platform]}") or text.count(CUSTOM_CALL[platform])


def largest(text: str) -> int:
    """Bytes of the largest value that a lowered module makes: arguments and views do not count."""
    found = [0]
    views = ("stablehlo.reshape", "stablehlo.return", "func.return", "func.call", "func.func")

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name not in (*views, "stablehlo.case", "builtin.module"):
            found.extend(_bytes(str(result.type)) for result in op.results)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        module.operation.walk(visit)
    return max(found)


def _bytes(kind: str) -> int:
    """Of a value whose MLIR type is `tensor<4x8xf32>`."""
    *sizes, element = re.fullmatch(r"tensor<(.*)>", kind)[1].split("x")
    return math.prod(map(int, sizes)) * int(re.search(r"\d+", element)[0]) // 8
