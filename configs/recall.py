"""What hybrids recall: rows B1 to B7, on a dense associative recall that two layers learn quickly.

Half of `train_recall` in tokens and facts: an arm that learns does so in some 300 steps, less than
a minute of one core. `--config.base.…` makes it larger.
"""

from configs import train_recall
from experiments import recall_config, tasks


def get_config() -> recall_config.RecallConfig:
    base = train_recall.get_config()
    base.task = tasks.Recall(length=64, pairs=4, gap=16, vocab=32, eval_batches=8)
    base.model.vocab_size = base.task.vocab_size
    base.model.window, base.model.d_ff = 8, 64  # the gap is longer than the reach of two windows
    base.indexer.dense_steps, base.optimizer.warmup_steps = 150, 50
    base.steps, base.eval_every = 550, 25
    return recall_config.RecallConfig(base=base)
