"""The fault matrix: faults × checks switched off, on the shipped recall model."""

from experiments import faults_config


def get_config() -> faults_config.FaultsConfig:
    """A covering sample; `--config.sample=all` takes every component."""
    return faults_config.FaultsConfig()
