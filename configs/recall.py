"""What hybrids recall: rows B1 to B7, on dense associative recall of two layers."""

from configs import train_recall
from experiments import recall_config


def get_config() -> recall_config.RecallConfig:
    base = train_recall.get_config()
    base.steps = 1_000
    return recall_config.RecallConfig(base=base)
