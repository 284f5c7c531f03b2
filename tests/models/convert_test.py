"""Hugging Face directories to orbax checkpoints and back: the same bits, whole or not at all."""

import pathlib
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from models import build, checkpoints, convert, hf
from models.config import DecoderConfig
from models.hf import shards
from models.quantised.leaf import any_packed
from tests.models import families
from tests.models.hf import quantised_dirs
from tests.models.weights import random_params

ROOT = pathlib.Path(__file__).parents[2]


def assert_same(left, right) -> None:
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def left_over(directory: pathlib.Path) -> list[str]:
    """Files beside the ones that a test made."""
    return sorted(x.name for x in directory.iterdir())


@pytest.mark.parametrize(
    "golden", ["smallest", "gemma3_text-turns_capped", "nemotron_h-experts_between"]
)
def test_there_and_back(golden: str, tmp_path: pathlib.Path) -> None:
    source, seen = families.GOLDENS / golden, []
    model, params = hf.from_pretrained(source)
    convert.to_checkpoint(source, tmp_path / "orbax", progress=seen.append)
    assert seen[-1].nbytes == seen[-1].all_nbytes > 0
    again, read = checkpoints.restore(tmp_path / "orbax")
    assert again.config == model.config
    assert_same(read, params)
    assert checkpoints.describe(tmp_path / "orbax").model_type == hf.model_type(source)
    convert.to_directory(tmp_path / "orbax", tmp_path / "back")
    back, tensors = hf.from_pretrained(tmp_path / "back")
    assert back.config == model.config
    assert_same(tensors, params)
    assert left_over(tmp_path) == ["back", "orbax"]


@pytest.mark.parametrize("name", ["v4", "gpt_oss"])
def test_packed_weights_there_and_back(name: str, tmp_path: pathlib.Path) -> None:
    source = quantised_dirs.MAKERS[name](tmp_path / "made")[0]
    model, params = hf.from_pretrained(source, keep_quantised=True)
    convert.to_checkpoint(source, tmp_path / "orbax", keep_quantised=True)
    again, read = checkpoints.restore(tmp_path / "orbax")
    assert again.config == model.config and any_packed(read)
    assert_same(read, params)
    convert.to_directory(tmp_path / "orbax", tmp_path / "back")
    assert_same(hf.from_pretrained(tmp_path / "back", keep_quantised=True)[1], params)


def test_another_dtype(tmp_path: pathlib.Path) -> None:
    source = families.GOLDENS / "smallest"
    convert.to_checkpoint(source, tmp_path / "orbax", dtype="bfloat16")
    want = hf.from_pretrained(source, param_dtype="bfloat16")[1]
    assert_same(checkpoints.restore(tmp_path / "orbax")[1], want)
    wide = checkpoints.restore(tmp_path / "orbax", param_dtype="float32")[1]
    assert wide["embed"].dtype == np.float32
    np.testing.assert_array_equal(wide["embed"], np.asarray(want["embed"], np.float32))


def test_a_target_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    source = families.GOLDENS / "smallest"
    convert.to_checkpoint(source, tmp_path / "orbax")
    with pytest.raises(ValueError, match="orbax exists"):
        convert.to_checkpoint(source, tmp_path / "orbax")
    (tmp_path / "back").mkdir()
    with pytest.raises(ValueError, match="back exists"):
        convert.to_directory(tmp_path / "orbax", tmp_path / "back")


def test_a_failure_leaves_no_target(tmp_path: pathlib.Path, monkeypatch) -> None:
    """The disk fills while a directory is written, and a process dies while a checkpoint is."""
    source = families.GOLDENS / "smallest"
    convert.to_checkpoint(source, tmp_path / "orbax")

    def full(*_, **__) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", full)
        with pytest.raises(OSError, match=r"safetensors: could not be written: no space"):
            convert.to_directory(tmp_path / "orbax", tmp_path / "back")
    assert left_over(tmp_path) == ["orbax"]

    (tmp_path / "orbax" / checkpoints.MARK).unlink()  # what orbax writes last
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoints.restore(tmp_path / "orbax")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        convert.to_directory(tmp_path / "orbax", tmp_path / "back")


def test_a_damaged_source_is_named_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    source = quantised_dirs.v4(tmp_path / "made")[0]
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        convert.to_checkpoint(source, tmp_path / "orbax")
    assert left_over(tmp_path) == ["made"]


def test_a_checkpoint_without_its_arrays_is_named(tmp_path: pathlib.Path) -> None:
    """A dry run sees every file that is lost or has lost its bytes, as the run does."""
    whole = tmp_path / "whole"
    convert.to_checkpoint(families.GOLDENS / "smallest", whole)
    files = [x.relative_to(whole) for x in (whole / "params").rglob("*") if x.is_file()]
    large = max(files, key=lambda x: (whole / x).stat().st_size)

    def refused(message: str) -> None:
        for run in (checkpoints.describe, checkpoints.restore, convert.describe):
            with pytest.raises(ValueError, match=message):
                run(tmp_path / "broken")
        shutil.rmtree(tmp_path / "broken")

    broken = pathlib.Path(shutil.copytree(whole, tmp_path / "broken"))
    shutil.rmtree(broken / "params")
    refused(r"broken/params does not exist")
    for file in (large, pathlib.Path("params/_METADATA")):
        for content in (b"", bytes((whole / file).stat().st_size)):
            shutil.copytree(whole, broken)
            (broken / file).write_bytes(content)
            refused(rf"broken/{file} is empty or begins with zeros")
    shutil.copytree(whole, broken)
    (broken / "params" / "_METADATA").unlink()
    refused("broken/params is damaged")
    shutil.copytree(whole, broken)
    (broken / large).write_bytes((whole / large).read_bytes()[:-100])
    with pytest.raises(ValueError, match="broken/params is damaged"):  # the run alone sees it
        checkpoints.restore(broken)


def test_integers_of_another_dtype_are_not_cast(tmp_path: pathlib.Path) -> None:
    model, params = hf.from_pretrained(families.GOLDENS / "smallest")
    table = jax.tree.map(lambda x: x.astype("uint32") if x.dtype == "int32" else x, params)
    assert any(x.dtype == "uint32" for x in jax.tree.leaves(table))
    checkpoints.save(tmp_path / "orbax", model, table)
    with pytest.raises(ValueError, match=r"table is uint32\[.*, not int32\["):
        checkpoints.restore(tmp_path / "orbax")


def test_models_without_a_family(tmp_path: pathlib.Path) -> None:
    """Checkpoints are for every model; directories for those that a family has a place for."""
    model = build(DecoderConfig(layer_types=("swa",), mlp_types=("dense",)))
    params = random_params(model)
    checkpoints.save(tmp_path / "own", model, params)
    again, read = checkpoints.restore(tmp_path / "own")
    assert again.config == model.config
    assert_same(read, params)
    with pytest.raises(ValueError, match="--model_type"):
        convert.to_directory(tmp_path / "own", tmp_path / "back")
    with pytest.raises(ValueError, match="no place for"):
        convert.to_directory(tmp_path / "own", tmp_path / "back", model_type="deepseek_v4")
    assert left_over(tmp_path) == ["own"]


def test_descriptions(tmp_path: pathlib.Path) -> None:
    source = families.GOLDENS / "smallest"
    text, ok = convert.describe(source)
    assert ok and "every tensor is accounted for" in text
    assert not convert.describe(source, limit=100)[1]
    convert.to_checkpoint(source, tmp_path / "orbax")
    text, ok = convert.describe(tmp_path / "orbax")
    assert ok and "model.norm.weight" in text
    assert not convert.describe(tmp_path / "orbax", limit=100)[1]


def flags(**given) -> types.SimpleNamespace:
    """As absl would have parsed them."""
    default = dict(target="", dtype="", keep_quantised=False, dry_run=False, memory_gib=None)
    return types.SimpleNamespace(**(default | {"model_type": ""} | given))


def test_what_flags_do(tmp_path: pathlib.Path, capsys) -> None:
    source = quantised_dirs.gpt_oss(tmp_path / "made")[0]
    convert.main(flags(source=source, dry_run=True, keep_quantised=True))
    assert "e2m1 / e8m0 per 1 x 32" in capsys.readouterr().out
    with pytest.raises(ValueError, match="would not succeed"):
        convert.main(flags(source=source, dry_run=True, memory_gib=1e-6))
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--target"):
        convert.main(flags(source=source))
    convert.main(flags(source=source, target=tmp_path / "orbax", keep_quantised=True))
    convert.main(flags(source=tmp_path / "orbax", target=tmp_path / "back"))
    want = hf.from_pretrained(source, keep_quantised=True)[1]
    assert_same(hf.from_pretrained(tmp_path / "back", keep_quantised=True)[1], want)
    assert not capsys.readouterr().out


def test_a_dry_run_refuses_what_the_run_would(tmp_path: pathlib.Path, capsys) -> None:
    source = families.GOLDENS / "smallest"
    model = build(DecoderConfig(layer_types=("swa",), mlp_types=("dense",)))
    checkpoints.save(tmp_path / "own", model, random_params(model))
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    before = left_over(tmp_path)
    for given, message in (
        (dict(source=source, target=tmp_path / "there"), "there exists; give a new --target"),
        (dict(source=source, target=tmp_path / "dangling"), "dangling exists"),
        (dict(source=source, target=tmp_path / "file" / "in"), "file is no directory"),
        (dict(source=source, target=tmp_path / "new", model_type="gpt_oss"), "--model_type=gpt"),
        (dict(source=tmp_path / "own", target=tmp_path / "new"), "came from no family"),
        (dict(source=tmp_path / "own", target=tmp_path / "new", keep_quantised=True), "--keep_q"),
        (dict(source=tmp_path / "absent", target=tmp_path / "new"), "does not exist"),
    ):
        for dry_run in (True, False):
            with pytest.raises(ValueError, match=message):
                convert.main(flags(**given, dry_run=dry_run))
    with pytest.raises(ValueError, match=r"--memory_gib=1\.0 would do nothing"):
        convert.main(flags(source=source, target=tmp_path / "new", memory_gib=1.0))
    assert left_over(tmp_path) == before
    capsys.readouterr()
    convert.main(flags(source=source, target=tmp_path / "new" / "deeper", dry_run=True))
    assert "every tensor is accounted for" in capsys.readouterr().out
    assert left_over(tmp_path) == before


@pytest.mark.full
def test_the_program(tmp_path: pathlib.Path) -> None:
    def run(*flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "models.convert", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    source = families.GOLDENS / "smallest"
    shown = run(f"--source={source}", "--dry_run")
    assert shown.returncode == 0 and "every tensor is accounted for" in shown.stdout
    small = run(f"--source={source}", "--dry_run", "--memory_gib=0.000001")
    assert small.returncode == 1 and "does not fit" in small.stdout
    made = run(f"--source={source}", f"--target={tmp_path / 'orbax'}")
    assert made.returncode == 0, made.stderr
    assert_same(checkpoints.restore(tmp_path / "orbax")[1], hf.from_pretrained(source)[1])
    again = run(f"--source={source}", f"--target={tmp_path / 'orbax'}")
    assert again.returncode == 1 and "exists" in again.stderr and "Traceback" not in again.stderr
