"""Layers with a recurrent state: however a sequence is cut, and where it may be resumed."""

import functools
import math

import jax
import numpy as np
import pytest

import models
from hetero_kv.contract import Point
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from models import geometries
from models.config import DecoderConfig
from models.decoder import Decoder
from tests import variants
from tests.models import families, tiny
from tests.models.weights import random_params

LENGTH = 61
LINEAR = {"key_heads": 1, "value_heads": 2, "key_dim": 5, "value_dim": 4, "conv_width": 6}
CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=16,
    layer_types=("gated_delta", "kda", "mamba2", "lightning", "full"),
    mlp_types=("none",) * 5,
    attention={
        "gated_delta": LINEAR,
        "kda": {"linear_heads": 2, "linear_dim": 4},
        "mamba2": {"ssm_heads": 4, "ssm_dim": 3, "ssm_groups": 2, "ssm_states": 5},
        "full": {"attn_gate": True, "rope_first": True},
    },
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    rope_dim=4,
    rope_theta=100.0,
    sinks=False,
    init_scale=1.0,
    chunk=families.CHUNK,
    block=families.BLOCK,
)


@functools.cache
def model() -> tuple[Decoder, Params]:
    """All kinds of recurrent layers, and a full one."""
    made = models.build(CONFIG)
    return made, random_params(made, seed=3)


@functools.cache
def whole() -> np.ndarray:
    """Logits of the forward of training."""
    made, params = model()
    forward = jax.jit(made.forward, compiler_options=tiny.FAST_COMPILE)
    return np.asarray(forward(params, tiny.tokens()[:, :LENGTH]))


SPLITS = [[LENGTH], [5, 16, 1, 30, 9], [1] * LENGTH]


@pytest.mark.parametrize("sizes", variants.some(SPLITS, SPLITS[1:2]))
def test_however_it_is_split_it_is_the_same(sizes: tuple[int, ...]) -> None:
    made, params = model()
    tokens, cache, got, at = tiny.tokens()[:, :LENGTH], tiny.empty(made, True), [], 0
    for size in sizes:
        if size == 1:
            logits, cache = made.decode_step(params, tokens[:, at], cache)
            got.append(np.asarray(logits)[:, None])
        else:
            logits, cache = made.prefill(params, tokens[:, at : at + size], cache)
            got.append(np.asarray(logits))
        at += size
    np.testing.assert_allclose(np.concatenate(got, axis=1), whole(), atol=1e-4)


def test_rows_that_do_not_run_keep_their_bits() -> None:
    """Beside a row that runs, in prefill as in decoding; the ring of the convolution too."""
    made, params = model()
    tokens = tiny.tokens()
    _, cache = made.prefill(params, tokens[:, :21], tiny.empty(made, True))
    before = [np.array(cache.leaf(slot)) for slot in made.cache_spec.slots()]
    _, cache = made.prefill(params, tokens[:, 21:30], cache, np.array([0, 9]))
    _, cache = made.decode_step(params, tokens[:, 30], cache, np.array([False, True]))
    for slot, held in zip(made.cache_spec.slots(), before, strict=True):
        now = np.asarray(cache.leaf(slot))
        assert now[:, 0].tobytes() == held[:, 0].tobytes(), slot.path
        assert now[:, 1].tobytes() != held[:, 1].tobytes(), slot.path


def test_states_are_float32_points() -> None:
    """Also where everything else is bfloat16."""
    spec = models.build(CONFIG.replace(**geometries.HALF)).cache_spec
    shapes = {slot.kind: slot.leaf.width for slot in spec.slots() if slot.name == "state"}
    assert shapes == {
        "gated_delta": (2, 5, 4),
        "kda": (2, 4, 4),
        "mamba2": (4, 5, 3),
        "lightning": (2, 8, 8),
    }
    for slot in spec.slots():
        if slot.name == "state":
            assert slot.leaf.contract == Point() and slot.leaf.dtype == "float32"
        if slot.name == "conv":
            taps = 6 if slot.kind == "gated_delta" else 4
            assert slot.leaf.contract == Point(1, taps - 1)
            for length in range(2 * taps):
                held = slot.leaf.ring_positions(length)[slot.leaf.live_rows(length)]
                assert sorted(held) == list(range(max(0, length - taps + 1), length))
    assert math.isinf(spec.replay_length)


def test_nothing_is_cut_off_a_state() -> None:
    """Only lengths of which a copy was taken are resumed, and no replay of a part is exact."""
    made, params = model()
    tokens = tiny.tokens()[0]
    identity = Identity.of(made.cache_spec, params, made.config, batch=tiny.ROWS)
    with pytest.raises(ValueError, match="nothing can be replayed"):
        PrefixStore(made.cache_spec, identity, host_bytes=1 << 24, policy="zero")
    cases = {"end": {64: 48, 48: 0}, "full": {64: 48, 48: 32}}
    for policy, expected in cases.items():
        store = PrefixStore(made.cache_spec, identity, host_bytes=1 << 24, policy=policy)
        cache = tiny.empty(made, True)
        for stop in (16, 32, 48):
            rest = np.stack([tokens, tokens])[:, int(cache.length[0]) : stop]
            _, cache = made.prefill(params, rest, cache, logits="none")
            store.publish(tokens[:49], cache, 0, points=(48,) if policy == "end" else None)
        for asked, length in expected.items():
            with store.lookup(tokens[:asked]) as lease:
                assert (lease.resumable_length, lease.replay) == (length, None), (policy, asked)
                if not length:
                    assert "no_checkpoint" in {x.code for x in lease.reasons}
    cache = made.replay(params, np.stack([tokens, tokens]), cache, 32, 48)
    assert np.asarray(cache.grid_length).tolist() == [0, 0]  # not to be published
