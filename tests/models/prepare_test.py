"""Prepared weights compute what the plain ones do; scanned layers keep theirs in one array."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest

import models
from hetero_kv import linear
from hetero_kv.linear import Blocks, Turned
from hetero_kv.params import Params
from models import prepared as prepared_lib
from models.decoder import Decoder
from models.prepared import Flat
from tests.models import families, tiny
from tests.models.weights import random_params


@pytest.fixture
def narrow_blocks(monkeypatch) -> Iterator[None]:
    """Blocks that matrices of small models have some of."""
    monkeypatch.setattr(linear, "COLUMNS", 2)
    yield


def _apart(name: str) -> Decoder:
    """A small model whose layers are not scanned."""
    return models.build(tiny.model(name)[0].config.replace(scan_layers=False))


def _blocks(params: Params) -> list[Blocks]:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Blocks))
    return [x for x in leaves if isinstance(x, Blocks)]


def _compare(model: Decoder, sizes: tuple[int, ...]) -> None:
    """Logits of calls of so many tokens, and of a step, with prepared and with plain weights."""
    params = random_params(model, 3)
    prepared = model.prepare(params, blocks=True)
    assert len(_blocks(prepared.few)) > len(model.config.layer_types) and not _blocks(prepared.many)
    tokens = tiny.tokens() % model.config.vocab_size
    caches = [model.init_cache(tiny.ROWS, tiny.CAPACITY) for _ in range(2)]
    start = 0
    for size in sizes:
        part, got = tokens[:, start : start + size], []
        for i, weights in enumerate((prepared, params)):
            logits, caches[i] = model.prefill(weights, part, caches[i])
            got.append(logits)
        np.testing.assert_allclose(*got, atol=1e-4, rtol=0)
        start += size
    steps = [
        model.decode_step(x, tokens[:, start], c)[0]
        for x, c in zip((prepared, params), caches, strict=True)
    ]
    np.testing.assert_allclose(*steps, atol=1e-4, rtol=0)


def test_prepared_weights_give_the_same_logits(narrow_blocks) -> None:
    config = tiny.model("v4")[0].config.replace(
        layer_types=("csa",), mlp_types=("moe",), hc_streams=2, scan_layers=False
    )
    _compare(models.build(config), (4,))


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4", "full_mixed", *families.every()])
def test_those_of_every_mechanism(name: str, narrow_blocks) -> None:
    _compare(_apart(name), (16, 3))


@pytest.mark.parametrize("columns", [2, 64])
def test_weights_that_read_the_same_are_read_at_once(columns: int, monkeypatch) -> None:
    """In blocks of so many columns where there are, else in one piece."""
    monkeypatch.setattr(linear, "COLUMNS", columns)
    config = tiny.model("v4")[0].config.replace(
        layer_types=("csa",), mlp_types=("dense",), hc_streams=0, scan_layers=False
    )
    model = models.build(config)
    few = jax.eval_shape(lambda: model.prepare(model.init(jax.random.key(0)), blocks=True)).few
    joined = dict(few["segments"]["0"]["0"]["attn"]["joined"])
    sizes = {
        "x": 10 + 12 + 2 * 24 + 2 * 16 + 8,  # queries, own row, two compressors, index weights
        "latent": 4 * 12 + 8 * 8,  # queries and index queries
    }
    if columns == 64:  # the index queries alone have them: nothing is in their product
        assert isinstance(joined.pop("latent"), Blocks) and joined.keys() == {"x, odd"}
        joined, sizes = {"x": joined["x, odd"]}, {"x": sizes["x"]}
    assert {name: x.shape[-1] for name, x in joined.items()} == sizes
    cache = model.abstract_cache(1, tiny.CAPACITY)
    token = jax.ShapeDtypeStruct((1,), "int32")

    def products(params: Params) -> int:
        step = jax.jit(model.stack.step).lower(params, token, cache, None)
        return step.compile(compiler_options=tiny.FAST_COMPILE).as_text().count(" dot(")

    plain = jax.eval_shape(model.init, jax.random.key(0))
    assert products(plain) - products(few) == sum({"x": 7 - 1, "latent": 2 - 1}[x] for x in sizes)


def test_experts_and_small_weights() -> None:
    model = _apart("v4")
    params = random_params(model, 3)
    prepared = model.prepare(params, blocks=False)
    layers = [x["0"] for x in prepared["segments"].values()]
    assert all(isinstance(x["mlp"]["down"], tuple) for x in layers)
    assert all(x["small"].ndim == 2 and "attn_norm" not in x for x in layers)
    # Nothing else is copied.
    assert prepared["embed"] is params["embed"]
    assert layers[0]["attn"]["q_b"] is params["segments"]["0"]["0"]["attn"]["q_b"]
    again = model.prepare(prepared, blocks=False)
    assert jax.tree.structure(again) == jax.tree.structure(prepared)
    twice = model.prepare(params, blocks=True)
    assert twice.few["embed"] is twice.many["embed"] is params["embed"]
    assert model.prepare(twice) is twice


@pytest.mark.parametrize("name", ["v4", "nsa", "nemotron_h", "kimi_linear"])
def test_every_weight_is_back_in_its_place(name: str) -> None:
    model = _apart(name)
    params = random_params(model, 3)
    prepared, kinds = model.prepare(params, blocks=True), set()
    for s, group in enumerate(model.stack.groups):
        (layer,) = group.layers
        raw = params["segments"][str(s)]["0"]
        for given in (prepared.few, prepared.many):
            own = jax.tree.map(lambda x: x[0], given["segments"][str(s)]["0"])
            tree = layer.params()
            for path, found in _flat(prepared_lib.plain(tree, own)).items():
                kinds.add(type(found))
                want = raw
                for part in path:
                    want = want[part]
                np.testing.assert_array_equal(_whole(found), want[0], err_msg=str(path))
    assert Turned in kinds


def _flat(tree: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    found = {}
    for name, x in tree.items():
        if isinstance(x, dict):
            found |= _flat(x, (*path, name))
        elif name != prepared_lib.JOINED:
            found[(*path, name)] = x
    return found


def _whole(x: object) -> np.ndarray:
    """A weight as it was declared."""
    if isinstance(x, tuple):
        return np.stack([_whole(one) for one in x])
    if isinstance(x, linear.Part):
        return _whole(x.joined)[:, x.start : x.start + x.size]
    return np.asarray(x.whole() if isinstance(x, Blocks | Turned) else x)


def test_calls_are_given_the_arrays_alone() -> None:
    model = _apart("full_mixed")
    made = [model.prepare(random_params(model, seed), blocks=True) for seed in (3, 4)]
    traces = []

    @jax.jit
    def call(flat: Flat) -> Params:
        traces.append(flat.tree)
        return flat.tree

    for prepared in made:
        for rows, part in ((linear.FEW, prepared.few), (linear.FEW + 1, prepared.many)):
            flat = prepared.read(rows)
            assert flat is prepared.read(rows) is model.stack.weights(flat, rows)
            found = call(flat)
            assert jax.tree.structure(found) == jax.tree.structure(part)
            jax.tree.map(np.testing.assert_array_equal, found, part)
    assert len(traces) == 2  # for few rows and for many, whosever weights they are


def test_scanned_layers_keep_theirs_in_one_array() -> None:
    config = tiny.model("v4")[0].config.replace(
        layer_types=("swa",) * 3, mlp_types=("moe",) * 3, hc_streams=0, scan_layers=True
    )
    scanned = models.build(config)
    weights = scanned.init(jax.random.key(0))
    prepared = scanned.prepare(weights, blocks=True)
    for found in (prepared.few["segments"], prepared.many["segments"]):
        same = jax.tree.map(lambda a, b: a is b, weights["segments"], found)
        assert all(jax.tree.leaves(same))


def test_weights_of_another_model_are_refused() -> None:
    model = _apart("v4")
    params = random_params(model, 3)
    del params["segments"]["1"]["0"]["attn_norm"]
    with pytest.raises(ValueError, match=r"attn_norm.*nothing"):
        model.prepare(params)
