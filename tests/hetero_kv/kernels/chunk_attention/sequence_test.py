"""Attention over whole sequences: values and gradients against one dense softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util

from hetero_kv.attention import selection
from hetero_kv.kernels.chunk_attention import sequence
from hetero_kv.kernels.chunk_attention.operands import Chosen, Rule
from hetero_kv.kernels.chunk_attention.sequence import Inputs, sequence_attention
from tests import variants
from tests.hetero_kv.kernels import memory, strict

BATCH, HEADS, CHANNELS, RATIO, TOPK = 2, 8, 16, 4, 2
RULE = Rule(CHANNELS**-0.5, RATIO, 4)


def make(tokens: int, window: bool, entries: bool, sinks: bool, topk: bool):
    rng = np.random.default_rng(tokens)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    count = tokens // RATIO
    inputs = Inputs(
        numbers(BATCH, tokens, HEADS, CHANNELS),
        numbers(BATCH, tokens, CHANNELS) if window else None,
        numbers(BATCH, count, CHANNELS) if entries else None,
        numbers(HEADS) if sinks else None,
    )
    seen = jnp.arange(count) < ((jnp.arange(tokens) + 1) // RATIO)[:, None]
    seen = jnp.broadcast_to(seen, (BATCH, tokens, count))
    if not topk:
        return inputs, None, seen
    order = selection.order_keys(numbers(BATCH, tokens, count), seen)
    low, cut = selection.thresholds(order, TOPK, jnp.int32(1), count)
    picked = selection.chosen(order, jnp.arange(count), low, cut)
    return inputs, Chosen(order, low, cut), picked


def dense(inputs: Inputs, mask: jax.Array, width: int) -> jax.Array:
    """All keys at once, differentiated by JAX."""
    q, kv, entries, sinks = inputs
    tokens = q.shape[1]
    gap = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    near = jnp.broadcast_to((gap >= 0) & (gap < width), (BATCH, tokens, tokens))
    parts = [(kv, near)] if kv is not None else []
    parts += [(entries, mask)] if entries is not None else []
    keys = jnp.concatenate([rows for rows, _ in parts], axis=1)
    seen = jnp.concatenate([visible for _, visible in parts], axis=2)
    logits = jnp.einsum("bthc,bkc->bthk", q, keys) * RULE.scale
    logits = jnp.where(seen[:, :, None], logits, -1e30)
    if sinks is not None:
        own = jnp.broadcast_to(sinks[:, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, own], axis=-1)
    share = jax.nn.softmax(logits, axis=-1)[..., : keys.shape[1]]
    share = jnp.where(seen[:, :, None], share, 0.0)
    return jnp.einsum("bthk,bkc->bthc", share, keys)


CASES = {  # tokens, window's width, entries, sinks, choices, implementation
    "window": (21, 5, False, True, False, "reference"),
    "no window": (24, 0, True, False, False, "reference"),
    "one band": (8, 40, True, True, True, "reference"),
    "kernel": (16, 5, True, True, True, "interpret"),
}


@pytest.mark.parametrize("name", variants.some(CASES, ("window", "no window")))
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, entries, sinks, topk, implementation = CASES[name]
    monkeypatch.setattr(sequence, "BAND", 6)  # several bands, the last of which overlaps
    inputs, chosen, mask = make(tokens, width > 0, entries, sinks, topk)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs.q.shape), jnp.float32)

    def loss(run, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        out = run(inputs)
        return jnp.sum(jnp.sin(out) * weights), out

    def ours(inputs: Inputs) -> jax.Array:
        rest = inputs._asdict()
        q = rest.pop("q")
        return sequence_attention(
            q, **rest, chosen=chosen, width=width, rule=RULE, implementation=implementation
        )

    def grads(run):
        return jax.jit(jax.grad(functools.partial(loss, run), has_aux=True))(inputs)

    want = grads(lambda x: dense(x, mask, width))
    got = strict.tpu(lambda: grads(ours)) if implementation == "interpret" else grads(ours)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)
        assert np.abs(np.asarray(b)).max() > 0


@pytest.mark.full
def test_gradients_are_those_of_finite_differences() -> None:
    inputs, chosen, _ = make(12, True, True, True, True)

    def ours(*leaves: jax.Array) -> jax.Array:
        rest = Inputs(*leaves)._asdict()
        q = rest.pop("q")
        return sequence_attention(q, **rest, chosen=chosen, width=5, rule=RULE)

    test_util.check_grads(ours, tuple(inputs), order=1, modes=("rev",), atol=2e-2, rtol=2e-2)


PUBLISHED = {"tiny": (8, 128, 256, 16, 8), "flash": (64, 512, 8192, 128, 512)}
PUBLISHED["pro"] = (128, 512, 8192, 128, 1024)  # heads, channels, tokens, width, k


@pytest.mark.parametrize(
    ("platform", "dtype"), [("tpu", "float32"), ("tpu", "bfloat16"), ("cuda", "bfloat16")]
)
@pytest.mark.parametrize("name", variants.some(PUBLISHED, ("tiny",)))
def test_the_gradient_lowers_and_writes_no_scores(name: str, platform: str, dtype: str) -> None:
    heads, channels, tokens, width, _ = PUBLISHED[name]
    of = jax.ShapeDtypeStruct
    entries = tokens // RATIO
    if platform == "cuda":
        heads = max(heads, 64)
    inputs = Inputs(
        of((1, tokens, heads, channels), jnp.dtype(dtype)),
        of((1, tokens, channels), jnp.dtype(dtype)),
        of((1, entries, channels), jnp.dtype(dtype)),
        of((heads,), jnp.float32),
    )
    chosen = Chosen(
        of((1, tokens, entries), jnp.uint32),
        of((1, tokens), jnp.uint32),
        of((1, tokens), jnp.int32),
    )
    rule = Rule(0.1, RATIO, 64 if entries >= 64 else 16)
    kernel = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform]

    def loss(inputs: Inputs, chosen: Chosen) -> jax.Array:
        rest = inputs._asdict()
        q, options = rest.pop("q"), dict(width=width, rule=rule, implementation=kernel)
        return jnp.sum(sequence_attention(q, **rest, chosen=chosen, **options))

    text = strict.lowered(jax.grad(loss), platform, inputs, chosen)
    assert strict.kernels_in(text, platform) == 1
    most = max(tokens * heads * max(channels, 2 * rule.tile), tokens * entries)
    assert memory.largest(jax.grad(loss), inputs, chosen) <= most


def test_nothing_of_queries_by_entries_is_written() -> None:
    tokens, width, rule = 4096, 64, Rule(0.1, 4, 64)
    of = jax.ShapeDtypeStruct
    inputs = Inputs(
        of((1, tokens, 4, 16), jnp.float32),
        of((1, tokens, 16), jnp.float32),
        of((1, tokens // 4, 16), jnp.float32),
        of((4,), jnp.float32),
    )

    def loss(inputs: Inputs) -> jax.Array:
        rest = inputs._asdict()
        return jnp.sum(sequence_attention(rest.pop("q"), **rest, width=width, rule=rule))

    # Scores of a tile of entries, [T, H, 64], and those of all bands of the window, twice that.
    assert memory.largest(jax.grad(loss), inputs) <= tokens * 4 * 128


def test_wrong_input() -> None:
    q = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match="width"):
        sequence_attention(q, kv=jnp.zeros((1, 8, 4)), rule=RULE)
    with pytest.raises(ValueError, match=r"width=2.0 must be an integer"):
        sequence_attention(q, kv=jnp.zeros((1, 8, 4)), rule=RULE, width=2.0)
    with pytest.raises(ValueError, match="entries must be"):
        sequence_attention(q, entries=jnp.zeros((1, 2, 5)), rule=RULE)
