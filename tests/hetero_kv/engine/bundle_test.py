"""Bundles: a failed audit leaves all that it takes to replay it, and never disturbs serving."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from hetero_kv import bundle_files, snapshot
from hetero_kv.bundle import FAILED, SKIPPED, WRITTEN, Bundles, Exhibit
from hetero_kv.bundle_files import DamagedBundleError
from hetero_kv.options import Options
from hetero_kv.requests import Handle
from hetero_kv.scheduler import Entry, Run
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.faults_test import NUMBER, tamper, warmed


def serve(directory: pathlib.Path, component: str = "csa entries", reuse="validated", **options):
    """(engine, result) of request NUMBER, whose restored row gets damaged ("": not)."""
    options = dict(audit_share=1.0, bundle_dir=str(directory)) | options
    made = warmed(reuse, **options)
    if component:
        tamper(made, component)
    handle = made.submit(world.request(NUMBER))
    world.drain(made)
    return made, made.result(handle)


def only(directory: pathlib.Path) -> bundle_files.Bundle:
    """The one bundle there, and nothing else."""
    (path,) = directory.iterdir()
    assert sorted(x.name for x in path.iterdir()) == ["bundle.json", "state.safetensors"]
    return bundle_files.load(path)


@pytest.mark.parametrize(
    "reuse, paged", [("validated", False), ("shadow", False), ("validated", True)]
)
def test_a_failed_audit_leaves_a_bundle(reuse: str, paged: bool, tmp_path: pathlib.Path) -> None:
    made, result = serve(tmp_path / "new", reuse=reuse, paged=paged, weights_source="somewhere")
    about, found = only(tmp_path / "new").about, made.breaker.failed[0]
    request = world.request(NUMBER)
    assert about["request"]["tokens"] == request.tokens.tolist()
    assert about["request"]["answer"] == result.tokens.tolist()[: len(about["request"]["answer"])]
    assert about["request"]["sampling"]["seed"] == NUMBER
    assert about["lease"]["resumable_length"] == result.resumable_length == found.length
    assert about["lease"]["routes"] == dict(result.routes)
    assert about["identity"]["weights"] == about["weights"]["digest"] == world.identity().weights
    assert about["weights"]["source"] == "somewhere"
    assert about["identity_digest"] == world.identity().digest.hex()
    assert about["model"]["config"] == json.loads(
        json.dumps(dataclasses.asdict(world.model()[0].config))
    )
    assert about["versions"]["jax"] and about["engine"]["reuse"] == reuse
    have = about["finding"]
    assert (have["component"], have["position"], have["block"]) == ("csa entries", 3, 0)
    (first,) = (x for x in have["leaves"] if x["component"] == "csa entries")
    assert first["position"] == 3 and first["error"] == pytest.approx(found.error)
    assert world.count(made, "bundles_total", outcome=WRITTEN) == 1
    world.settled(made)


def test_the_state_is_the_one_that_was_used(tmp_path: pathlib.Path) -> None:
    made, result = serve(tmp_path)
    leaves, spec = only(tmp_path).leaves(), world.model()[0].cache_spec
    length = result.resumable_length
    cold = world.engine().rows.new(1)
    rows, at, prompt = made.rows, 0, world.request(NUMBER).tokens
    while at < length:
        _, cold, _ = rows.prefill(made.params, cold, 0, prompt, at, length)
        at += rows.piece(at, length)[0]
    held = snapshot.put_leaves(spec, rows.new(1), leaves, length, length)
    wrong = {
        slot.leaf.component: int(one.row)
        for slot, one in zip(rows.compared, rows.differ(held, cold), strict=True)
        if int(one.row) >= 0
    }
    assert wrong == {"csa entries": 0}
    assert leaves.keys() == {x.path for x in snapshot.kept(spec)}
    for name, value in snapshot.take_leaves(spec, held, length).items():
        assert value.tobytes() == leaves[name].tobytes()


def test_right_state_leaves_none_unless_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    made, _ = serve(tmp_path, component="")
    assert not list(tmp_path.iterdir()) and not made.breaker.failed
    made.reuser._share = 0.0
    asked = dataclasses.replace(world.request(NUMBER), bundle=True)
    fresh = dataclasses.replace(world.request(2), bundle=True)
    for request in (world.request(NUMBER), asked, fresh):
        list(made.generate([request]))
    world.drain(made)
    bundles = sorted((bundle_files.load(x).about for x in tmp_path.iterdir()), key=_number)
    assert [x["request"]["number"] for x in bundles] == [2, 3]
    assert bundles[0]["finding"]["ok"] and bundles[0]["state"]["length"] > 0
    assert bundles[1]["finding"] is None or bundles[1]["finding"]["ok"]
    world.settled(made)


def _number(about: dict) -> int:
    return about["request"]["number"]


def test_a_state_beyond_the_cap_is_left_out_with_a_note(tmp_path: pathlib.Path) -> None:
    _, _ = serve(tmp_path / "all")
    whole = only(tmp_path / "all").leaves()
    size = sum(x.nbytes for x in whole.values())
    serve(tmp_path / "some", bundle_bytes=size - 1)
    some = only(tmp_path / "some")
    assert set(some.leaves()) == {x["path"] for x in some.about["finding"]["leaves"]} < set(whole)
    assert "only leaves that differ" in some.about["notes"][0]
    serve(tmp_path / "none", bundle_bytes=0)
    none = only(tmp_path / "none")
    assert not none.leaves() and "left out" in none.about["notes"][0]


def test_no_more_than_so_many(tmp_path: pathlib.Path) -> None:
    made, _ = serve(tmp_path, max_bundles=1, audit_failures=9)
    list(made.generate([world.request(NUMBER)]))
    world.drain(made)
    assert len(list(tmp_path.iterdir())) == 1
    assert world.count(made, "bundles_total", outcome=SKIPPED) == 1
    assert "holds 1 bundles" in made.reuser.bundles.last.reason


def test_what_goes_wrong_never_reaches_a_request(tmp_path: pathlib.Path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    made, result = serve(blocked / "under", component="tails")
    assert result.status == "finished" and made.breaker.open
    assert world.count(made, "bundles_total", outcome=FAILED) == 1
    assert "file" in made.reuser.bundles.last.reason
    error = made.reuser.bundles.last.reason.partition(":")[0]
    assert world.count(made, "bundle_failures_total", error=error) == 1
    fresh = world.engine("validated", store=world.store(), bundle_dir=str(blocked / "under"))
    (result,) = fresh.generate([dataclasses.replace(world.request(2), bundle=True)])
    world.same_answer(result, 2)
    (told,) = [x for x in result.reasons if x.code == "bundle_failed"]
    assert told.detail.startswith(error) and str(blocked) in told.detail
    world.settled(made)

    def fails(*args, **options):
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr("hetero_kv.bundle.take_leaves", fails)
    made, result = serve(tmp_path / "more")
    assert result.status == "finished" and made.breaker.open
    assert "no memory" in made.reuser.bundles.last.reason
    assert not (tmp_path / "more").exists()
    world.settled(made)


def test_a_crash_while_writing_leaves_no_bundle(tmp_path: pathlib.Path, monkeypatch) -> None:
    """The process dies between the files: what is there is no bundle, and is not in the way."""
    made, _ = serve(tmp_path)
    request = world.request(NUMBER)
    exhibit = Exhibit(Entry(Handle(77), request, request.tokens, 0.0), Run(), 0, {})
    real = bundle_files._put

    def dies(path: pathlib.Path, data: bytes) -> None:
        if path.name == bundle_files.ABOUT:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(bundle_files, "_put", dies)
    monkeypatch.setattr(bundle_files.shutil, "rmtree", lambda *args, **options: None)
    writer = Bundles(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        writer.write(made.rows, made.store, exhibit, None)
    monkeypatch.undo()
    torn = [x for x in tmp_path.iterdir() if x.name.startswith(".writing-")]
    assert len(torn) == 1
    with pytest.raises(DamagedBundleError, match="no bundle"):
        bundle_files.load(torn[0])
    assert writer.write(made.rows, made.store, exhibit, None).outcome == WRITTEN


@pytest.mark.parametrize("file", ["bundle.json", "state.safetensors"])
def test_any_changed_byte_is_noticed(file: str, tmp_path: pathlib.Path) -> None:
    serve(tmp_path, component="windows")
    (path,) = tmp_path.iterdir()
    data = (path / file).read_bytes()
    rng = np.random.default_rng(0)
    for at in (0, len(data) - 2, *rng.integers(0, len(data), 40)):
        wrong = bytearray(data)
        wrong[at] ^= 1 << int(rng.integers(8))
        (path / file).write_bytes(wrong)
        if file == "bundle.json" and _means_the_same(data, bytes(wrong)):
            continue
        with pytest.raises(DamagedBundleError):
            bundle_files.load(path)
    for size in (0, 7, len(data) // 2, len(data) - 1):
        (path / file).write_bytes(data[:size])
        if file == "bundle.json" and _means_the_same(data, data[:size]):
            continue
        with pytest.raises(DamagedBundleError):
            bundle_files.load(path)
    (path / file).unlink()
    with pytest.raises(DamagedBundleError, match="no bundle"):
        bundle_files.load(path)


def _means_the_same(one: bytes, two: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(two)
    except ValueError:
        return False


def test_other_versions_are_refused(tmp_path: pathlib.Path) -> None:
    serve(tmp_path, component="windows")
    (path,) = tmp_path.iterdir()
    about = json.loads((path / "bundle.json").read_text())
    for changes, said in (({"version": 99}, "version 99"), ({"format": "x"}, "not of a")):
        (path / "bundle.json").write_text(json.dumps(about | changes))
        with pytest.raises(DamagedBundleError, match=said):
            bundle_files.load(path)


def test_options_that_make_no_sense() -> None:
    assert Bundles.of(Options()) is None
    for wrong in ({"max_bundles": 0}, {"bundle_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options(**wrong)
