"""The main job: the same requests with reuse off, by hash only, and validated."""

from experiments import reuse_config


def get_config() -> reuse_config.ReuseConfig:
    """All scenarios at the size of the demo."""
    return reuse_config.ReuseConfig()
