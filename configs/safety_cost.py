"""The cost of safety: validation and pages per decode step, the engine's rate, warm first token."""

from experiments import safety_config


def get_config() -> safety_config.SafetyConfig:
    """`--config.parts=step` measures one part."""
    return safety_config.SafetyConfig()
