"""Times of kernels beside their references, and the roofline of the device, both measured here."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.kernel_cases import Case, Cases
from experiments.bench.kernel_config import KERNELS, PLATFORMS, KernelBenchConfig
from experiments.bench.report import Table
from experiments.bench.timing import median


def platform() -> str:
    """What the default device is lowered for: "cpu", "cuda" or "tpu"."""
    return PLATFORMS.get(jax.default_backend(), jax.default_backend())


def seconds(run: Callable, arrays: Any, layers: int, inner: int, repeats: int) -> float:
    """Median seconds of one call of run(layer, arrays), `inner` of them in one program."""

    @jax.jit
    def many(arrays: Any) -> Any:
        def body(i: jax.Array, _: Any) -> Any:
            return run(jax.lax.rem(i, layers), arrays)

        return jax.lax.fori_loop(1, inner, body, run(jnp.int32(0), arrays))

    jax.block_until_ready(many(arrays))
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(many(arrays))
        samples.append((time.perf_counter() - began) / inner)
    return median(samples)


def roofline(config: KernelBenchConfig) -> dict[str, float]:
    """Bytes per second of a copy (read and written), and FLOPs per second of a bfloat16 product."""
    small = platform() == "cpu"
    size = config.copy_bytes // 4 // (16 if small else 1)
    side = config.matmul // (8 if small else 1)
    x = jnp.ones((2, size // 2), jnp.float32)

    def copy(layer: jax.Array, x: jax.Array) -> jax.Array:
        return x + layer.astype(jnp.float32)

    a = jnp.ones((2, side, side), jnp.bfloat16)

    def product(layer: jax.Array, a: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False)
        return jnp.matmul(one, a[0], preferred_element_type=jnp.float32)

    timed = functools.partial(seconds, layers=2, inner=config.inner, repeats=config.repeats)
    return {
        "copy_bytes_per_s": 2 * x.nbytes / timed(copy, x),
        "flops_per_s": 2 * side**3 / timed(product, a),
    }


def measure(case: Case, config: KernelBenchConfig, layers: int, device: dict) -> dict:
    """One row: times, fraction of the roofline, and how much agrees with the reference."""
    timed = functools.partial(
        seconds, arrays=case.arrays, layers=layers, inner=config.inner, repeats=config.repeats
    )

    def run(implementation: str) -> Callable:
        return lambda layer, arrays: case.run(layer, arrays, implementation)

    bound = max(case.bytes / device["copy_bytes_per_s"], case.flops / device["flops_per_s"])
    row = {"op": case.op, "case": case.name, "bytes": case.bytes, "flops": case.flops}
    kernel = config.implementation
    if kernel == "auto":
        kernel = KERNELS.get(platform(), "reference")
    row |= {"implementation": kernel, "roofline_us": bound * 1e6}

    def once(implementation: str) -> Callable:
        return lambda arrays: case.run(jnp.int32(0), arrays, implementation)

    try:
        jax.eval_shape(once(kernel), case.arrays)
    except NotImplementedError as error:
        return row | {"refused": str(error)}
    row["reference_us"] = timed(run("reference")) * 1e6
    if kernel == "reference":
        return row
    got, want = (jax.jit(once(x))(case.arrays) for x in (kernel, "reference"))
    row["agrees"] = case.same(got, want)
    row["kernel_us"] = timed(run(kernel)) * 1e6
    row["of_roofline"] = bound * 1e6 / row["kernel_us"]
    row["speedup"] = row["reference_us"] / row["kernel_us"]
    return row


def run(config: KernelBenchConfig) -> dict:
    """All cases that the time allows."""
    began = time.monotonic()
    geometry, contexts = config.of(platform())
    device = roofline(config)
    rows, left = [], []
    for tokens in contexts:
        cases = Cases(geometry, config.batch, tokens, config.seed)
        for op in config.ops:
            for case in cases.of(op):
                if time.monotonic() - began > config.seconds:
                    left.append(f"{case.op} {case.name}")
                else:
                    rows.append(measure(case, config, geometry.layers, device))
    return {"device": device, "rows": rows, "left_out": left}


def table(results: dict) -> Table:
    """The rows as text."""

    def text(row: dict, name: str, form: str) -> str:
        return format(row[name], form) if name in row else "–"

    rows = [
        (
            row["op"],
            row["case"],
            row["implementation"] if "refused" not in row else "refused",
            text(row, "roofline_us", ".1f"),
            text(row, "reference_us", ".1f"),
            text(row, "kernel_us", ".1f"),
            text(row, "of_roofline", ".0%"),
            text(row, "speedup", ".2f"),
            text(row, "agrees", ".2%"),
        )
        for row in results["rows"]
    ]
    device = results["device"]
    note = (
        f"Roofline: the larger of bytes at {device['copy_bytes_per_s'] / 1e9:.0f} GB/s (a copy) "
        f"and FLOPs at {device['flops_per_s'] / 1e12:.2f} T/s (a bfloat16 product), both measured."
    )
    for row in results["rows"]:
        note += f" {row['op']} {row['case']}: {row['refused']}." if "refused" in row else ""
    if results["left_out"]:
        note += f" No time for: {', '.join(results['left_out'])}."
    columns = ("op", "case", "runs", "roofline µs", "reference µs", "kernel µs", "of roofline")
    columns += ("reference / kernel", "agrees")
    return Table(f"Kernels on {results['platform']['device_kind']}", columns, rows, note)
