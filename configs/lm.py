"""Byte models of the standard library with needles in it: rows C1 to C7, and B6 on text."""

from experiments import lm_config, tasks, train_config
from models import config as model_config


def get_config() -> lm_config.LmConfig:
    task = tasks.Needle(batch_size=8, length=256, needles=2, questions=2, text_weight=0.1)
    base = train_config.TrainConfig(
        task=task,
        model=model_config.DecoderConfig(
            vocab_size=task.vocab_size,
            d_model=64,
            layer_types=("full",) * 4,
            mlp_types=("dense",) * 4,
            d_ff=160,
            n_heads=4,
            n_kv_heads=4,
            head_dim=16,
            rope_dim=16,
            window=32,
            sinks=False,
            csa_ratio=4,
            csa_overlap=True,
            hca_ratio=32,
            index_heads=4,
            index_topk=16,
            tie_embeddings=True,
            init_scale=0.3,
        ),
        indexer=train_config.IndexerConfig(dense_steps=200),
        steps=600,
        eval_every=200,
        log_every=20,
    )
    return lm_config.LmConfig(base=base)
