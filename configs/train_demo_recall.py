"""Recall over longer documents: the model of the reuse demo, and its full-attention control.

Facts of the hybrid's documents lie anywhere, also in the last tokens, so that every kind of cached
state holds some that a question needs. `--config=configs/train_demo_recall.py:control` trains the
control, on documents whose facts lie side by side: full attention stays on the plateau of the
scattered form for more than a thousand steps.
"""

from experiments import tasks, train_config
from models import config as model_config

LAYERS = {"hybrid": ("swa", "csa"), "control": ("full", "full")}


def get_config(arm: str = "hybrid") -> train_config.TrainConfig:
    if arm == "hybrid":  # documents of 128 tokens: four chunks of 32
        task = tasks.Recall(pairs=8, slots=64, gap=0, length=160, noise_symbols=16)
    else:  # documents of 96 tokens
        task = tasks.Recall(pairs=8, gap=80, length=128)
    return train_config.TrainConfig(
        task=task,
        model=model_config.DecoderConfig(
            vocab_size=task.vocab_size,
            layer_types=LAYERS[arm],
            mlp_types=("dense", "dense"),
            head_dim=64,
            rope_dim=16,
            csa_ratio=2,
            index_topk=8,
            tie_embeddings=True,
            init_scale=0.3,
            chunk=32,
            block=16,
        ),
        indexer=train_config.IndexerConfig(dense_steps=300),
        steps=2_000,
        target_accuracy=0.999,
        workdir=f"runs/train_demo_recall_{arm}",
    )
