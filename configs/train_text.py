"""Byte-level language model of the standard library's sources: a small hybrid."""

from experiments import tasks, train_config
from models import config as model_config


def get_config() -> train_config.TrainConfig:
    task = tasks.Text(length=256, batch_size=8)
    return train_config.TrainConfig(
        task=task,
        model=model_config.DecoderConfig(
            vocab_size=task.vocab_size,
            d_model=64,
            layer_types=("swa", "csa", "hca", "csa"),
            mlp_types=("dense",) * 4,
            window=16,
            csa_ratio=4,
            hca_ratio=16,
            index_topk=16,
        ),
        optimizer=train_config.OptimizerConfig(learning_rate=2e-3),
        steps=3_000,
        eval_every=250,
        workdir="runs/train_text",
    )
