"""Published sizes and operations, counted from cache pytrees and model code. Nothing is trained.

    python -m experiments.tables [--config.context=1048576] [--config.convention=fp4_half]

Writes to the work directory: config.json, run.json, results.json (rows of `tables_rows` by name),
report.md and figures.
"""

from experiments import cli, config_tools, run_record, tables_report, tables_rows
from experiments.tables_config import TablesConfig


def run(config: TablesConfig) -> dict:
    """Counts everything and reports.

    Raises:
        ValueError: the configuration makes no sense.
    """
    config.check()
    values = config_tools.to_dict(config)
    run_record.write(config.workdir, values, seed=config.seed, runner="tables")
    pages = tables_rows.allocator(config)  # first: it refuses pages and lengths that do not fit
    sizes = tables_rows.kv_sizes(config)
    results = {
        "config": values,
        "kv": sizes,
        "operations": tables_rows.operations(config),
        "ratios": tables_rows.ratios(config),
        "allocator": pages,
        "prices": tables_rows.prices(config, sizes["v4_flash"]["packed_per_token"]),
    }
    run_record.write_results(config.workdir, results)
    tables_report.exhibit(results).write(config.workdir)
    return results


def main(config: TablesConfig) -> None:
    """Counts and shows the tables."""
    results = run(config)
    cli.show(tables_report.exhibit(results).shown, config.workdir, width=160)


if __name__ == "__main__":
    cli.run(main, default="configs/tables.py")
