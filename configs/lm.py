"""Byte models of the standard library with needles in it: rows C1 to C7, and B6 on text.

Chosen so that full attention finds needles within a few hundred steps, a minute or two of one core.
With 256 bytes and few questions from the start it stays at chance for 400 steps and more; 200 steps
on 96 bytes that are mostly needles and questions teach it to copy, and 100 later it copies from
anywhere in 256: 0.77 to 0.92 of the digits after 600 steps (3 seeds). By then it knows needles by
their form, not yet by their names. Heads have 32 channels for the same reason, and angles that turn
within a sequence.
"""

from experiments import lm_config, tasks, train_config
from models import config as model_config


def get_config() -> lm_config.LmConfig:
    task = tasks.Needle(
        batch_size=4,
        length=256,
        needles=4,
        questions=8,
        digits=1,
        text_weight=0.2,
        short_steps=200,
        short_length=96,
    )
    base = train_config.TrainConfig(
        task=task,
        model=model_config.DecoderConfig(
            vocab_size=task.vocab_size,
            d_model=64,
            layer_types=("full",) * 4,
            mlp_types=("dense",) * 4,
            d_ff=160,
            n_heads=2,
            n_kv_heads=2,
            head_dim=32,
            rope_dim=16,
            rope_theta=500.0,
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
        optimizer=train_config.OptimizerConfig(learning_rate=4e-3, warmup_steps=50),
        indexer=train_config.IndexerConfig(dense_steps=200),
        steps=600,
        eval_every=200,
        log_every=20,
    )
    # A batch is small; of few windows and digits, differences between arms would be noise.
    return lm_config.LmConfig(base=base, text_batches=32, grid_batches=12)
