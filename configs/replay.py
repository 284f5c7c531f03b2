"""Trace replay with sizes only: about two minutes a trace, resumable.

`--config.trace=PATH` reads a file of Mooncake's format; without it a trace is generated.
"""

from experiments import replay_config


def get_config() -> replay_config.ReplayConfig:
    return replay_config.ReplayConfig()
