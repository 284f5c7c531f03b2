"""Checkpoints of recurrent state, which are large: at every block, or where prompts part."""

from experiments import admission_config


def get_config() -> admission_config.AdmissionConfig:
    return admission_config.AdmissionConfig()
