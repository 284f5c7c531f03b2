"""Models of a few thousand weights for tests of what times requests with shared prefixes."""

import models
from models.config import DecoderConfig


def tiny(*layers: str) -> DecoderConfig:
    """G = 16."""
    return models.DecoderConfig(
        vocab_size=32, d_model=16, n_heads=2, n_kv_heads=1, head_dim=8, rope_dim=4, d_ff=16,
        layer_types=layers, mlp_types=("dense",) * len(layers), window=4, csa_ratio=4,
        index_topk=2, index_heads=2, index_dim=8, chunk=16, block=16, scan_layers=False,
    )  # fmt: skip


HYBRID, FULL = tiny("swa", "csa"), tiny("full")
