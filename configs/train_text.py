"""Byte-level language model of the standard library: a small hybrid of all layer kinds."""

from experiments import tasks, train_config
from models import config as model_config


def get_config() -> train_config.TrainConfig:
    task = tasks.Text(length=512, batch_size=4, eval_batches=32)
    return train_config.TrainConfig(
        task=task,
        model=model_config.DecoderConfig(
            vocab_size=task.vocab_size,
            d_model=64,
            layer_types=("swa", "csa", "hca", "csa"),
            mlp_types=("dense",) * 4,
            d_ff=160,
            n_heads=4,
            head_dim=32,
            rope_dim=16,
            window=32,
            csa_ratio=4,
            hca_ratio=32,
            index_heads=4,
            index_topk=16,
            tie_embeddings=True,
            init_scale=0.1,
        ),
        indexer=train_config.IndexerConfig(dense_steps=200),
        steps=1_200,
        eval_every=200,
        workdir="runs/train_text",
    )
