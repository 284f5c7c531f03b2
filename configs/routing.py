"""Routing over instances: `--config.trace.path=PATH` reads a trace, without it one is generated."""

from experiments import routing_config


def get_config() -> routing_config.RoutingConfig:
    return routing_config.RoutingConfig()
