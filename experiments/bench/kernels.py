"""Times of kernels beside their references, and the roofline of the device, both measured here."""

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


def program(run: Callable, layers: int, inner: int, keep: Callable | None = None) -> Callable:
    """`inner` calls of run(layer, arrays), jitted: arrays -> arrays, the last result.

    keep: see `Case`; then the arrays are given away, and the last result is within the new ones.
    """

    def one(i: jax.Array, arrays: Any) -> tuple[Any, Any]:
        out = run(jax.lax.rem(i, layers), arrays)
        return (None, out) if keep is None else (keep(arrays, out), None)

    def many(arrays: Any) -> tuple[Any, Any]:
        def body(i: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            return one(i, arrays if keep is None else state[0])

        return jax.lax.fori_loop(1, inner, body, one(jnp.int32(0), arrays))

    return jax.jit(many, donate_argnums=0 if keep else ())


def seconds(
    run: Callable, arrays: Any, layers: int, config: KernelBenchConfig, keep: Callable | None = None
) -> tuple[float, Any]:
    """Median seconds of one call of run(layer, arrays), and its last result."""
    many = program(run, layers, config.inner, keep)
    arrays = jax.tree.map(jnp.copy, arrays) if keep else arrays

    def once() -> tuple[Any, Any]:
        new, out = jax.block_until_ready(many(arrays))
        return (arrays, out) if keep is None else (new, new[0])

    arrays, out = once()
    samples, end = [], time.monotonic() + config.case_seconds
    while len(samples) < config.repeats and (not samples or time.monotonic() < end):
        began = time.perf_counter()
        arrays, out = once()
        samples.append((time.perf_counter() - began) / config.inner)
    return median(samples), out


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

    return {
        "copy_bytes_per_s": 2 * x.nbytes / seconds(copy, x, 2, config)[0],
        "flops_per_s": 2 * side**3 / seconds(product, a, 2, config)[0],
    }


def measure(case: Case, config: KernelBenchConfig, layers: int, device: dict) -> dict:
    """One row: times, fraction of the roofline, and how much agrees with the reference."""

    def timed(implementation: str) -> tuple[float, Any]:
        def run(layer: jax.Array, arrays: Any) -> Any:
            return case.run(layer, arrays, implementation)

        return seconds(run, case.arrays, layers, config, case.keep)

    bound = max(case.bytes / device["copy_bytes_per_s"], case.flops / device["flops_per_s"])
    row = {"op": case.op, "case": case.name, "bytes": case.bytes, "flops": case.flops}
    kernel = config.implementation
    if kernel == "auto":
        kernel = KERNELS.get(platform(), "reference")
    row |= {"implementation": kernel, "roofline_us": bound * 1e6}
    reference, want = timed("reference")
    row["reference_us"] = reference * 1e6
    if kernel == "reference":
        return row
    try:
        jax.eval_shape(lambda arrays: case.run(jnp.int32(0), arrays, kernel), case.arrays)
        used, got = timed(kernel)
    except NotImplementedError as error:
        return row | {"refused": str(error)}
    row |= {"agrees": case.same(got, want), "kernel_us": used * 1e6}
    row["of_roofline"] = bound * 1e6 / row["kernel_us"]
    row["speedup"] = row["reference_us"] / row["kernel_us"]
    return row


def interpreted(case: Case) -> dict:
    """How much of one call agrees with the reference where the TPU's kernel is interpreted."""

    def once(implementation: str) -> Any:
        out = jax.jit(lambda arrays: case.run(jnp.int32(0), arrays, implementation))(case.arrays)
        return out if case.keep is None else case.keep(case.arrays, out)[0]

    try:
        return {"agrees": case.same(once("interpret"), once("reference")), "checked": "interpret"}
    except NotImplementedError as error:
        return {"refused": str(error)}


def run(config: KernelBenchConfig) -> dict:
    """All cases that the time allows."""
    began = time.monotonic()
    geometry, contexts = config.of(platform())
    device = roofline(config)
    rows, left = [], []
    for tokens in contexts:
        first = tokens == contexts[0]
        cases = Cases(geometry, config.batch, tokens, config.seed, first)
        for op in config.ops:
            for case in cases.of(op):
                if time.monotonic() - began > config.seconds:
                    left.append(f"{case.op} {case.name}")
                    continue
                row = measure(case, config, geometry.layers, device)
                if config.interpret and first and row["implementation"] == "reference":
                    row |= interpreted(case)
                rows.append(row)
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
    if any("checked" in row for row in results["rows"]):
        note += " Kernels were interpreted here to check them; only references were timed."
    for row in results["rows"]:
        note += f" {row['op']} {row['case']}: {row['refused']}." if "refused" in row else ""
    if results["left_out"]:
        note += f" No time for: {', '.join(results['left_out'])}."
    columns = ("op", "case", "runs", "roofline µs", "reference µs", "kernel µs", "of roofline")
    columns += ("reference / kernel", "agrees")
    return Table(f"Kernels on {results['platform']['device_kind']}", columns, rows, note)
