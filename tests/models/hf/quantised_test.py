"""Checkpoints in quantised layouts: read, kept as they are, run, written, and refused."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from hetero_kv.params import Params
from hetero_kv.prefix.identity import weights_digest
from models import hf
from models.decoder import Decoder
from models.hf import shards
from models.quantised.leaf import Packed, any_packed, is_packed, logical
from tests.models import tiny
from tests.models.hf import quantised_dirs

SIZES = {"chunk": 16}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, pathlib.Path]]:
    """The directory and its dequantised twin, by name."""
    root = tmp_path_factory.mktemp("quantised")
    return {name: make(root / name) for name, make in quantised_dirs.MAKERS.items()}


def packed_leaves(params: Params) -> list[Packed]:
    """All of them."""
    return [x for x in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(x)]


def assert_same(left: Params, right: Params) -> None:
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def load(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Its tensors; the library's own reader for numpy does not know e8m0."""
    reader = shards.Reader(directory)
    return {name: reader.tensor(name) for name in reader.files}


def dequantised(params: Params) -> Params:
    """By one compiled call."""

    def run(params: Params) -> Params:
        return jax.tree.map(
            lambda x: x.dequantise() if is_packed(x) else x, params, is_leaf=is_packed
        )

    return jax.jit(run, compiler_options=tiny.FAST_COMPILE)(params)


def change(directory: pathlib.Path, target: pathlib.Path, edit) -> pathlib.Path:
    """A copy whose tensors `edit` has changed."""
    shutil.copytree(directory, target)
    tensors = load(target)
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", quantised_dirs.MAKERS)
def test_dequantised_on_load(made, name: str, dtype: str) -> None:
    packed, plain = made[name]
    model, params = hf.from_pretrained(packed, param_dtype=dtype)
    assert not any_packed(params)
    twin, want = hf.from_pretrained(plain, param_dtype=dtype)
    assert model.config == twin.config
    assert_same(params, want)


@pytest.mark.parametrize("name", quantised_dirs.MAKERS)
def test_kept_weights_mean_what_loading_gives(made, name: str) -> None:
    packed, plain = made[name]
    model, params = hf.from_pretrained(packed, keep_quantised=True)
    want = hf.from_pretrained(plain)[1]
    model.stack.check(params)
    kept = packed_leaves(params)
    wide = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in kept)
    assert kept and sum(x.nbytes for x in kept) < wide / 2
    assert_same(dequantised(params), want)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), logical(params))
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), want)
    elements = {x.meaning.blocks.element for x in kept}
    assert elements == {"v4": {"e4m3", "e2m1"}, "v32": {"e4m3"}, "gpt_oss": {"e2m1"}}[name]


@pytest.mark.parametrize("name", quantised_dirs.MAKERS)
def test_kept_weights_are_their_models_when_prepared(made, name: str) -> None:
    model, params = hf.from_pretrained(made[name][0], keep_quantised=True, scan_layers=False)
    prepared = model.prepare(params, blocks=True)
    assert any_packed(prepared.few) and any_packed(prepared.many)
    for rows in (1, 100):
        model.stack.check(prepared.read(rows).tree)
    lacking = prepared.read(1).tree
    lacking["segments"]["0"]["0"]["small"] = lacking["segments"]["0"]["0"]["small"][:, :-1]
    with pytest.raises(ValueError, match="not of this model"):
        model.stack.check(lacking)


def logits(model: Decoder, params: Params) -> list[np.ndarray]:
    """Of a prefill in pieces and of decode steps."""
    cache, out = model.init_cache(2, 64), []
    for start, stop in ((0, 21), (21, 37)):
        got, cache = model.prefill(params, TOKENS[:, start:stop], cache)
        out.append(np.asarray(got))
    for i in range(37, 40):
        got, cache = model.decode_step(params, TOKENS[:, i], cache)
        out.append(np.asarray(got))
    return out


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        ("gpt_oss", True),
        *(
            pytest.param(name, scan, marks=pytest.mark.full)
            for name, scan in (("v4", True), ("v4", False), ("v32", True), ("gpt_oss", False))
        ),
    ],
)
def test_logits_are_bitwise_those_of_the_dequantised_twin(made, name: str, scan: bool) -> None:
    packed, plain = made[name]
    sizes = SIZES | {"scan_layers": scan}
    model, params = hf.from_pretrained(packed, keep_quantised=True, **sizes)
    _, twin = hf.from_pretrained(plain, **sizes)
    got, want = logits(model, params), logits(model, twin)
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        assert a.tobytes() == b.tobytes()
    if not scan:
        prepared = logits(model, model.prepare(params))
        for a, b in zip(prepared, logits(model, model.prepare(twin)), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("tokens", [1, 4])
def test_products_with_an_expert_are_bitwise_those_of_the_twin(made, tokens: int) -> None:
    """Of one row, as in decode steps, a product may be fused with what makes its weight."""
    packed, plain = made["v32"]
    model, params = hf.from_pretrained(packed, keep_quantised=True)
    _, twin = hf.from_pretrained(plain)
    layer = model.stack.groups[1].layers[0]
    x = np.random.default_rng(0).normal(size=(2, tokens, model.config.d_model))
    ids = np.zeros((2, tokens), np.int32)

    @jax.jit
    def run(weights: Params, x: jax.Array) -> jax.Array:
        own = layer.plain({"mlp": jax.tree.map(lambda w: w[0], weights)}, x)
        return layer.mlp(own["mlp"], x, ids, False)

    trees = [tree["segments"]["1"]["0"]["mlp"] for tree in (params, twin)]
    assert [any_packed(tree) for tree in trees] == [True, False]
    got, want = (np.asarray(run(tree, x.astype(np.float32))) for tree in trees)
    assert got.any() and got.tobytes() == want.tobytes()


def test_forward_is_bitwise_that_of_the_dequantised_twin(made) -> None:
    packed, plain = made["v4"]
    model, params = hf.from_pretrained(packed, keep_quantised=True)
    run = jax.jit(model.forward, compiler_options=tiny.FAST_COMPILE)
    got, want = (np.asarray(run(x, TOKENS)) for x in (params, hf.from_pretrained(plain)[1]))
    assert got.tobytes() == want.tobytes()


def test_the_model_is_never_dequantised_as_a_whole(made) -> None:
    """Temporary memory of many decode steps is of one layer, not of all: nothing is hoisted."""
    fields = json.loads((made["gpt_oss"][0] / "config.json").read_text())
    config = hf.family("gpt_oss").parse(fields).replace(scan_layers=False, chunk=16)
    layers = 12
    config = config.replace(
        layer_types=("local", "full") * (layers // 2), mlp_types=("moe",) * layers, n_experts=8
    )
    model, one = Decoder(config), hf.from_pretrained(made["gpt_oss"][0], keep_quantised=True)[1]
    meaning = one["segments"]["0"]["0"]["mlp"]["gate_up"].meaning
    assert meaning.form.name == "woven_rows"

    def packed(path: tuple, spec: jax.ShapeDtypeStruct):
        if path[-1].key not in ("gate_up", "down") or len(spec.shape) != 4:
            return spec
        own = meaning
        if path[-1].key == "down":
            own = dataclasses.replace(meaning, form=dataclasses.replace(meaning.form, name="swap"))
        shape = (*spec.shape[:2], spec.shape[3], spec.shape[2])
        codes = jax.ShapeDtypeStruct(own.blocks.code_shape(shape), jnp.uint8)
        scales = jax.ShapeDtypeStruct(own.blocks.scale_shape(shape), jnp.uint8)
        return Packed(own, (codes,), (scales,))

    wanted = model.abstract_params()
    params = jax.tree_util.tree_map_with_path(packed, wanted)
    experts = [x for x in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(x)]
    each = max(int(np.prod(x.shape)) * 4 for x in experts)
    whole = sum(int(np.prod(x.shape)) * 4 for x in experts)
    cache = model.abstract_cache(16, 32)
    token = jax.ShapeDtypeStruct((16,), jnp.int32)

    def many(params, token, cache):
        def body(carry, _):
            logits, cache = model.stack.step(params, *carry, None)
            return (jnp.argmax(logits, -1).astype(jnp.int32), cache), None

        return jax.lax.scan(body, (token, cache), None, length=4)[0]

    compiled = jax.jit(many, donate_argnums=2).lower(params, token, cache).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert len(experts) == 2 * layers
    assert temporary < whole / 3 and temporary > each  # not nothing: the test sees them


def test_identity_sees_bytes_and_their_meaning(made) -> None:
    packed, plain = made["v4"]
    _, params = hf.from_pretrained(packed, keep_quantised=True)
    leaf = params["segments"]["0"]["0"]["attn"]["o_a"]
    assert is_packed(leaf) and leaf.meaning.form.name == "groups"
    meaning = leaf.meaning
    blocks = meaning.blocks
    other = {
        "same": leaf,
        "codes": Packed(meaning, tuple(x ^ 1 for x in leaf.codes), leaf.scales),
        "scales": Packed(meaning, leaf.codes, tuple(x + 1 for x in leaf.scales)),
    }
    for name, changed in {
        "dtype": dataclasses.replace(meaning, dtype="bfloat16"),
        "form": dataclasses.replace(meaning, form=dataclasses.replace(meaning.form, groups=4)),
        "block": dataclasses.replace(
            meaning, blocks=dataclasses.replace(blocks, block=(blocks.block[0], 9))
        ),
        "scale": dataclasses.replace(meaning, blocks=dataclasses.replace(blocks, scale="float32")),
    }.items():
        other[name] = Packed(changed, leaf.codes, leaf.scales)
    digests = {name: weights_digest({"w": x}) for name, x in other.items()}
    assert digests["same"] == weights_digest({"w": leaf})
    assert len(set(digests.values())) == len(digests)
    assert weights_digest(params) != weights_digest(hf.from_pretrained(plain)[1])


@pytest.mark.parametrize("name", quantised_dirs.MAKERS)
def test_kept_weights_are_written_back(made, name: str, tmp_path: pathlib.Path) -> None:
    """Into the same bytes under the library's names, and read as the same leaves."""
    packed, _ = made[name]
    model, params = hf.from_pretrained(packed, keep_quantised=True)
    hf.save_pretrained(model, params, tmp_path / "out", _type(packed))
    again, read = hf.from_pretrained(tmp_path / "out", keep_quantised=True)
    assert again.config == model.config
    assert_same(params, read)
    before, after = (
        sorted(
            (x.dtype.name, x.shape, x.tobytes())
            for name, x in load(directory).items()
            if x.itemsize == 1 or name.endswith("_scale_inv")
        )
        for directory in (packed, tmp_path / "out")
    )
    assert len(before) >= 2 * len(packed_leaves(params)) and before == after
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    want = json.loads((packed / "config.json").read_text())
    ours, theirs = fields["quantization_config"], want["quantization_config"]
    assert all(theirs[key] == ours[key] for key in set(ours) & set(theirs))
    assert ours["quant_method"] == theirs["quant_method"]
    assert fields.get("expert_dtype") == want.get("expert_dtype")


def _type(directory: pathlib.Path) -> str:
    return json.loads((directory / "config.json").read_text())["model_type"]


def test_a_layout_without_names_is_not_written(made, tmp_path: pathlib.Path) -> None:
    model, params = hf.from_pretrained(made["gpt_oss"][0], keep_quantised=True)
    leaf = params["segments"]["0"]["0"]["mlp"]["down"]
    meaning = dataclasses.replace(
        leaf.meaning, form=dataclasses.replace(leaf.meaning.form, name="woven_rows")
    )
    params["segments"]["0"]["0"]["mlp"]["down"] = Packed(meaning, leaf.codes, leaf.scales)
    with pytest.raises(ValueError, match=r"mlp/down is packed as .* without keep_quantised"):
        hf.save_pretrained(model, params, tmp_path / "out", "gpt_oss")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_mixed_layouts_is_dequantised(made, tmp_path: pathlib.Path) -> None:
    """Layers of one leaf must agree; a single layer left in float32 makes it float32."""
    name = "model.layers.2.mlp.experts.gate_up_proj"
    packed, plain = made["gpt_oss"]

    def edit(tensors) -> None:
        del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        tensors[name] = load(plain)[name]

    model, params = hf.from_pretrained(change(packed, tmp_path / "x", edit), keep_quantised=True)
    assert [run.repeats for run in model.runs] == [2]
    whole = packed_leaves(hf.from_pretrained(packed, keep_quantised=True)[1])
    assert len(packed_leaves(params)) == len(whole) - 1
    assert_same(dequantised(params), hf.from_pretrained(plain)[1])


def scale_lost(tensors) -> None:
    del tensors["layers.0.attn.wq_a.scale"]


def scale_short(tensors) -> None:
    name = "layers.0.attn.wq_b.scale"
    tensors[name] = tensors[name][:-1].copy()


def scale_of_int(tensors) -> None:
    name = "layers.0.attn.wkv.scale"
    tensors[name] = tensors[name].view(np.int8)


def codes_short(tensors) -> None:
    name = "layers.1.ffn.experts.2.w1.weight"
    tensors[name] = tensors[name][:, :-1].copy()


def orphan(tensors) -> None:
    tensors["layers.0.attn.other.scale"] = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (scale_lost, r"layers\.0\.attn\.wq_a\.weight is F8_E4M3 without scales"),
        (scale_short, r"layers\.0\.attn\.wq_b\.scale is \[5, 1\], not \[6, 1\]"),
        (scale_of_int, r"layers\.0\.attn\.wkv\.scale is I8"),
        (codes_short, r"layers\.1\.ffn\.experts\.2\.w1\.weight is \[8, 14\], not \[8, 16\]"),
        (orphan, r"no place for: layers\.0\.attn\.other\.scale"),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_damaged_quantised_tensors_are_named(made, tmp_path, edit, match, keep) -> None:
    directory = change(made["v4"][0], tmp_path / "bad", edit)
    with pytest.raises(ValueError, match=match) as error:
        hf.from_pretrained(directory, keep_quantised=keep)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize(
    ("about", "match"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"scale_fmt": "int"}, "scale_fmt is 'int'"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"weight_block_size": [128, 128]}, r"blocks of \[128, 128\]"),
    ],
)
def test_settings_that_are_not_understood_are_refused(made, tmp_path, about, match) -> None:
    directory = pathlib.Path(shutil.copytree(made["v4"][0], tmp_path / "bad"))
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] |= about
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=match):
        hf.from_pretrained(directory)


def test_packed_weights_of_another_shape_are_refused(made) -> None:
    model, params = hf.from_pretrained(made["gpt_oss"][0], keep_quantised=True)
    mlp = params["segments"]["0"]["0"]["mlp"]
    mlp["down"], mlp["gate_up"] = mlp["gate_up"], mlp["down"]
    with pytest.raises(ValueError, match="not of this model"):
        model.stack.check(params)
