"""Compile time in a fresh process: no compilation cache, nothing warmed up."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import models
from experiments import config_tools
from experiments.bench import timing
from experiments.bench.bench_config import BenchConfig
from models import config as model_config

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CHILD = "from experiments.bench import compile_time; compile_time.child()"


@dataclasses.dataclass(kw_only=True)
class Job:
    """One program to compile; crosses the process boundary as JSON."""

    model: model_config.DecoderConfig
    program: str
    batch: int
    capacity: int


def cell(
    config: BenchConfig,
    program: str,
    layout: str,
    shown: Callable[[int, Mapping[str, float] | None], None],
) -> dict:
    """Medians over several processes; see `runner.FIELDS`."""
    job = Job(
        model=config.compile.model.replace(scan_layers=layout == "stacked"),
        program=program,
        batch=config.compile.batch,
        capacity=config.compile.capacity,
    )
    samples: dict[str, list[float]] = {}
    for done in range(config.compile.processes):
        for name, value in in_fresh_process(job).items():
            samples.setdefault(name, []).append(value)
        shown(done + 1, {"seconds": timing.median(samples["total_s"])})
    return {
        "part": "compile",
        "program": program,
        "layout": layout,
        "layers": len(job.model.layer_types),
        **{name: timing.median(values) for name, values in samples.items()},
        "samples": samples,
    }


def in_fresh_process(job: Job) -> dict[str, float]:
    """Seconds of one compilation: what `measure` returns.

    Raises:
      ChildProcessError: The process failed; the message ends with what it printed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    text = json.dumps(config_tools.to_dict(job))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, text],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildProcessError(f"compiling {job.program} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child() -> None:
    """The other process: reads a job from its arguments, prints the seconds."""
    print(json.dumps(measure(config_tools.from_dict(Job, json.loads(sys.argv[1])))))


def measure(job: Job) -> dict[str, float]:
    """Traces, lowers and compiles a program for shapes alone: there are no weights.

    Returns:
      {"trace_s", "lower_s", "compile_s", "total_s"}, and "processor_s" of all cores together.
    """
    model = models.build(job.model)
    function, arguments = _program(model, job)
    jax.jit(lambda x: x + 1)(jnp.zeros(()))  # the backend is up before the clock starts
    processor = time.process_time()
    marks = [time.perf_counter()]
    traced = jax.jit(function, donate_argnums=2).trace(*arguments)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    lowered.compile()
    marks.append(time.perf_counter())
    names = ("trace_s", "lower_s", "compile_s")
    parts = {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
    total, processor = marks[-1] - marks[0], time.process_time() - processor
    return parts | {"total_s": total, "processor_s": processor}


def _program(model: models.Decoder, job: Job) -> tuple[Callable, tuple]:
    params, cache = model.abstract_params(), model.abstract_cache(job.batch, job.capacity)

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    if job.program == "decode_step":
        return model.decode_step, (params, tokens(job.batch), cache)

    def call(params, tokens, cache, count):
        return model.stack.call(
            params, tokens, count, cache, jnp.zeros_like(count), logits="last", replay=False
        )

    columns = model.config.chunk
    return call, (params, tokens(job.batch, columns), cache, tokens(job.batch))
