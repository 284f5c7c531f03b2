"""What hybrids recall: rows B1 to B7, on dense associative recall of two layers."""

from configs import train_recall
from experiments import recall_config


def get_config() -> recall_config.RecallConfig:
    base = train_recall.get_config()
    # Half the queries of `train_recall` teach as much in three quarters of the time.
    base.task.length, base.task.eval_batches = 96, 8
    base.steps = 700
    return recall_config.RecallConfig(base=base)
