"""Times the prefix store.

    python -m experiments.bench_store [--config.control_plane.blocks=64]

Writes results.json and report.md to the work directory.
"""

import importlib
import pathlib
from collections.abc import Sequence

from experiments import cli, config_tools, run_record
from experiments.bench.report import Table
from experiments.bench.store_config import StoreBenchConfig


def run(config: StoreBenchConfig) -> dict:
    """Measures every part that the configuration names."""
    config.check()
    config = config.effective()
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, config_tools.to_dict(config), seed=config.control_plane.seed)
    results = {"platform": run_record.platform_info(), "parts": {}}
    for part in config.parts:
        # By name, so that one part runs where another cannot be imported.
        module = importlib.import_module(f"experiments.bench.{part}")
        results["parts"][part] = module.run(getattr(config, part))
        run_record.write_results(workdir, results)
    (workdir / "report.md").write_text("\n".join(x.markdown() for x in tables(results)))
    return results


def tables(results: dict) -> list[Table]:
    """One per part."""
    found = []
    for part, rows in results["parts"].items():
        found.append(_control_plane(rows) if part == "control_plane" else _plain(part, rows))
    return found


def _control_plane(rows: Sequence[dict]) -> Table:
    columns = ("block, room", "requests/s", "goal", "wall/s", "key", "lookup", "publish", "release")
    shown = [
        [
            f"{x['block']}, {x['room']:g}",
            f"{x['requests_per_s']:,.0f}",
            f"{x['goal']:,}" if x["goal"] else "",
            f"{x['wall_per_s']:,.0f}",
            *(f"{x['microseconds'][k]:.1f}" for k in columns[4:]),
        ]
        for x in rows
    ]
    note = (
        "requests/s by CPU time of one process, metrics on; parts in microseconds a request, with "
        "the clock's own share. room: capacity over what all prompts take; below 1 it evicts."
    )
    return Table("Control plane, sizes only", columns, shown, note)


def _plain(part: str, rows: Sequence[dict]) -> Table:
    columns = [k for k, v in rows[0].items() if not isinstance(v, dict | list)] if rows else []
    shown = [
        [f"{x[k]:.4g}" if isinstance(x[k], float) else str(x[k]) for k in columns] for x in rows
    ]
    return Table(part.replace("_", " "), columns, shown)


def main(config: StoreBenchConfig) -> None:
    """Measures and prints the tables."""
    results = run(config)
    cli.show(tables(results), config.effective().workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/bench_store.py")
