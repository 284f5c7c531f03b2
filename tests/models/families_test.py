"""Every family against its goldens, read and written; what its state costs."""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetero_kv.contract import History, Window
from hetero_kv.pages.layout import Paging
from hetero_kv.state import Cache
from models import hf
from tests import variants
from tests.hetero_kv.pages.convert import owner, reserve
from tests.models import families, tiny
from tests.parity import families as parity


def tolerance(golden: str) -> float:
    """Of logits."""
    return parity.tolerance(golden.partition("-")[0])


@pytest.mark.parametrize("golden", families.goldens())
def test_equals_hugging_face(golden: str) -> None:
    model, params = families.load(golden)
    tokens, want = families.expected(golden)
    forward = jax.jit(model.forward, compiler_options=tiny.FAST_COMPILE)
    np.testing.assert_allclose(forward(params, tokens), want, atol=tolerance(golden), rtol=0)


# With recurrent state and full attention; `make test-full` has all of them.
KINDS = ("qwen3_next",)


@pytest.mark.parametrize("name", variants.some(families.names(), KINDS))
def test_prefill_in_pieces_and_decode(name: str) -> None:
    golden = next(x for x in families.goldens() if x.startswith(name))
    (model, params), (tokens, want) = families.load(golden), families.expected(golden)
    batch, length = tokens.shape
    cache, got, start = model.init_cache(batch, length, poison=True), [], 0
    for size in (5, 11, 7, length - 30):
        logits, cache = model.prefill(params, tokens[:, start : start + size], cache)
        got.append(np.asarray(logits))
        start += size
    while start < length:
        logits, cache = model.decode_step(params, tokens[:, start], cache)
        got.append(np.asarray(logits)[:, None])
        start += 1
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=tolerance(golden), rtol=0)


@pytest.mark.parametrize("golden", families.goldens())
def test_written_and_read_again(golden: str, tmp_path) -> None:
    model, params = families.load(golden)
    hf.save_pretrained(model, params, tmp_path, golden.partition("-")[0])
    again, read = hf.from_pretrained(tmp_path, chunk=families.CHUNK, block=families.BLOCK)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, read)


def layer_types(fields: dict) -> list[str]:
    """Of a `config.json`."""
    return fields.get("layer_types") or fields["layers_block_type"]


@pytest.mark.parametrize("name", families.names())
def test_contracts_count_what_is_cached(name: str) -> None:
    """Bytes per token and replay length, from `config.json`."""
    golden = next(x for x in families.goldens() if x.startswith(name))
    fields, spec = families.fields(golden), families.load(golden)[0].cache_spec
    want, local, linear = 0.0, 0, 0
    for kind in layer_types(fields):
        if kind == "linear_attention":
            linear += 1
        elif kind in ("moe", "mlp"):
            continue
        elif "kv_lora_rank" in fields:
            latent = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
            want += 4 * (latent + fields.get("index_head_dim", 0))
        elif kind == "full_attention":
            want += 4 * 2 * fields["num_key_value_heads"] * fields["head_dim"]
        else:
            local += 1
    assert spec.history_bytes_per_token() == want
    window = fields.get("sliding_window") or 1
    exact = math.inf if linear else local * (window - 1)
    assert spec.replay_tokens(round_up=False) == exact
    assert sum(slot.repeats for slot in spec.slots() if slot.name == "state") == linear
    for slot in spec.slots():
        if isinstance(slot.leaf.contract, Window):
            assert slot.leaf.contract.width == fields["sliding_window"]
        if isinstance(slot.leaf.contract, History):
            assert slot.leaf.contract == History(1)


@pytest.mark.parametrize("name", families.names())
def test_a_config_that_is_not_understood_is_refused(name: str) -> None:
    golden = next(x for x in families.goldens() if x.startswith(name))
    fields, parse = families.fields(golden), hf.family(name).parse
    types = "layer_types" if "layer_types" in fields else "layers_block_type"
    parse(fields)
    for change, match in (
        ({"hidden_size": None}, "hidden_size"),
        ({types: ["magic"] * len(layer_types(fields))}, "magic"),
        ({"dtype": "float8"}, "float8"),
    ):
        with pytest.raises(ValueError, match=match):
            parse(fields | change)


@pytest.mark.parametrize("name", families.names())
def test_another_familys_model_cannot_be_written(name: str, tmp_path) -> None:
    model, params = tiny.model("v4")
    with pytest.raises(ValueError, match="no place for"):
        hf.save_pretrained(model, params, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="DeepSeek-V4 has no place for"):
        hf.save_pretrained(*families.model(name), tmp_path / "out")


def test_orders_of_columns_are_not_mixed_up(tmp_path) -> None:
    """Qwen3-Next's and Qwen3.5's linear layers have the same weights in two orders."""
    for name, other in (("qwen3_5_moe_text", "qwen3_next"), ("qwen3_next", "qwen3_5_moe_text")):
        with pytest.raises(ValueError, match=r"has no place for .*attention="):
            hf.save_pretrained(*families.model(name), tmp_path / "out", other)


TOWERS = {
    "gemma3": ("gemma3_text-five_to_one", ("vision_tower.a.weight", "multi_modal_projector.b")),
    "qwen3_5": ("qwen3_5_text-three_to_one", ("visual.a.weight", "visual.merger.b")),
    "qwen3_5_moe": ("qwen3_5_moe_text-three_to_one", ("visual.a.weight", "visual.merger.b")),
}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", TOWERS)
def test_with_a_vision_tower(name: str, prefix: str, tmp_path) -> None:
    golden, others = TOWERS[name]
    tensors = load_file(families.GOLDENS / golden / "model.safetensors")
    head = {"language_model.model.": "language_model."}.get(prefix, "")
    renamed = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: x
        for name, x in tensors.items()
    }
    renamed[others[0]] = renamed[f"model.{others[1]}"] = np.ones(2)
    if name != "gemma3":
        renamed["mtp.layers.0.a.weight"] = np.ones(2)
    save_file(renamed, tmp_path / "model.safetensors")
    fields = {"model_type": name, "text_config": families.fields(golden)}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, params = hf.from_pretrained(tmp_path, chunk=families.CHUNK, block=families.BLOCK)
    assert model.config == families.load(golden)[0].config
    jax.tree.map(np.testing.assert_array_equal, params, families.load(golden)[1])
    with pytest.raises(ValueError, match=f"use {golden.partition('-')[0]}"):
        hf.save_pretrained(model, params, tmp_path / "out", name)
    with pytest.raises(ValueError, match="text_config"):
        hf.family(name).parse({})


def test_families_are_found_by_their_files() -> None:
    assert {"deepseek_v4", *families.names()} <= set(hf.families())
    assert "shards" not in hf.families()
    with pytest.raises(ValueError, match="gpt_oss"):
        hf.family("gpt_osss")


# -- what the suites do with DeepSeek-V4, for every family -----------------------------------------


def run(name: str, cache: Cache, start: int, stop: int) -> tuple[np.ndarray, Cache]:
    """Prefill of tokens [start, stop), the same number in every row."""
    model, params = families.model(name)
    logits, cache = model.prefill(params, tiny.tokens()[:, start:stop], cache)
    return np.asarray(logits), cache


@pytest.mark.full
@pytest.mark.parametrize("name", families.every())
def test_pages_give_the_same_bits(name: str) -> None:
    model, _ = families.model(name)
    paging = Paging.of(model.cache_spec, tiny.ROWS, tiny.CAPACITY)
    cache = model.init_paged_cache(tiny.ROWS, tiny.CAPACITY, paging, poison=True)
    for tokens in (20, tiny.CAPACITY):
        for row in range(tiny.ROWS):
            cache, flags = reserve(cache, row, tokens, owner(row + 1))
            assert int(flags) == 0
    plain = tiny.empty(model, poison=True)
    for start, stop in ((0, 29), (29, 45)):
        got, cache = run(name, cache, start, stop)
        want, plain = run(name, plain, start, stop)
        assert got.tobytes() == want.tobytes()
    got, want = (tiny.decode(name, x, 9)[0] for x in (cache, plain))
    assert got.tobytes() == want.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("name", families.every())
@pytest.mark.parametrize("length, size", [(13, 3), (16, 12), (29, 16)])
def test_rejected_drafts_leave_no_trace(name: str, length: int, size: int) -> None:
    model, params = families.model(name)
    _, start = run(name, tiny.empty(model, poison=True), 0, length)
    right = tiny.tokens()[:, length : length + size]

    def accepted(count: int, drafted: np.ndarray) -> Cache:
        _, draft = model.verify(params, drafted, tiny.copy(start))
        return model.accept(params, draft, np.full(tiny.ROWS, count))

    for count in (1, size // 2, size - 1):
        drafted = right.copy()
        drafted[:, count:] = (drafted[:, count:] + 17) % tiny.BASE.vocab_size
        cache, want = accepted(count, drafted), accepted(count, right[:, :count])
        tiny.assert_same_state(model, cache, want)
        got, again = (tiny.decode(name, x, 9)[0] for x in (cache, want))
        assert got.tobytes() == again.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("name", families.every())
def test_exact_replay(name: str) -> None:
    model, params = families.model(name)
    start, stop = 0, 48
    _, want = run(name, tiny.empty(model, poison=True), 0, stop)
    _, used = run(name, tiny.empty(model, poison=True), 0, stop)
    cache = model.replay(params, tiny.tokens(), used, start, stop)
    tiny.assert_same_state(model, cache, want)
    assert np.asarray(cache.grid_length).tolist() == [stop] * tiny.ROWS
