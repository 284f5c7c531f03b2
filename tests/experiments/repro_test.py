"""A bundle of a real failed audit is replayed elsewhere; what is no such bundle is refused."""

import copy
import functools
import json
import pathlib
import subprocess
import sys

import pytest

from experiments import checkpoint, repro, train_config
from hetero_kv import bundle_files, snapshot
from hetero_kv.faults import kinds
from hetero_kv.faults.forge import Held, Material
from hetero_kv.faults.inject import Injector
from hetero_kv.prefix.keys import block_keys
from tests import variants
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.faults_test import NUMBER
from tests.models import tiny

PROMPT = world.request(NUMBER).tokens
LENGTH = 40  # resumed of it


@functools.cache
def cold(length: int):
    """A row of `length` tokens."""
    rows, params = world.rows("small", world.SLOTS, True, True), world.model()[1]
    cache, at = rows.new(1), 0
    while at < length:
        _, cache, _ = rows.prefill(params, cache, 0, PROMPT, at, length)
        at += rows.piece(at, length)[0]
    return cache


def injector() -> Injector:
    spec = world.model()[0].cache_spec
    held, keys = Held.of(spec, cold(LENGTH)), block_keys(world.identity(), PROMPT)
    before = Held.of(spec, cold(LENGTH - spec.granularity))
    material = Material(target=held, before=before, donor=held, donor_end=held, other=held)
    return Injector(spec, material, keys, keys, keys, keys)


@functools.cache
def weights(directory: pathlib.Path, seed: int = 2) -> str:
    """A checkpoint of the model's weights."""
    made, _ = world.model()
    config = train_config.TrainConfig(model=made.config)
    checkpoint.export(tiny.random_params(made, seed), config, directory / f"weights{seed}")
    return str(directory / f"weights{seed}")


def failed(
    directory: pathlib.Path,
    component: str = "csa index keys",
    kind: str = kinds.ZERO,
    reuse: str = "validated",
    policy: str = "full",
    **options,
) -> pathlib.Path:
    """The bundle of an audit that found what a fault injector did before the bytes were sealed."""
    store = world.store(policy=policy)
    list(world.engine("validated", store=store).generate([world.request(NUMBER)]))
    case = kinds.Case(kind, component, kinds.HOST, kinds.REMADE, kinds.AUDIT)
    if policy == "full":
        injector().damage(case, store)
    options = dict(audit_share=1.0, bundle_dir=str(directory / "bundles")) | options
    options.setdefault("weights_source", weights(directory))
    made = world.engine(reuse, store=store, **options)
    if policy != "full":  # no checkpoints: put it into the row that is going to be replayed
        real, row_case = store.restore, kinds.Case(kind, component, kinds.ROW, "", kinds.AUDIT)

        def restore(lease, cache, row=0):
            cache = injector().damage_row(row_case, real(lease, cache, row=row), row)
            lease.brought = None  # as if the sums had been made after it
            return cache

        store.restore = restore
    handle = made.submit(world.request(NUMBER))
    world.drain(made)
    assert made.breaker.failed[0].component == component
    assert made.result(handle).resumable_length == LENGTH
    (path,) = (directory / "bundles").iterdir()
    return path


def replayed(path: pathlib.Path, *args: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return repro.run(path, *args, say=said.append), said


@pytest.mark.parametrize(
    "component",
    variants.some(["csa entries", "csa index keys", "windows", "tails"], ["csa entries"]),
)
def test_a_failure_is_reproduced(component: str, tmp_path: pathlib.Path) -> None:
    path = failed(tmp_path, component)
    code, said = replayed(path)
    assert code == 0, said
    found = json.loads((path / "repro.json").read_text())
    recorded = bundle_files.load(path).about["finding"]
    assert found["verdict"] == repro.REPRODUCED and not found["warnings"]
    assert found["first"]["component"] == component
    assert found["found"]["leaves"] == recorded["leaves"]
    assert found["cold_logits_as_recorded"] is found["resumed_logits_as_recorded"] is True
    assert found["answer_differs_from_cold"] == ("logits" in recorded["others"])
    assert any(f"{component} (" in x and f"block {recorded['block']}" in x for x in said)


def test_a_shadow_with_a_replay_is_reproduced(tmp_path: pathlib.Path) -> None:
    path = failed(tmp_path, "csa entries", reuse="shadow", policy="zero")
    assert bundle_files.load(path).about["state"]["replay"][1] == LENGTH
    assert replayed(path)[0] == 0


def test_evidence_that_is_wrong_is_told(tmp_path: pathlib.Path) -> None:
    path = failed(tmp_path, "csa entries")
    made = bundle_files.load(path)
    (name,) = (x for x in made.arrays if "count" in x and "index" not in x)
    made.arrays[name][:] -= 1
    code, said = replayed(again(made, tmp_path))
    assert code == 1 and any("csa entries: count" in x for x in said)


def again(made: bundle_files.Bundle, directory: pathlib.Path, **changes) -> pathlib.Path:
    """The bundle written anew, with other contents."""
    about = copy.deepcopy(made.about) | changes
    del about["tensors"]
    place = directory / "again"
    place.mkdir(exist_ok=True)
    return bundle_files.save(place, about, made.arrays)


def test_state_that_is_right_does_not_reproduce_it(tmp_path: pathlib.Path) -> None:
    made = bundle_files.load(failed(tmp_path))
    spec = world.model()[0].cache_spec
    made.arrays.update(snapshot.take_leaves(spec, cold(LENGTH), LENGTH))
    code, said = replayed(again(made, tmp_path))
    assert code == 1 and "verdict: not reproduced" in said
    assert "here:     40 tokens resumed as computed" in said


def test_with_less_state(tmp_path: pathlib.Path) -> None:
    made = bundle_files.load(failed(tmp_path))
    differing = {x["path"] for x in made.about["finding"]["leaves"]}
    for name in made.leaves().keys() - differing:
        del made.arrays[name]
    assert replayed(again(made, tmp_path))[0] == 0
    for name in differing:
        del made.arrays[name]
    code, said = replayed(again(made, tmp_path))
    assert code == 1 and "verdict: cannot be told" in said
    assert "logits of the cold run: as recorded, bit for bit" in said


@pytest.mark.full
def test_a_cold_request_is_replayed_too(tmp_path: pathlib.Path) -> None:
    options = dict(bundle_dir=str(tmp_path / "bundles"), weights_source=weights(tmp_path))
    made = world.engine("validated", store=world.store(), **options)
    request = world.request(NUMBER)
    request = type(request)(request.tokens, 3, bundle=True)
    list(made.generate([request]))
    (path,) = (tmp_path / "bundles").iterdir()
    out = tmp_path / "found.json"
    assert replayed(path, "", str(out))[0] == 0
    assert json.loads(out.read_text())["recorded"] is None


def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
    path = failed(tmp_path, weights_source="")
    made = bundle_files.load(path)
    model = made.about["model"]
    changed = {
        "does not say where its weights are": (path, ""),
        "no weights at": (path, str(tmp_path / "nowhere")),
        "holds weights": (path, weights(tmp_path, 3)),
        "is no bundle": (tmp_path / "nothing", ""),
        "not known here": (_model(made, tmp_path, config=model["config"] | {"x": 1}), ""),
        "another program": (_model(made, tmp_path, config=model["config"] | {"window": 7}), ""),
        "blocks of 16": (_model(made, tmp_path, block=16), ""),
        "no configuration": (_model(made, tmp_path, config=None), ""),
    }
    for text, (place, given) in changed.items():
        code, said = replayed(place, given)
        assert code == 2 and text in said[0], (text, said)
        assert not (pathlib.Path(place) / "repro.json").exists()
    assert replayed(path, weights(tmp_path))[0] == 0
    made.about["versions"]["jax"] = "0.0.1"
    code, said = replayed(again(made, tmp_path), weights(tmp_path))
    assert code == 0 and any(x.startswith("warning: jax is") for x in said)


def test_weights_that_cannot_be_read_are_named(tmp_path: pathlib.Path) -> None:
    path = failed(tmp_path, weights_source="")
    stem = pathlib.Path(weights(tmp_path, 3))
    tensors, settings = (stem.with_name(stem.name + x) for x in (".safetensors", ".json"))
    whole, about = tensors.read_bytes(), settings.read_text()
    other = json.loads(about)
    other["model"]["d_model"] = 48
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{")
    cases = [
        (lambda: tensors.write_bytes(whole[: len(whole) // 2]), "is damaged"),
        (lambda: tensors.write_bytes(b"weights"), "is damaged"),
        (lambda: tensors.write_bytes(whole), "holds weights"),
        (lambda: settings.write_text(about[:50]), "is not what `export` writes"),
        (lambda: settings.write_text("[]"), "is not what `export` writes"),
        (lambda: settings.write_text('{"x": 1}'), "is not what `export` writes"),
        (lambda: settings.write_text(json.dumps(other)), "has tensors[name].shape="),
        (lambda: tensors.unlink() or tensors.mkdir(), "cannot be read"),
    ]
    for damage, text in cases:
        damage()
        code, said = replayed(path, str(stem))
        assert code == 2 and len(said) == 1 and text in said[0], (text, said)
        settings.write_text(about)
    code, said = replayed(path, str(tmp_path / "hf"))
    assert code == 2 and "config.json" in said[0], said


def _model(made: bundle_files.Bundle, directory: pathlib.Path, **changes) -> pathlib.Path:
    return again(made, directory, model=made.about["model"] | changes)


def test_the_command_line(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.repro", str(tmp_path / "nothing")],
        cwd=pathlib.Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "is no bundle" in done.stdout, done.stderr
