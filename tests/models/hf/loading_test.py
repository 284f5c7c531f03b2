"""Loading in pieces: every form and dtype, memory, progress, and dry runs that read no data."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf
from models.forms import FORMS, Form
from models.hf import dry_run, filling, shards
from models.hf.stored import Stored
from tests.models import families
from tests.models.hf import loading_memory, quantised_dirs

# Our weight's shape, and our array for the file's, by its own words.
FORM_CASES = {
    "same": ((5, 4, 3), lambda x: x),
    "swap": ((5, 4, 3), lambda x: np.stack([m.T for m in x])),
    "plus_one": ((7,), lambda x: 1 + x),
    "flat": ((6,), lambda x: x[0, 0, :, 0]),
    "taps": ((4, 9), lambda x: x[:, 0].T),
    "groups": ((3, 4, 5), lambda x: np.stack([x[g * 5 : (g + 1) * 5].T for g in range(3)])),
    "woven": ((2, 4, 6), lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], -1)),
    "woven_rows": (
        (2, 4, 6),
        lambda x: np.stack([np.concatenate([m[::2], m[1::2]]).T for m in x]),
    ),
}
FILE_SHAPES = {"flat": (1, 1, 6, 1)}


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_pieces_of_every_form(tmp_path, monkeypatch, name: str, dtype: str, chunk: int) -> None:
    """By rows, by a few rows and at once; the same dtype and another; and back."""
    monkeypatch.setattr(filling, "CHUNK", chunk)
    shape, ours = FORM_CASES[name]
    form = Form(name, 3 if name == "groups" else 1)
    stored_shape = FILE_SHAPES.get(name, form.file_shape(shape))
    tensor = np.random.default_rng(0).normal(size=stored_shape).astype(np.float32)
    save_file({"x": tensor, "y": tensor}, tmp_path / "model.safetensors")
    reader = shards.Reader(tmp_path)
    leaf = np.full((2, *shape), np.nan, dtype)
    filling.fill(reader, Stored("y", stored_shape), form, leaf[1])
    want = ours(tensor).astype(np.float32)
    np.testing.assert_array_equal(leaf[1], want.astype(dtype))
    assert np.isnan(leaf[0].astype(np.float32)).all()
    assert np.shares_memory(form.view(leaf[1]), leaf)
    if name not in ("plus_one", "flat", "taps"):
        np.testing.assert_array_equal(jax.numpy.asarray(form.ours(tensor)), want)
    if dtype == "float32":
        back = form.values_out(form.view(leaf[1])).reshape(stored_shape)
        np.testing.assert_allclose(back, tensor, atol=1e-6)


@pytest.mark.parametrize("form", ["same", "swap"])
def test_integers_that_a_narrower_dtype_cannot_hold_are_refused(tmp_path, monkeypatch, form):
    """In any piece, before they are cast; those at the bounds are read."""
    monkeypatch.setattr(filling, "CHUNK", 40)
    bounds = np.iinfo(np.int32)
    for value, fits in (
        (bounds.min, True),
        (bounds.max, True),
        (bounds.max + 1, False),
        (bounds.min - 1, False),
        (1 << 32, False),
        (-(1 << 63), False),
    ):
        tensor = np.zeros((2, 5, 5), np.int64)
        tensor[-1, 3, 2] = value
        save_file({"ids": tensor}, tmp_path / "model.safetensors")
        reader, ours = shards.Reader(tmp_path), np.zeros(tensor.shape, np.int32)
        if fits:
            filling.fill(reader, Stored("ids", tensor.shape), Form(form, 1), ours)
            assert ours.sum() == value
            continue
        with pytest.raises(ValueError, match=f"ids has the value {value}, .*int32"):
            filling.fill(reader, Stored("ids", tensor.shape), Form(form, 1), ours)


@pytest.mark.parametrize("name", quantised_dirs.MAKERS)
def test_quantised_tensors_in_small_pieces(tmp_path, monkeypatch, name: str) -> None:
    packed, plain = quantised_dirs.MAKERS[name](tmp_path)
    want = hf.from_pretrained(plain)[1]
    for chunk in (1, 300):
        monkeypatch.setattr(filling, "CHUNK", chunk)
        got = hf.from_pretrained(packed)[1]
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parameters_have_the_memory_that_was_read_into() -> None:
    value = filling.aligned((7, 9), np.dtype(ml_dtypes.bfloat16))
    assert value.ctypes.data % filling.ALIGNMENT == 0 and value.shape == (7, 9)
    if jax.default_backend() == "cpu":
        assert jax.device_put(value).unsafe_buffer_pointer() == value.ctypes.data


def check_memory(directory: pathlib.Path, keep: bool) -> dict:
    """Peaks of a load, and what was reported on the way."""
    found = loading_memory.measure(directory, keep)
    assert found["peak"] - found["before"] < 1.15 * found["params"]
    assert found["peak"] - found["before"] > 0.9 * found["params"]  # the measure sees them
    assert found["reports"] == found["tensors"] > 100
    assert found["files"] > 1
    total = sum(x.stat().st_size for x in directory.glob("*.safetensors"))
    assert 0.99 * total < found["reported"] < total
    return found


@pytest.mark.parametrize("quantised", [False, pytest.param(True, marks=pytest.mark.full)])
def test_memory_of_loading(tmp_path: pathlib.Path, quantised: bool) -> None:
    """128 MB, and 128 MB dequantised from a quarter of it."""
    loading_memory.make(tmp_path / "model", 128 << 20, quantised)
    check_memory(tmp_path / "model", keep=False)


def test_what_is_loaded_is_what_was_written(tmp_path: pathlib.Path) -> None:
    loading_memory.make(tmp_path / "model", 20 << 20)
    model, params = hf.from_pretrained(tmp_path / "model")
    family = hf.family("deepseek_v4")
    names = 0
    for name, tensor in family.state_dict(model, params):
        if ".experts." in name:
            continue  # written in one tensor
        want = loading_memory.value(name, tensor.shape, tensor.dtype)
        assert tensor.tobytes() == want.tobytes(), name
        names += 1
    gate_up = np.asarray(params["segments"]["0"]["0"]["mlp"]["gate_up"])
    name = "model.layers.2.mlp.experts.3.w3.weight"
    shape = (loading_memory.INNER, loading_memory.WIDE)
    want = loading_memory.value(name, shape, gate_up.dtype)
    assert names > 50 and gate_up[1, 3, :, loading_memory.INNER :].T.tobytes() == want.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("quantised", [False, True])
def test_memory_of_loading_two_gigabytes(tmp_path: pathlib.Path, quantised: bool) -> None:
    """Interpreter, libraries and backend included."""
    loading_memory.make(tmp_path / "model", 2 << 30, quantised)
    found = check_memory(tmp_path / "model", keep=False)
    assert found["params"] > 1.9 * (1 << 30)
    assert found["peak"] < 1.15 * found["params"]
    if quantised:
        kept = check_memory(tmp_path / "model", keep=True)
        assert kept["params"] < 0.4 * found["params"]


# -- without reading data --------------------------------------------------------------------------


def test_a_dry_run_reads_headers_only(tmp_path: pathlib.Path) -> None:
    """The data may be missing on the disk: zeros in place of them change nothing."""
    source = quantised_dirs.v4(tmp_path)[0]
    path = source / "model.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = bytes(len(raw) - start)
    path.write_bytes(raw)
    for keep in (False, True):
        plan = hf.plan_pretrained(source, keep_quantised=keep)
        report = dry_run.dry_run(plan)
        assert report.ok and not plan.missing and not plan.extra
        leaves = jax.tree.leaves(hf.from_pretrained(source, keep_quantised=keep)[1])
        assert plan.nbytes == sum(x.nbytes for x in leaves) == sum(r.nbytes for r in report.rows)
        used = [name for name in plan.reader.files if not name.startswith("mtp.")]
        assert plan.read_nbytes == sum(map(plan.reader.nbytes, used)) > 0.9 * (len(raw) - start)
        held = {row.path: row.held for row in report.rows}
        want = "e2m1 / e8m0 per 1 x 32" if keep else "float32"
        assert held["segments/0/1/mlp/down"] == want
        text = report.text()
        assert "segments/0/1/mlp/down" in text and "F8_E8M0+I8" not in text and "I8" in text
        assert "every tensor is accounted for" in text


def test_a_dry_run_says_what_does_not_fit() -> None:
    plan = hf.plan_pretrained(families.GOLDENS / "smallest")
    whole = dry_run.dry_run(plan, plan.nbytes)
    assert whole.fits and "0 B to spare" in whole.text()
    largest = max(whole.rows, key=lambda row: row.nbytes)
    tight = dry_run.dry_run(plan, plan.nbytes - 1)
    assert not tight.fits and not tight.ok
    (out,) = (row for row in tight.rows if not row.fits)
    assert out.nbytes == largest.nbytes
    assert "does not fit" in tight.text() and "1 B too much" in tight.text()


def test_a_dry_run_says_what_is_missing_and_what_is_extra(tmp_path: pathlib.Path) -> None:
    golden = families.GOLDENS / "smallest"
    tensors = load_file(golden / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.ghost"] = np.ones(2, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((golden / "config.json").read_bytes())
    plan = hf.plan_pretrained(tmp_path)
    report = dry_run.dry_run(plan)
    assert plan.missing == ("model.norm.weight",) and plan.extra == ("model.ghost",)
    text = report.text()
    assert not report.ok and "lm_head.weight is [" in text
    assert "missing tensors: model.norm.weight" in text and "no place for: model.ghost" in text


# -- files -----------------------------------------------------------------------------------------


def test_a_file_that_shrinks_is_named(tmp_path: pathlib.Path) -> None:
    save_file({"a": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    reader = shards.Reader(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors: a could not be read"):
        reader.tensor("a")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        shards.Reader(tmp_path)


def test_reads_are_bounded(tmp_path: pathlib.Path) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    reader = shards.Reader(tmp_path)
    with pytest.raises(ValueError, match="a has 16 bytes, not 20"):
        reader.into("a", np.empty(5, np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        reader.into("a", np.empty((4, 2), np.float32)[:, 0])


def test_a_damaged_index_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / shards.INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        shards.Reader(tmp_path)
