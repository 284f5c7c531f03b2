"""DeepSeek-V4 directories: read in every spelling, refused where they do not fit, written back."""

import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import build, hf
from models.config import DecoderConfig
from models.hf import deepseek_v4, deepseek_v4_config, shards
from tests import variants
from tests.oracle import decoder, from_hf
from tests.oracle.random_weights import RandomWeights

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = ("smallest", "ratios_4_8", "ratios_3_7", "ratios_4_128", "flash", "legacy")


def golden(name):
    """Tokens and logits of one golden."""
    with np.load(GOLDENS / name / "golden.npz") as file:
        return file["tokens"], file["logits"]


@pytest.fixture
def directory(tmp_path):
    """A copy of one golden that a test may change."""
    return pathlib.Path(shutil.copytree(GOLDENS / "smallest", tmp_path / "model"))


def change_config(directory, **changes):
    """Set fields of `config.json`; None removes one."""
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def change_tensors(directory, change):
    """Rewrite the weights as `change(tensors)` leaves or returns them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, metadata={"format": "pt"})


def random_params(model):
    """Weights without `init`, which compiles; scaled so that logits are of order 1."""
    rng = np.random.default_rng(1)

    def draw(spec):
        if np.issubdtype(spec.dtype, np.integer):
            return jax.numpy.asarray(rng.integers(0, model.config.n_experts, spec.shape), "int32")
        return jax.numpy.asarray(0.1 + 0.3 * rng.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(draw, model.abstract_params())


def assert_same_tree(left, right):
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", variants.some(NAMES, NAMES[:1]))
def test_forward_equals_hugging_face(name):
    model, params = hf.from_pretrained(GOLDENS / name)
    tokens, expected = golden(name)
    logits = jax.jit(model.forward)(params, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_checkpoint_names_and_fields_give_the_same_model():
    model, params = hf.from_pretrained(GOLDENS / "ratios_4_128")
    legacy, legacy_params = hf.from_pretrained(GOLDENS / "legacy")
    assert model.config == legacy.config
    assert_same_tree(params, legacy_params)


def test_library_export_names_give_the_same_weights(tmp_path):
    """What the library writes by default: checkpoint leaves, `model.` prefix, own top names."""
    shutil.copytree(GOLDENS / "legacy", tmp_path, dirs_exist_ok=True)

    def rename(tensors):
        out = {}
        for name, value in tensors.items():
            name = name.replace("attn.kv_norm", "attn.norm")
            if name.startswith("layers."):
                name = "model." + name
            elif name.startswith("hc_head_"):
                name = "model.hc_head." + name.removeprefix("hc_head_").replace("fn", "hc_fn")
                name = name.replace(".base", ".hc_base").replace(".scale", ".hc_scale")
            name = {"embed.weight": "model.embed_tokens.weight"}.get(name, name)
            name = {"norm.weight": "model.norm.weight"}.get(name, name)
            out[name] = value
        return out

    change_tensors(tmp_path, rename)
    _, params = hf.from_pretrained(tmp_path)
    assert_same_tree(params, hf.from_pretrained(GOLDENS / "ratios_4_128")[1])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_config_agrees_with_the_reference(name):
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    ours, reference = deepseek_v4_config.parse(fields), from_hf.config_of(fields)
    for field, value in vars(reference).items():
        if field == "yarn":
            assert (ours.yarn is None) == (value is None)
            assert value is None or vars(value).items() <= ours.yarn._asdict().items()
        elif field not in ("n_kv_heads", "qk_norm"):  # "full" layers only
            assert getattr(ours, field) == value, field


def test_missing_extra_and_misshapen_tensors_are_all_named(directory):
    def damage(tensors):
        del tensors["model.layers.0.self_attn.sinks"]
        del tensors["model.layers.2.mlp.experts.down_proj"]
        tensors["model.layers.1.self_attn.surprise"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(3, np.float32)
        gate = tensors["model.layers.1.mlp.gate.weight"]
        tensors["model.layers.1.mlp.gate.weight"] = gate.astype(np.int32)

    change_tensors(directory, damage)
    with pytest.raises(ValueError) as error:
        hf.from_pretrained(directory)
    message = str(error.value)
    assert "missing tensors: model.layers.0.self_attn.sinks, model.layers.2.mlp.experts" in message
    assert "no place for: model.layers.1.self_attn.surprise" in message
    assert "model.norm.weight is [3], not [8]" in message
    assert "model.layers.1.mlp.gate.weight is I32" in message
    assert str(directory) in message


def test_further_token_heads_are_dropped(directory):
    expected = hf.from_pretrained(directory)[1]
    change_tensors(directory, lambda t: t.update({"model.mtp.0.x.weight": np.zeros(2, np.float32)}))
    assert_same_tree(hf.from_pretrained(directory)[1], expected)


def test_one_missing_expert_is_named(tmp_path):
    shutil.copytree(GOLDENS / "legacy", tmp_path, dirs_exist_ok=True)
    lost = "layers.1.ffn.experts.2.w3.weight"
    change_tensors(tmp_path, lambda t: {k: v for k, v in t.items() if k != lost})
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.2\.w3"):
        hf.from_pretrained(tmp_path)


def test_a_tensor_in_two_spellings_is_refused(directory):
    def double(tensors):
        tensors["layers.0.attn.attn_sink"] = tensors["model.layers.0.self_attn.sinks"]

    change_tensors(directory, double)
    with pytest.raises(ValueError, match="remove one of them"):
        hf.from_pretrained(directory)


def test_table_of_experts_that_do_not_exist_is_refused(directory):
    change_tensors(directory, lambda t: t["model.layers.0.mlp.gate.tid2eid"].fill(4))
    with pytest.raises(ValueError, match=r"tid2eid names experts 4\.\.4 of 4"):
        hf.from_pretrained(directory)


@pytest.mark.parametrize("value", [1 << 32, (1 << 32) + 1, 1 << 31, -(1 << 63)])
def test_an_expert_that_would_wrap_is_refused(directory, value):
    def set_one(tensors):
        tensors["model.layers.0.mlp.gate.tid2eid"][-1, -1] = value

    change_tensors(directory, set_one)
    with pytest.raises(ValueError, match=rf"tid2eid has the value {value}, .*int32"):
        hf.from_pretrained(directory)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"deepseek_v4"', "{}", "{"])
def test_a_config_that_is_no_object_is_named(directory, text):
    (directory / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (an object|model_type|Expecting)"):
        hf.from_pretrained(directory)


BAD_FIELDS = (
    ({"layer_types": None}, "no schedule"),
    ({"layer_types": None, "compress_ratios": [0, 4, 8]}, r"compress_ratios \[8\]"),
    ({"layer_types": ["sliding_attention"] * 2}, "3 layers need 3"),
    ({"mlp_layer_types": None}, "num_hash_layers"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"n_shared_experts": 2}, "n_shared_experts"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'.*bfloat16"),
    ({"dtype": "float16"}, "float16"),
    ({"index_topk": None}, "lacks index_topk"),
    ({"swiglu_limit": 0.0}, "swiglu_limit"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
    ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2}}, "YaRN lacks"),
    ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "mscale": 1}}, "mscale"),
    ({"model_type": "deepseek_v3"}, "deepseek_v3"),
)


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda x: str(x)[:40])
def test_fields_that_are_not_understood_are_refused(directory, fields, message):
    change_config(directory, **fields)
    with pytest.raises(ValueError, match=message):
        hf.from_pretrained(directory)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        hf.from_pretrained(tmp_path)
    shutil.copy(GOLDENS / "smallest" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        hf.from_pretrained(tmp_path)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 4096])
@pytest.mark.parametrize("name", ["ratios_3_7", "flash"])
def test_saved_and_read_again_is_the_same(tmp_path, name, shard_bytes):
    model, params = hf.from_pretrained(GOLDENS / name)
    deepseek_v4.save(model, params, tmp_path, shard_bytes)
    assert (tmp_path / shards.INDEX).is_file() == (shard_bytes == 4096)
    again, again_params = hf.from_pretrained(tmp_path)
    assert again.config == model.config
    assert_same_tree(params, again_params)
    if shard_bytes == 4096:  # no reader may be left with shards of an earlier, longer model
        hf.save_pretrained(model, params, tmp_path)
        assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_index_and_shards_must_agree(tmp_path):
    model, params = hf.from_pretrained(GOLDENS / "smallest")
    deepseek_v4.save(model, params, tmp_path, 4096)
    index = json.loads((tmp_path / shards.INDEX).read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-" + "x"
    (tmp_path / shards.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not exist"):
        hf.from_pretrained(tmp_path)
    index["weight_map"]["model.ghost"] = index["weight_map"]["lm_head.weight"]
    (tmp_path / shards.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"do not hold: model\.ghost"):
        hf.from_pretrained(tmp_path)


def test_bfloat16_in_and_out(tmp_path):
    model, params = hf.from_pretrained(GOLDENS / "smallest", param_dtype="bfloat16")
    assert params["embed"].dtype == jax.numpy.bfloat16
    assert params["segments"]["0"]["0"]["attn_hc"]["fn"].dtype == np.float32  # stays float32
    hf.save_pretrained(model, params, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert stored["model.layers.0.mlp.gate.tid2eid"].dtype == np.int64
    assert_same_tree(params, hf.from_pretrained(tmp_path)[1])


def test_tied_embeddings_have_no_head(tmp_path):
    config = hf.from_pretrained(GOLDENS / "smallest")[0].config.replace(tie_embeddings=True)
    model = build(config)
    params = random_params(model)
    hf.save_pretrained(model, params, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert_same_tree(params, hf.from_pretrained(tmp_path)[1])


def test_models_of_another_family_are_not_saved(tmp_path):
    model = build(DecoderConfig())
    with pytest.raises(ValueError, match=r"no place for mlp_types=.*q_lora_rank=0.*hc_streams=0"):
        hf.save_pretrained(model, {}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


VARIANTS = {
    "plain": {},
    "no_window": {"layer_types": ("csa", "hca", "full"), "window": 0},
    "no_overlap": {"csa_overlap": False},
    "no_indexer": {"indexer": False, "sinks": False},
    "all_entries": {"index_topk": -1},
    "low_rank": {"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "n_shared_experts": 2},
    "streams": {"hc_streams": 2, "tie_embeddings": True, "qk_norm": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_state_dict_of_every_variant_is_what_the_reference_asks_for(name):
    config = DecoderConfig(
        vocab_size=31, d_model=16, layer_types=("swa", "csa", "hca", "full", "csa"),
        mlp_types=("dense", "moe", "hash_moe", "dense", "moe"), n_heads=4, head_dim=8, rope_dim=4,
        window=5, csa_ratio=2, hca_ratio=3, index_dim=8, index_topk=3, d_ff=8,
    ).replace(**VARIANTS[name])  # fmt: skip
    config = config.replace(mlp_types=config.mlp_types[: len(config.layer_types)])
    model, asked = build(config), RandomWeights(config)
    decoder.forward(config, asked, np.arange(12))
    tensors = dict(deepseek_v4.state_dict(model, random_params(model)))
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in asked.items()}
