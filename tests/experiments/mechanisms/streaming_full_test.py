"""Full attention cut to a window and the first tokens, against plain numpy."""

import jax
import numpy as np
import pytest

import models
from models.config import DecoderConfig

STREAMING = "experiments.mechanisms.streaming_full"
CONFIG = DecoderConfig(
    vocab_size=16, d_model=16, d_ff=16, head_dim=8, rope_dim=4, layer_types=("full",),
    mlp_types=("dense",), sinks=False, init_scale=0.5,
)  # fmt: skip


def streaming(width: int, first: int) -> DecoderConfig:
    own = {"mechanism": STREAMING, "stream_width": width, "stream_first": first}
    return CONFIG.replace(attention={"full": own})


def test_it_is_full_attention_where_nothing_is_cut() -> None:
    params = models.build(CONFIG).init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 16, (2, 12)).astype(np.int32)
    whole = jax.jit(models.build(CONFIG).forward)(params, tokens)
    for width, first in ((12, 0), (1, 12), (6, 6)):
        cut = jax.jit(models.build(streaming(width, first)).forward)(params, tokens)
        np.testing.assert_allclose(cut, whole, atol=1e-6)


@pytest.mark.parametrize("first", [0, 2])
def test_tokens_in_between_are_not_seen(first: int) -> None:
    model = models.build(streaming(3, first))
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(1).integers(0, 16, (1, 12)).astype(np.int32)
    rows = np.repeat(tokens, 11, 0)  # row i has another token at place i, the last row none
    place = np.arange(10)
    rows[place, place] = (rows[place, place] + 1) % 16
    logits = np.asarray(jax.jit(model.forward)(params, rows))
    moved = np.abs(logits[:10] - logits[10]).max(-1) > 1e-6
    query, place = np.arange(12), place[:, None]
    sees = (query >= place) & ((query - place < 3) | (place < first))
    np.testing.assert_array_equal(moved, sees)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="stream_width=0"):
        models.build(streaming(0, 0))
