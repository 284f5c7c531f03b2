"""Native sparse attention against a reference written from its equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv.attention.call import Call, Train
from hetero_kv.attention.nsa_blocks import Blocks, closing
from hetero_kv.contract import History, Point
from tests import variants
from tests.models import families, tiny
from tests.oracle import nsa as oracle

LENGTH = 61


@functools.cache
def layer_out() -> tuple[np.ndarray, np.ndarray, list]:
    """The first layer alone: ours, the reference's, and what the reference selects."""
    model, params = families.model("nsa")
    config, own = model.config, model.config.attention["nsa"]
    mechanism = model.stack.groups[0].layers[0].attention
    weights = jax.tree.map(lambda w: w[0], params["segments"]["0"]["0"]["attn"])
    x = np.random.default_rng(0).normal(size=(1, LENGTH, config.d_model)).astype(np.float32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        zero = jnp.zeros(1, jnp.int32)
        call = Call(zero, zero + LENGTH, positions, model.stack._tables(positions), zero, False)
        return mechanism.forward(weights, x, call, Train())[0]

    want, chosen = oracle.attention(
        x[0].astype(np.float64),
        jax.tree.map(lambda w: np.asarray(w, np.float64), weights),
        heads=config.n_heads,
        groups=config.n_kv_heads,
        dim=config.head_dim,
        rope_dim=config.rope_dim,
        theta=config.rope_theta,
        window=config.window,
        **{name.removeprefix("nsa_"): own[f"nsa_{name}"] for name in families.NSA_SIZES},
    )
    return np.asarray(run(x))[0], want, chosen


def test_forward_equals_the_reference() -> None:
    got, want, chosen = layer_out()
    print("error", np.abs(got - want).max())
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want).max() > 0.5
    # Something is left out, and groups choose differently.
    select = families.model("nsa")[0].config.attention["nsa"]["nsa_select"]
    assert any(len(best) < t // select + 1 for t, both in enumerate(chosen) for best in both)
    assert any(both[0] != both[1] for both in chosen)


def test_a_golden_of_its_own_fields() -> None:
    """Each size matters: a model with one of them changed computes something else."""
    model, params = families.model("nsa")
    tokens = tiny.tokens()[:, :LENGTH]
    want = np.asarray(jax.jit(model.forward)(params, tokens))
    own = model.config.attention["nsa"]
    for change in ({"nsa_top": 5}, {"nsa_select": 16}, {"window": 3}):
        config = model.config.replace(attention={"nsa": own | change})
        got = np.asarray(jax.jit(models.build(config).forward)(params, tokens))
        assert np.abs(got - want).max() > 1e-2, change


SPLITS = [[LENGTH], [5, 16, 1, 30, 9], [1] * LENGTH]


@pytest.mark.parametrize("sizes", variants.some(SPLITS, SPLITS[1:2]))
def test_however_it_is_split_it_is_the_same(sizes: tuple[int, ...]) -> None:
    model, params = families.model("nsa")
    tokens, cache, got, at = tiny.tokens()[:, :LENGTH], tiny.empty(model, True), [], 0
    for size in sizes:
        if size == 1:
            logits, cache = model.decode_step(params, tokens[:, at], cache)
            got.append(np.asarray(logits)[:, None])
        else:
            logits, cache = model.prefill(params, tokens[:, at : at + size], cache)
            got.append(np.asarray(logits))
        at += size
    want = np.asarray(jax.jit(model.forward)(params, tokens))
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=5e-5)


def test_contracts() -> None:
    """Overlapping blocks: entries of (stride, span), and a tail that keeps span - stride rows."""
    model, _ = families.model("nsa")
    own = model.config.attention["nsa"]
    span, stride = own["nsa_span"], own["nsa_stride"]
    leaves = dict(model.cache_spec.segments[0].layers[0].leaves)
    assert leaves["entries"].contract == History(stride, span)
    assert leaves["tokens"].contract == History(1)
    assert leaves["tail"].contract == Point(stride, span - stride)
    for length in range(40):
        live = leaves["tail"].live_rows(length)
        held = leaves["tail"].ring_positions(length)[live]
        first = leaves["entries"].contract.count(length) * stride
        assert sorted(held) == list(range(first, length)) or length < span, length


@pytest.mark.parametrize("start, columns", [(0, 3), (0, 21), (7, 1), (11, 16), (12, 5)])
def test_blocks_that_close_in_a_call(start: int, columns: int) -> None:
    blocks = Blocks(8, 4, 8, 3)
    rows = np.arange(1, 60, dtype=np.float32)[None, :, None]
    tail = np.full((1, 8, 1), np.nan, np.float32)
    for p in range(max(0, start - 8), start):
        tail[0, p % 8] = rows[0, p]
    raw = rows[:, start : start + columns]
    given = (jnp.array([start]), jnp.array([columns]))
    found, first, done = closing(blocks, jnp.asarray(tail), jnp.asarray(raw), *given)
    ends = [i for i in range(30) if start < i * 4 + 8 <= start + columns]
    assert int(done[0]) == len(ends)
    for j, i in enumerate(ends):
        assert int(first[0]) + j == i
        assert found[0, j, :, 0].tolist() == rows[0, i * 4 : i * 4 + 8, 0].tolist()


def test_importance_by_loops() -> None:
    blocks, rng = Blocks(12, 4, 16, 3), np.random.default_rng(0)
    shares = rng.random((2, 14)).astype(np.float32)
    found = np.asarray(blocks.importance(jnp.asarray(shares), 5))
    for j in range(5):
        want = sum(
            shares[:, i]
            for i in range(14)
            for s in range(3)
            if j * 16 <= i * 4 + s * 4 < (j + 1) * 16
        )
        np.testing.assert_allclose(found[:, j], want, rtol=1e-6)
    more = np.pad(shares, ((0, 0), (0, 30)))
    np.testing.assert_array_equal(blocks.importance(jnp.asarray(more), 9)[:, :4], found[:, :4])


@pytest.mark.parametrize("sizes", [(8, 3, 8, 3), (12, 4, 8, 3), (8, 4, 8, 2), (8, 4, 10, 3)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"stride|span"):
        Blocks(*sizes)
