"""Every family through the engine and under faults: nothing there knows of a family."""

import pytest

from hetero_kv import bundle_files, snapshot
from hetero_kv.faults import kinds
from hetero_kv.faults.kinds import Case
from hetero_kv.faults.trial import SILENT
from tests import variants
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.faults_test import NUMBER, tamper, warmed
from tests.hetero_kv.faults.matrix_test import bench, run, with_all_on
from tests.models import families

# One of each kind. The forward pass of every family is compared in tests/models/families_test.py.
KINDS = ("gpt_oss", "qwen3_next")
AUDITED = ("qwen3_next",)  # audits compile the prefill once more


@pytest.mark.parametrize("name", variants.some(families.every(), KINDS))
def test_warm_equals_cold_through_the_engine(name: str) -> None:
    store = world.store(name)
    audited = name in AUDITED or name not in KINDS
    made = world.engine("validated", name, store=store, audit_share=1.0 if audited else 0.0)
    for _ in range(2):
        handles = {made.submit(world.request(x)): x for x in range(6)}
        world.drain(made)
        for handle, number in handles.items():
            world.same_answer(made.result(handle), number, name)
    assert world.count(made, "prompt_tokens_total", how="reused") > 0
    assert (world.count(made, "audits_total", outcome="same") > 0) == audited
    assert world.count(made, "audits_total", outcome="differs") == 0
    world.settled(made)


def one_each(cases: list[Case]) -> list[Case]:
    """Per component a fault of stored bytes, and one of a row."""
    found: dict[tuple, Case] = {}
    for case in cases:
        if case.guard in (kinds.CHECKSUM, kinds.EVIDENCE):
            found.setdefault((case.component, case.guard, case.moment == kinds.ROW), case)
    return list(found.values())


@pytest.mark.full
@pytest.mark.parametrize("name", ("packed", *families.every()))
def test_a_fault_of_every_component_is_caught(name: str, tmp_path) -> None:
    made = bench(name)
    some = one_each(made.cases())
    assert {case.component for case in some} == set(kinds.live_components(made.spec, made.length))
    with_all_on(made, some, tmp_path / "on")
    wrong = [x for x in run(made, some, kinds.CHECKS, tmp_path / "off") if x.status == SILENT]
    assert {x.case.component for x in wrong} == {case.component for case in some}


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4", *families.every()])
def test_an_audit_finds_damage_of_every_component_and_leaves_a_bundle(name: str, tmp_path) -> None:
    spec = world.model(name)[0].cache_spec
    length = spec.largest_boundary(len(world.request(NUMBER).tokens))
    for i, component in enumerate(kinds.live_components(spec, length)):
        directory = tmp_path / str(i)
        made = warmed("validated", name, audit_share=1.0, bundle_dir=str(directory))
        tamper(made, component)
        handle = made.submit(world.request(NUMBER))
        world.drain(made)
        assert made.result(handle).resumable_length == length
        (found,) = made.breaker.failed
        assert (found.component, found.length) == (component, length)
        (path,) = directory.iterdir()
        bundle = bundle_files.load(path)
        assert bundle.about["finding"]["component"] == component
        assert bundle.leaves().keys() == {x.path for x in snapshot.kept(spec)}
        (after,) = made.generate([world.request(NUMBER)])
        world.same_answer(after, NUMBER, name)
        assert after.resumable_length == 0
        world.settled(made)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4", *families.every()])
def test_wrong_evidence_is_refused_within_the_call(name: str) -> None:
    spec = world.model(name)[0].cache_spec
    told = {slot.leaf.component for slot in spec.slots() if slot.leaf.dtype == "int32"}
    for component in sorted(told):
        made = warmed("validated", name)
        tamper(made, component, evidence=True)
        mate, handle = made.submit(world.request(2)), made.submit(world.request(NUMBER))
        world.drain(made)
        result = made.result(handle)
        world.same_answer(result, NUMBER, name)
        world.same_answer(made.result(mate), 2, name)
        assert result.reused_length == 0 and result.discarded > 0
        (reason,) = [x for x in result.reasons if x.code == "evidence"]
        assert component in reason.detail and reason.before > 0
        world.settled(made)
