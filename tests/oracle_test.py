"""The reference against Hugging Face goldens, and its pieces against loops."""

import math
import pathlib
import types

import numpy as np
import pytest

from tests.oracle import attention, compressor, decoder, from_hf, hyper, indexer, moe, rope
from tests.oracle.random_weights import RandomWeights
from tests.oracle.trace import LayerTrace

GOLDENS = pathlib.Path(__file__).parent / "goldens"
NAMES = ("smallest", "ratios_4_8", "ratios_3_7", "ratios_4_128", "flash")


def golden(name):
    """Configuration, weights, tokens and logits of one golden."""
    config, weights = from_hf.load(GOLDENS / name)
    with np.load(GOLDENS / name / "golden.npz") as file:
        return config, weights, file["tokens"], file["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hugging_face(name):
    config, weights, tokens, expected = golden(name)
    for row, logits in zip(tokens, expected, strict=True):
        ours, _ = decoder.forward(config, weights, row)
        np.testing.assert_allclose(ours, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_goldens_reach_the_indexer_and_a_second_closed_group(name):
    config, weights, tokens, _ = golden(name)
    length = tokens.shape[1]
    assert length >= config.csa_ratio * (config.index_topk + 1)
    assert length >= 2 * config.hca_ratio + 1
    _, trace = decoder.forward(config, weights, tokens[0])
    dropped = [t for t in trace.layers if t.gap is not None and np.isfinite(t.gap).any()]
    assert len(dropped) == config.layer_types.count("csa")
    assert trace.smallest_gap().min() > 1e-4


# One field of `ratios_4_128` changed: the golden must notice, or it does not test that field.
CHANGES = {
    "window": 127,
    "index_topk": -1,
    "sinks": False,
    "rope_theta": 9000.0,
    "compress_rope_theta": 110.0,
    "yarn": None,
    "routed_scale": 1.0,
    "swiglu_limit": 0.0,
    "hc_sinkhorn_iters": 1,
    "n_shared_experts": 0,
    "indexer": False,
    "norm_eps": 1e-2,
}


@pytest.mark.parametrize("field", CHANGES)
def test_golden_notices_a_changed_field(field):
    config, weights, tokens, expected = golden("ratios_4_128")
    setattr(config, field, CHANGES[field])
    ours, _ = decoder.forward(config, weights, tokens[0])
    assert np.abs(ours - expected[0]).max() > 1e-3


def test_forcing_its_own_selection_changes_nothing_and_another_does():
    config, weights, tokens, _ = golden("ratios_3_7")
    plain, trace = decoder.forward(config, weights, tokens[0])
    same, _ = decoder.forward(config, weights, tokens[0], trace.selections())
    np.testing.assert_array_equal(plain, same)
    first = {i: np.zeros_like(s) for i, s in trace.selections().items()}
    other, _ = decoder.forward(config, weights, tokens[0], first)
    assert np.abs(other - plain).max() > 1e-2


@pytest.mark.parametrize("ratio", [2, 3, 7])
def test_visibility_by_last_token(ratio):
    length = 23
    seen = compressor.visible(length, length // ratio, ratio)
    for t in range(length):
        for i in range(length // ratio):
            last_token = ratio * (i + 1) - 1
            assert seen[t, i] == (last_token <= t)


@pytest.mark.parametrize("window", [0, 1, 3, 40])
def test_window_holds_the_last_tokens(window):
    mask = attention.window_mask(11, window)
    for t in range(11):
        visible = [j for j in range(11) if t - window < j <= t]
        assert np.flatnonzero(mask[t]).tolist() == visible


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ratio", [2, 3])
def test_pooling_channel_by_channel(ratio, overlap):
    rng, width, length = np.random.default_rng(0), 2, 11
    channels = 2 * width if overlap else width
    kv, gate = rng.normal(size=(2, length, channels))
    bias = rng.normal(size=(ratio, channels))
    pooled = compressor.pool(kv, gate, bias, ratio, overlap)
    assert pooled.shape == (length // ratio, width)
    for i in range(length // ratio):
        for c in range(width):
            rows = [(t, c + channels - width) for t in range(ratio * i, ratio * (i + 1))]
            if overlap and i:
                rows += [(t, c) for t in range(ratio * (i - 1), ratio * i)]
            weight = [math.exp(gate[t, a] + bias[t % ratio, a]) for t, a in rows]
            mean = sum(w * kv[t, a] for w, (t, a) in zip(weight, rows, strict=True)) / sum(weight)
            assert pooled[i, c] == pytest.approx(mean, abs=1e-12)


def test_rotation_depends_on_distance_only_and_undoes_itself():
    rng = np.random.default_rng(0)
    omega = rope.plain_frequencies(4, 100.0)
    x, y = rng.normal(size=(2, 1, 6))
    near = rope.rotate(x, np.array([7]), omega) @ rope.rotate(y, np.array([3]), omega).T
    far = rope.rotate(x, np.array([107]), omega) @ rope.rotate(y, np.array([103]), omega).T
    np.testing.assert_allclose(near, far, atol=1e-12)
    turned = rope.rotate(x, np.array([7]), omega)
    np.testing.assert_array_equal(turned[:, :2], x[:, :2])  # leading channels do not turn
    np.testing.assert_allclose(rope.rotate(turned, np.array([-7]), omega), x, atol=1e-12)


def test_rotation_turns_neighbouring_channels():
    turned = rope.rotate(np.array([[1.0, 0.0, 0.0, 2.0]]), np.array([1]), np.array([0.5, 0.25]))
    expected = [math.cos(0.5), math.sin(0.5), -2 * math.sin(0.25), 2 * math.cos(0.25)]
    np.testing.assert_allclose(turned[0], expected, atol=1e-12)


def test_yarn_ramp_of_the_released_models():
    yarn = types.SimpleNamespace(factor=16.0, original_max=65536, beta_fast=32.0, beta_slow=1.0)
    plain = rope.plain_frequencies(64, 160000.0)
    scaled = rope.yarn_frequencies(64, 160000.0, yarn)
    np.testing.assert_allclose(scaled[:16], plain[:16])  # fast channels stay, up to channel 15
    np.testing.assert_allclose(scaled[25:], plain[25:] / 16)  # slow ones are stretched, from 25
    assert (scaled[16:25] < plain[16:25]).all()
    assert (scaled[16:25] > plain[16:25] / 16).all()


def test_selection_prefers_the_lower_index_and_the_visible():
    scored = np.array([[1.0, 2.0, 1.0, 1.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    visible = np.array([[True, True, True, True, False], [True, False, False, False, False]])
    selected, gap = indexer.select(scored, visible, 2)
    assert selected.tolist() == [[True, True, False, False, False], [True] + [False] * 4]
    assert gap.tolist() == [0.0, math.inf]
    everything, gap = indexer.select(scored, visible, 5)
    assert (everything == visible).all()
    assert np.isinf(gap).all()


def test_query_without_context_gives_zero():
    query, none = np.ones((2, 1, 4)), np.zeros((0, 4))
    for sinks in (None, np.zeros(1)):
        out = attention.attend(query, none, none, np.zeros((2, 0), bool), sinks)
        assert (out == 0).all()


def test_sink_takes_weight_without_a_value():
    query, key = np.zeros((1, 1, 2)), np.ones((1, 2))
    out = attention.attend(query, key, key, np.ones((1, 1), bool), np.zeros(1))
    np.testing.assert_allclose(out, 0.5)


def test_sinkhorn_is_nearly_doubly_stochastic():
    matrix = hyper.sinkhorn(np.random.default_rng(0).normal(size=(5, 4, 4)), 20, 1e-6)
    np.testing.assert_allclose(matrix.sum(-1), 1.0, atol=1e-4)
    np.testing.assert_allclose(matrix.sum(-2), 1.0, atol=1e-4)


def test_swiglu_clips_the_gate_above_only():
    gate, up = np.array([-9.0, 9.0, 1.0]), np.array([1.0, -9.0, 9.0])
    silu = [g / (1 + math.exp(-g)) for g in (-9.0, 2.0, 1.0)]
    expected = [silu[0] * 1.0, silu[1] * -2.0, silu[2] * 2.0]
    np.testing.assert_allclose(moe.swiglu(gate, up, 2.0), expected)


def small_config(**changes):
    """A configuration with everything that Hugging Face lacks switched off or replaced."""
    fields = dict(
        vocab_size=11, d_model=8, layer_types=("swa", "csa", "hca", "full"),
        mlp_types=("dense", "moe", "hash_moe", "dense"), n_heads=4, head_dim=4, n_kv_heads=2,
        rope_dim=2, q_lora_rank=0, o_groups=0, o_lora_rank=0, window=3, csa_ratio=2, hca_ratio=3,
        csa_overlap=True, index_heads=8, index_dim=4, index_topk=2, indexer=True, sinks=False,
        qk_norm=True, rope_theta=100.0, compress_rope_theta=50.0, yarn=None, d_ff=8, n_experts=3,
        experts_per_token=2, n_shared_experts=0, routed_scale=1.5, swiglu_limit=0.0, hc_streams=0,
        hc_sinkhorn_iters=20, hc_eps=1e-6, norm_eps=1e-6, tie_embeddings=True,
    )  # fmt: skip
    return types.SimpleNamespace(**(fields | changes))


SWITCHES = (
    {},
    {"window": 0},
    {"window": 0, "sinks": True},
    {"window": 1},
    {"window": 2},
    {"csa_overlap": False},
    {"indexer": False},
    {"index_topk": -1},
    {"q_lora_rank": 4, "o_groups": 2, "o_lora_rank": 3},
    {"hc_streams": 1},
    {"hc_streams": 3, "tie_embeddings": False},
    {"qk_norm": False, "n_kv_heads": 4},
    {"n_shared_experts": 1, "swiglu_limit": 0.5},
    {"csa_ratio": 5, "hca_ratio": 2, "rope_dim": 4},
)


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_every_switch_is_causal(changes):
    config = small_config(**changes)
    weights, tokens = RandomWeights(config), np.random.default_rng(1).integers(0, 11, 19)
    logits, _ = decoder.forward(config, weights, tokens)
    assert np.isfinite(logits).all()
    assert logits.shape == (19, 11)
    for cut in (1, 6, 12, 13):
        shorter, _ = decoder.forward(config, weights, tokens[:cut])
        np.testing.assert_allclose(shorter, logits[:cut], atol=1e-10)


def test_full_attention_against_a_loop():
    config = small_config(layer_types=("full",), mlp_types=("dense",), sinks=True)
    weights, trace = RandomWeights(config), LayerTrace()
    x = np.random.default_rng(2).normal(size=(7, 8))
    out = attention.attention(config, weights, 0, x, None, trace)
    prefix, heads = "model.layers.0.self_attn.", np.zeros((7, 4, 4))
    omega = rope.plain_frequencies(2, 100.0)
    for t in range(7):
        for h in range(4):
            q = weights[prefix + "q_proj.weight"][4 * h : 4 * h + 4] @ x[t]
            q = q / math.sqrt(np.mean(q * q) + 1e-6) * weights[prefix + "q_norm.weight"]
            q = rope.rotate(q[None], np.array([t]), omega)[0]
            logits = [q @ trace.keys[j, h // 2] / 2 for j in range(t + 1)]
            total = sum(map(math.exp, logits)) + math.exp(weights[prefix + "sinks"][h])
            for j, logit in enumerate(logits):
                heads[t, h] += math.exp(logit) / total * trace.values[j, h // 2]
    expected = heads.reshape(7, -1) @ weights[prefix + "o_proj.weight"].T
    np.testing.assert_allclose(out, expected, atol=1e-12)
