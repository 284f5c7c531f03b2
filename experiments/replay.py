"""Replays a request trace through the store's own policies, with sizes only.

    python -m experiments.replay [--config.trace=PATH] [--config.parts=ideal,placement]

Writes to the work directory: config.json, run.json, results.json (a cell by name; fields in
`replay_lib.Outcome`), report.md, replay.png. Finished cells are kept and skipped when they would be
the same.
"""

import dataclasses
import pathlib

from experiments import cli, config_tools, progress, replay_lib, replay_report, run_record, traces
from experiments.replay_config import ReplayConfig


def run(config: ReplayConfig) -> dict:
    """Runs the cells that `results.json` does not hold yet, and reports.

    Raises:
        ValueError: the configuration or the trace makes no sense.
    """
    config.check()
    trace = config.load()
    spec = replay_lib.flash_spec(trace.block_size)
    workdir = pathlib.Path(config.workdir)
    values = config_tools.to_dict(config)
    facts = {"trace_digest": trace.digest, "runner": "replay"}
    run_record.write(workdir, values, seed=config.generator.seed, **facts)
    old = run_record.read_json(workdir / "results.json") or {}
    results = {
        "trace": {"name": trace.name, "digest": trace.digest, **traces.statistics_of(trace)},
        "sizes": {
            "spec": "V4-Flash by hand: 584-byte entries, 68-byte index keys, no tails",
            "block_tokens": trace.block_size,
            "block_bytes": spec.block_bytes(),
            "checkpoint_bytes": spec.checkpoint_bytes(),
            "replay_tokens": spec.replay_length,
        },
        "cells": {},
    }
    wanted = config.cells(int(results["trace"]["unique_blocks"]), spec.block_bytes())
    keys: dict[bool, list] = {}
    for number, (name, (part, cell)) in enumerate(wanted.items(), 1):
        asked = {"cell": dataclasses.asdict(cell), "trace": trace.digest, "spec": results["sizes"]}
        digest = run_record.digest(asked)
        done = old.get("cells", {}).get(name, {})
        if done.get("digest") != digest:
            if cell.partial not in keys:
                keys[cell.partial] = replay_lib.keys_of(trace, cell.partial)
            title = f"[{number}/{len(wanted)}] {name}"
            with progress.Progress(len(trace.requests), title=title) as bar:
                found = replay_lib.replay(trace, keys[cell.partial], spec, cell, bar.update)
                bar.update(len(trace.requests))
            done = {"part": part, **asked["cell"], **found.values(), "digest": digest}
        results["cells"][name] = done
        run_record.write_results(workdir, results)
    replay_report.exhibit(results).write(workdir)
    return results


def main(config: ReplayConfig) -> None:
    """Runs and shows the tables."""
    results = run(config)
    cli.show(replay_report.exhibit(results).shown, config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/replay.py")
