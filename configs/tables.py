"""Counted tables: bytes and operations of released models. Seconds; `--config.context=…`."""

from experiments import tables_config


def get_config() -> tables_config.TablesConfig:
    return tables_config.TablesConfig()
