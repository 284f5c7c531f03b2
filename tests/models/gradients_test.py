"""Gradients of `forward` against central differences of the float64 reference, and the indexer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv.params import Params
from models.decoder import Decoder
from models.hf import deepseek_v4
from tests import variants
from tests.models import families, tiny
from tests.oracle import attention as oracle_attention
from tests.oracle import decoder as oracle
from tests.oracle.maths import linear, rms_norm
from tests.oracle.rope import frequencies, rotate
from tests.oracle.trace import Trace

TOKENS = 20  # more than csa_ratio * (index_topk + 1), so that entries are left out
STEP = 1e-5
TOLERANCE = 1e-3  # of a gradient's norm; float32 against float64
FLOOR = 3e-6  # some gradients nearly vanish: of one stream's gates, which norms take out again

Weights = dict[str, np.ndarray]


def row() -> np.ndarray:
    return tiny.tokens()[0, :TOKENS]


def split(params: Params) -> tuple[list[jax.Array], callable]:
    """Float leaves, and the function that puts them back among the integer ones."""
    leaves, tree = jax.tree.flatten(params)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def join(values: list[jax.Array]) -> Params:
        new = dict(zip(floats, values, strict=True))
        return jax.tree.unflatten(tree, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in floats], join


def named(made: Decoder, tree: Params) -> Weights:
    """A tree of weights or gradients by the reference's names, float64."""
    return {
        name: value.astype(np.float64) if value.dtype == np.float32 else value
        for name, value in deepseek_v4.state_dict(made, tree)
    }


def assert_gradient(value, weights: Weights, gradient: Weights, names: list[str]) -> float:
    """Compares directional derivatives of `value(weights)`; returns the largest relative error.

    The direction of a tensor is its gradient's plus a random one: wrong scales and wrong
    directions both show.
    """
    worst = 0.0
    rng = np.random.default_rng(0)
    for name in names:
        norm = np.linalg.norm(gradient[name])
        direction = rng.normal(size=gradient[name].shape)
        direction = direction / np.linalg.norm(direction) + gradient[name] / max(norm, 1e-30)
        up, down = (
            value({**weights, name: weights[name] + sign * STEP * direction}) for sign in (1, -1)
        )
        error = abs((up - down) / (2 * STEP) - np.sum(gradient[name] * direction))
        assert error <= TOLERANCE * norm + FLOOR, (name, error, norm)
        worst = max(worst, error / max(norm, FLOOR / TOLERANCE))
    return worst


@pytest.mark.parametrize(
    "name", variants.some(("v4", "full_mixed", "no_overlap", "full"), ("no_overlap",))
)
def test_gradient_of_every_weight(name: str) -> None:
    made, params = tiny.model(name)
    floats, join = split(params)
    shape = (TOKENS, made.config.vocab_size)
    probe = np.random.default_rng(1).normal(size=shape) / TOKENS

    @functools.partial(jax.jit, compiler_options=tiny.FAST_COMPILE)
    def gradient(floats: list[jax.Array]) -> list[jax.Array]:
        def loss(floats: list[jax.Array]) -> jax.Array:
            logits = made.forward(join(floats), row()[None])
            return jnp.sum(logits[0] * jnp.asarray(probe, jnp.float32))

        return jax.grad(loss)(floats)

    weights = named(made, params)
    found = named(made, join(gradient(floats)))
    _, trace = oracle.forward(made.config, weights, row())
    forced = trace.selections()
    assert forced or made.config.layer_types == ("full", "full")

    def value(weights: Weights) -> float:
        return np.sum(oracle.forward(made.config, weights, row(), forced)[0] * probe)

    learned = [n for n in weights if "tid2eid" not in n]
    choosing = [n for n in learned if "indexer" in n or "e_score_correction_bias" in n]
    for tensor in choosing:  # what only chooses has no gradient
        assert not found[tensor].any(), tensor
    rest = [n for n in learned if n not in choosing]
    for tensor in rest:
        assert found[tensor].any(), tensor
    print("error", assert_gradient(value, weights, found, rest))


# -- the indexer ---------------------------------------------------------------------------------


@functools.cache
def csa_model() -> tuple[Decoder, Params]:
    """Two stacked CSA layers."""
    kinds = dict(layer_types=("csa", "csa"), mlp_types=("dense", "dense"), q_lora_rank=10)
    made = models.build(tiny.BASE.replace(**kinds))
    return made, tiny.random_params(made, seed=1)


@functools.cache
def indexer_run(select: str) -> tuple[np.ndarray, dict, Params]:
    """Logits of one row, auxiliaries, and the gradient of the indexer's loss."""
    made, params = csa_model()

    @functools.partial(jax.jit, compiler_options=tiny.FAST_COMPILE)
    def run(params: Params) -> tuple:
        def loss(params: Params) -> tuple:
            logits, aux = made.forward(params, row()[None], aux=True, select=select)
            return aux["indexer_kl"], (logits[0], aux)

        return jax.grad(loss, has_aux=True)(params)

    gradient, (logits, aux) = run(params)
    return np.asarray(logits), aux, gradient


def forced_by(select: str, weights: Weights) -> dict[int, np.ndarray]:
    """The reference's own choice, or everything."""
    _, trace = oracle.forward(csa_model()[0].config, weights, row())
    if select == "topk":
        return trace.selections()
    return {layer: np.ones_like(chosen) for layer, chosen in trace.selections().items()}


def masked_log_softmax(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Over the entries of the mask; rows without any are 0."""
    scores = np.where(mask, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-1e9)
    return np.where(
        mask, scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True) + 1e-300), 0.0
    )


def kl(trace: Trace, targets: np.ndarray) -> float:
    """Mean over layers of the mean over queries that see an entry."""
    losses = []
    for layer, target in zip(trace.layers, targets, strict=True):
        mask, some = layer.selected, layer.selected.any(axis=-1)
        log_q = masked_log_softmax(layer.index_scores, mask)
        log_p = np.log(np.maximum(target, 1e-30))
        losses.append(np.where(mask, target * (log_p - log_q), 0.0).sum(-1)[some].mean())
    return float(np.mean(losses))


def attention_targets(weights: Weights, forced: dict[int, np.ndarray]) -> np.ndarray:
    """By layer, the heads' mean attention on entries, made to add up to 1: [layers, T, n]."""
    config, out = csa_model()[0].config, []
    _, trace = oracle.forward(config, weights, row(), forced)
    state = weights["model.embed_tokens.weight"][row()]
    for i, found in enumerate(trace.layers):
        prefix = f"model.layers.{i}."
        x = rms_norm(state, config.norm_eps, weights[f"{prefix}input_layernorm.weight"])
        name = f"{prefix}self_attn."
        _, q = oracle_attention.query_latent(config, weights, name, x)
        q = rotate(q, np.arange(TOKENS), frequencies(config, "csa"))
        keys = np.concatenate([found.rows, found.entries])
        mask = np.concatenate(
            [oracle_attention.window_mask(TOKENS, config.window), found.selected], axis=1
        )
        logits = np.einsum("thc,sc->ths", q, keys) * config.head_dim**-0.5
        share = np.exp(logits) * mask[:, None]
        share = share / (share.sum(-1, keepdims=True) + np.exp(weights[f"{name}sinks"])[:, None])
        target = share[:, :, TOKENS:].mean(axis=1)
        out.append(target / np.maximum(target.sum(-1, keepdims=True), 1e-30))
        state = state + found.attention_out + found.mlp_out
    hidden = rms_norm(state, config.norm_eps, weights["model.norm.weight"])
    again = linear(hidden, weights["lm_head.weight"])
    np.testing.assert_allclose(again, oracle.forward(config, weights, row(), forced)[0])
    return np.stack(out)


@pytest.mark.parametrize(
    "name",
    variants.some((*tiny.CHANGES, *families.every()), ("nothing_to_see", "nsa")),
)
def test_gradients_are_numbers(name: str) -> None:
    """Also of tokens that see nothing at all in a branch or layer, as the first ones do."""
    made, params = tiny.model(name)
    leaves, join = split(params)

    def loss(values: list[jax.Array]) -> jax.Array:
        logits = made.forward(join(values), tiny.tokens()[:, :TOKENS])
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    gradients = jax.jit(jax.grad(loss), compiler_options=tiny.FAST_COMPILE)(leaves)
    assert all(np.isfinite(x).all() for x in gradients)
    assert np.mean([np.any(np.asarray(x) != 0) for x in gradients]) > 0.7


@pytest.mark.parametrize("select", ("topk", "all"))
def test_indexer_loss_and_targets(select: str) -> None:
    made, params = csa_model()
    logits, aux, _ = indexer_run(select)
    weights = named(made, params)
    forced = forced_by(select, weights)
    want, trace = oracle.forward(made.config, weights, row(), forced)
    np.testing.assert_allclose(logits, want, atol=1e-4, rtol=0)
    targets = attention_targets(weights, forced)
    found = np.asarray(aux["targets"][0])[:, 0]  # stacked: [layers, 1, T, n]
    np.testing.assert_allclose(found, targets, atol=1e-5, rtol=0)
    scores = np.asarray(aux["index_scores"][0])[:, 0]
    for layer in range(2):
        seen = trace.layers[layer].selected
        right = trace.layers[layer].index_scores
        np.testing.assert_allclose(scores[layer][seen], right[seen], atol=1e-4, rtol=0)
    assert float(aux["indexer_kl"]) == pytest.approx(kl(trace, targets), abs=1e-5)
    assert kl(trace, targets) > 0.01


@pytest.mark.parametrize("select", ("topk", "all"))
def test_indexer_loss_reaches_the_indexer_only(select: str) -> None:
    made, params = csa_model()
    gradient = indexer_run(select)[2]
    found = named(made, gradient)
    weights = named(made, params)
    own = [name for name in found if "indexer" in name]
    assert len(own) == 2 * 6
    for name, value in found.items():
        assert value.any() == (name in own), name
    forced = forced_by(select, weights)
    targets = attention_targets(weights, forced)

    def value(weights: Weights) -> float:
        return kl(oracle.forward(made.config, weights, row(), forced)[1], targets)

    print("error", assert_gradient(value, weights, found, own))


def test_select_all_differs_from_topk_only_where_entries_are_left_out() -> None:
    made, _ = csa_model()
    some, everything = indexer_run("topk")[0], indexer_run("all")[0]
    dense = made.config.csa_ratio * (made.config.index_topk + 1) - 1
    np.testing.assert_array_equal(some[:dense], everything[:dense])
    assert (np.abs(some - everything)[dense:].max(axis=-1) > 1e-3).all()
    with pytest.raises(ValueError, match="'topk' or 'all'"):
        made.forward(csa_model()[1], row()[None], select="none")


def test_a_model_without_an_indexer_has_no_such_loss() -> None:
    made, params = tiny.model("all_entries")

    def loss(params: Params) -> tuple:
        _, aux = made.forward(params, row()[None], aux=True)
        return aux["indexer_kl"], (aux["targets"], aux["index_scores"])

    value, (targets, scores) = jax.eval_shape(loss, params)
    assert value.shape == ()
    assert targets == scores == []
