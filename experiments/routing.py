"""Which instance should serve a request: round robin, by load, by prefix, or by both.

    python -m experiments.routing [--config.trace.path=PATH] [--config.instances=1,4]

Writes to the work directory: config.json, run.json, results.json (`routing_lib.Routed` by instances
and way), report.md and a figure.
"""

from experiments import (
    cli,
    config_tools,
    progress,
    replay_lib,
    routing_lib,
    routing_report,
    run_record,
)
from experiments.routing_config import RoutingConfig


def run(config: RoutingConfig) -> dict:
    """Runs every cell and reports.

    Raises:
        ValueError: the configuration or the trace makes no sense.
    """
    config.check()
    trace = config.trace.load()
    values = config_tools.to_dict(config)
    run_record.write(config.workdir, values, seed=config.trace.generator.seed, runner="routing",
                     trace_digest=trace.digest)  # fmt: skip
    spec = replay_lib.flash_spec(trace.block_size)
    capacity = int(config.capacity * trace.unique_blocks() * spec.block_bytes())
    cell = replay_lib.Cell(config.checkpoints, config.order, capacity)
    keys = replay_lib.keys_of(trace, partial=False)
    asked = [(n, way) for n in config.instances for way in config.routes]
    found: dict[str, dict] = {}
    with progress.Progress(len(asked), title="routing") as bar:
        for done, (count, way) in enumerate(asked, 1):
            routed = routing_lib.route(trace, keys, spec, cell, count, way, config.utilisation)
            found.setdefault(str(count), {})[way] = routed.values()
            bar.update(done)
    results = {"trace": trace.name, "capacity_bytes": capacity, "config": values, "routes": found}
    run_record.write_results(config.workdir, results)
    routing_report.exhibit(results).write(config.workdir)
    return results


def main(config: RoutingConfig) -> None:
    """Runs and shows the table."""
    cli.show(routing_report.exhibit(run(config)).shown, config.workdir, width=None)


if __name__ == "__main__":
    cli.run(main, default="configs/routing.py")
