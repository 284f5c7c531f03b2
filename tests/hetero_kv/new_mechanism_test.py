"""A mechanism in a file of its own gets reuse, validation, accounting and faults, and nothing else
is touched: the model is built from a config that names the file's module."""

import pathlib

import jax
import numpy as np
import pytest

import models
from hetero_kv import validate
from hetero_kv.attention.call import Call, Train
from hetero_kv.contract import Window
from hetero_kv.faults import kinds
from hetero_kv.faults.trial import SILENT, Bench
from hetero_kv.prefix.keys import block_keys
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv.families_test import one_each
from tests.hetero_kv.faults.matrix_test import run, with_all_on
from tests.hetero_kv.prefix import benches
from tests.models import tiny

SOURCE = '''
"""A dilated window: token t sees t, t - d, t - 2 d, ..., n tokens of the same remainder."""

import dataclasses

import jax

from hetero_kv.attention import local
from hetero_kv.attention.grouped_heads import GroupedHeads
from hetero_kv.attention.window import WindowBranch


@dataclasses.dataclass(frozen=True)
class DilatedWindow(WindowBranch):
    """width: from the last token seen to the first, in tokens."""

    step: int = 1

    def mask(self, queries, keys):
        apart = (queries[:, :, None] - keys[:, None, :]) % self.step == 0
        return super().mask(queries, keys) & apart

    def rows(self, view, call):
        rows, live = super().rows(view, call)
        back = (call.start[:, None] - jax.numpy.arange(self.width)) % self.width
        return rows, live & (back % self.step == 0)

    def leaves(self):
        named = {"component": "dilated windows"}
        return {k: dataclasses.replace(v, **named) for k, v in super().leaves().items()}


def build(fields):
    heads = GroupedHeads.of(fields)
    width = (fields.seen - 1) * fields.dilation + 1
    branch = DilatedWindow(
        width, heads.width, heads.cache_dtype, heads.form, step=fields.dilation
    )
    return local.Local(fields.kind, heads, branch)
'''
SEEN, STEP = 3, 4
WIDTH = (SEEN - 1) * STEP + 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A model with two dilated layers around an HCA layer, and its weights."""
    directory: pathlib.Path = tmp_path_factory.mktemp("plugin")
    (directory / "my_mechanisms").mkdir()
    (directory / "my_mechanisms" / "dilated.py").write_text(SOURCE)
    own = {"mechanism": "my_mechanisms.dilated", "seen": SEEN, "dilation": STEP}
    config = tiny.BASE.replace(
        layer_types=("dilated", "hca", "dilated"), attention={"dilated": own}, chunk=8, block=8
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        model = models.build(config)
    return model, tiny.random_params(model, seed=2)


def attention_of(weights: dict, x: np.ndarray, config: models.DecoderConfig) -> np.ndarray:
    """One dilated layer, token by token and head by head, float64."""
    heads, groups, dim, size = config.n_heads, config.n_kv_heads, config.head_dim, config.rope_dim

    def part(name: str, t: int, head: int) -> np.ndarray:
        y = (x[t] @ weights[name])[head * dim : (head + 1) * dim]
        if name == "v":
            return y
        y = y / np.sqrt(np.mean(y * y) + config.norm_eps) * weights[f"{name}_norm"]
        for i in range(size // 2):
            a, b = dim - size + 2 * i, dim - size + 2 * i + 1
            angle = t * config.rope_theta ** (-2 * i / size)
            cos, sin = np.cos(angle), np.sin(angle)
            y[a], y[b] = y[a] * cos - y[b] * sin, y[b] * cos + y[a] * sin
        return y

    out = np.zeros((len(x), heads * dim))
    for t in range(len(x)):
        seen = [t - i * STEP for i in range(SEEN) if t - i * STEP >= 0]
        for h in range(heads):
            g = h // (heads // groups)
            logit = [part("q", t, h) @ part("k", s, g) / np.sqrt(dim) for s in seen]
            weight = np.exp(logit) / (np.sum(np.exp(logit)) + np.exp(weights["sinks"][h]))
            value = sum(w * part("v", s, g) for w, s in zip(weight, seen, strict=True))
            out[t, h * dim : (h + 1) * dim] = value
    return out @ weights["o"]


def test_it_computes_what_it_says(made) -> None:
    model, params = made
    layer, x = model.stack.groups[0].layers[0], np.random.default_rng(0).normal(size=(1, 20, 24))
    weights = jax.tree.map(lambda w: w[0], params["segments"]["0"]["0"]["attn"])
    want = attention_of(
        {name: np.asarray(w, np.float64) for name, w in weights.items()}, x[0], model.config
    )

    def alone(x: jax.Array) -> jax.Array:
        positions = jax.numpy.arange(20, dtype=jax.numpy.int32)[None]
        zero = jax.numpy.zeros(1, jax.numpy.int32)
        call = Call(zero, zero + 20, positions, model.stack._tables(positions), zero, False)
        return layer.attention.forward(weights, x, call, Train())[0]

    got = jax.jit(alone)(x.astype(np.float32))
    np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_however_it_is_split_it_is_the_same(made) -> None:
    model, params = made
    tokens = tiny.tokens()[:, :40]
    want = np.asarray(jax.jit(model.forward)(params, tokens))
    cache, got, start = model.init_cache(2, 40, poison=True), [], 0
    for size in (3, 8, 14):
        logits, cache = model.prefill(params, tokens[:, start : start + size], cache)
        got.append(np.asarray(logits))
        start += size
    for t in range(start, 40):
        logits, cache = model.decode_step(params, tokens[:, t], cache)
        got.append(np.asarray(logits)[:, None])
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=3e-5)


def test_accounting(made) -> None:
    spec = made[0].cache_spec
    row = 4 * (2 * tiny.BASE.n_kv_heads * tiny.BASE.head_dim)
    own = [x for x in spec.slots() if x.leaf.component == "dilated windows"]
    assert [x.leaf.contract for x in own if x.name == "window"] == [Window(WIDTH)] * 2
    held = sum(x.repeats * x.leaf.rows * x.leaf.row_bytes for x in own)
    assert held == 2 * WIDTH * (row + 4)
    assert spec.checkpoint_bytes() > held
    assert spec.replay_tokens(round_up=False) >= 2 * (WIDTH - 1)
    assert "dilated windows" in validate.components(spec)


def test_reuse_through_the_store(made) -> None:
    b, n = benches.Bench(made[0].config, made=made), 41
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24)
    b.publish(store, seed=1, n=n)
    tokens, cache = b.prompt(1, n), b.used(seed=5, n=30)
    for at in (32, 8, 24):
        with store.lookup(tokens[: at + 1]) as lease:
            assert lease.resumable_length == at
            cache = store.restore(lease, cache, benches.ROW)
        cache = benches.reset(b, cache, benches.MATE)
        logits, cache = b.finish(cache, tokens, b.prompt(60, 31))
        assert b.same_as_cold(1, n, at, logits, cache), at
    # Without its window nothing can be resumed, and it is told why.
    at = b.spec.blocks_in(32) - 1
    nodes = store.catalog.index.match(block_keys(b.identity, tokens))
    store.catalog.discard(nodes[at].checkpoint, "taken away")
    with store.lookup(tokens[:33]) as lease:
        assert lease.resumable_length == 24


@pytest.mark.full
def test_faults_are_caught_and_bite(made, tmp_path) -> None:
    model, params = made
    rng, length = np.random.default_rng(0), 2 * model.cache_spec.granularity
    prompt, donor = (rng.integers(0, tiny.BASE.vocab_size, length + 4) for _ in range(2))
    other = tiny.random_params(model, seed=5)
    bench = Bench(model, params, other, prompt, donor, length, config=model.config)
    own = [x for x in bench.cases() if x.component == "dilated windows"]
    assert {x.kind for x in own} >= {kinds.BIT, kinds.POSITION, kinds.STALE, kinds.REUSED}
    some = one_each(own)
    with_all_on(bench, some, tmp_path / "on")
    off = run(bench, some, kinds.CHECKS, tmp_path / "off")
    assert [x.status for x in off] == [SILENT] * len(some)


def test_a_name_that_is_nothing_is_refused() -> None:
    for kind, own, match in (
        ("csb", {}, "no mechanism 'csb'"),
        ("x", {"mechanism": "nowhere.at_all"}, "no mechanism 'nowhere.at_all'"),
        ("x", {"mechanism": "tests.models.tiny"}, r"function build\(fields\)"),
        ("x", {"mechanism": "full", "widow": 3}, r"nothing reads: \['widow'\]"),
    ):
        config = tiny.BASE.replace(layer_types=(kind,), mlp_types=("dense",), attention={kind: own})
        with pytest.raises(ValueError, match=match):
            models.build(config)
