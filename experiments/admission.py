"""Where state is large: a checkpoint at every block against one where prompts part, and at the end.

    python -m experiments.admission [--config.state_dims=128] [--config.capacities=0.05,0.2]

Writes to the work directory: config.json, run.json, results.json (`replay_lib.Outcome` by cell),
report.md and a figure.
"""

from experiments import (
    admission_report,
    cli,
    config_tools,
    progress,
    replay_lib,
    run_record,
    traces,
)
from experiments.admission_config import AdmissionConfig
from hetero_kv.contract import CacheSpec, History, LayerSpec, Leaf, Point, Segment
from hetero_kv.prefix.policy import Flops


def hybrid(config: AdmissionConfig, state_dim: int, block: int) -> CacheSpec:
    """Bytes of the cache: keys and values a token, and state of 2 d_model x state_dim a layer."""
    rows = Leaf(
        contract=History(1), component="full kv", width=(2 * config.d_model,), dtype="bfloat16"
    )
    segments = [Segment(config.attention_layers, (LayerSpec("full", (("kv", rows),)),))]
    if state_dim and config.recurrent_layers:
        state = Leaf(contract=Point(), component="recurrent state",
                     width=(2 * config.d_model, state_dim), dtype="bfloat16")  # fmt: skip
        layer = LayerSpec("recurrent", (("state", state),))
        segments.append(Segment(config.recurrent_layers, (layer,)))
    return CacheSpec(tuple(segments), chunk=block, block=block)


def run(config: AdmissionConfig) -> dict:
    """Runs every cell and reports.

    Raises:
        ValueError: the configuration or the trace makes no sense.
    """
    config.check()
    trace = traces.refine(config.trace.load(), config.refine)
    values = config_tools.to_dict(config)
    run_record.write(config.workdir, values, seed=config.trace.generator.seed, runner="admission",
                     trace_digest=trace.digest)  # fmt: skip
    flops = Flops(2 * config.parameters, 4.0 * config.attention_layers * config.d_model)
    keys, unique = replay_lib.keys_of(trace, partial=False), trace.unique_blocks()
    asked = [
        (dim, share, placement, order)
        for dim in config.state_dims
        for share in config.capacities
        for placement in config.placements
        for order in config.orders
    ]
    results: dict = {"trace": trace.name, "config": values, "sizes": {}, "cells": {}}
    with progress.Progress(len(asked), title="admission") as bar:
        for done, (dim, share, placement, order) in enumerate(asked, 1):
            spec = hybrid(config, dim, trace.block_size)
            sizes = {"block": spec.block_bytes(), "checkpoint": spec.checkpoint_bytes()}
            results["sizes"][str(dim)] = sizes
            capacity = max(1, int(share * unique * spec.block_bytes()))
            cell = replay_lib.Cell(placement, order, capacity, partial=False)
            found = replay_lib.replay(trace, keys, spec, cell, flops=flops)
            name = f"{dim}/{share:g}/{placement}/{order}"
            results["cells"][name] = found.values()
            bar.update(done)
    run_record.write_results(config.workdir, results)
    admission_report.exhibit(results).write(config.workdir)
    return results


def main(config: AdmissionConfig) -> None:
    """Runs and shows the tables."""
    cli.show(admission_report.exhibit(run(config)).shown, config.workdir, width=None)


if __name__ == "__main__":
    cli.run(main, default="configs/admission.py")
