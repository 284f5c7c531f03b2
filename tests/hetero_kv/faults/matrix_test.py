"""The fault matrix on small models: all checks on, none, one off, one alone."""

import collections
import functools
from collections.abc import Collection

import numpy as np
import pytest

from hetero_kv.faults import checks, kinds
from hetero_kv.faults.paged import PagedBench
from hetero_kv.faults.trial import REFUSED, SILENT, Bench
from hetero_kv.prefix.payload import ArrayPayload
from tests.hetero_kv.engine import world
from tests.models import families, tiny

# What finds the same one step later: a checkpoint that is not there, or is blank.
BEHIND = {
    kinds.JOINT: (kinds.EVIDENCE,),
    kinds.LAYOUT: (kinds.EVIDENCE, kinds.RESTORED),
    kinds.POSITIONS: (kinds.EVIDENCE,),
    kinds.DELIVERED: (kinds.POSITIONS, kinds.EVIDENCE),
    kinds.EVIDENCE: (kinds.RESTORED, kinds.SLOT_BYTES),
    kinds.FORM: (kinds.RECYCLED, kinds.OWNER),
    kinds.RECYCLED: (kinds.OWNER,),
    kinds.VALID: (kinds.PAGE_BYTES,),
}


@functools.cache
def bench(name: str = "small", make: type[Bench] = Bench) -> Bench:
    model, params = world.model(name)
    rng = np.random.default_rng(0)
    length = 2 * model.cache_spec.granularity
    prompt, donor = (rng.integers(0, world.VOCAB, length + 4) for _ in range(2))
    other = tiny.random_params(model, seed=5)
    return make(model, params, other, prompt, donor, length, config=model.config)


def run(made: Bench, some, off, directory) -> list:
    """off: names, or a function of the case."""
    found = []
    for i, case in enumerate(some):
        names = off(case) if callable(off) else off
        found.append(made.run(case, names, directory / str(i)))
    return found


def with_all_on(made: Bench, some, directory) -> None:
    for x in run(made, some, (), directory):
        assert x.status == REFUSED and x.token == x.logit == -1 and not x.live, x
        assert x.right_reason, x


def with_all_off(made: Bench, some, directory) -> None:
    found = run(made, some, kinds.CHECKS, directory)
    assert all(x.within == made.outputs for x in found)
    assert sum(x.bites for x in found) >= 0.9 * len(found)
    assert sum(x.logit >= 0 for x in found) >= 0.9 * len(found)
    assert all(x.status == SILENT for x in found if x.logit >= 0)


def with_guards_alone(made: Bench, some, directory) -> None:
    for x in run(made, some, lambda case: kinds.all_but(case.guard), directory):
        assert x.status == REFUSED and x.right_reason, x


def with_guards_off(made: Bench, some, directory) -> None:
    """Without the check on guard, and what stands behind it, the fault passes.

    Of each check that some fault needs: a model of History alone has nothing to resume jointly.
    """

    def off(case) -> tuple[str, ...]:
        return (case.guard, *BEHIND.get(case.guard, ()))

    silent = collections.Counter(
        x.case.guard for x in run(made, some, off, directory) if x.status == SILENT
    )
    assert set(silent) == {case.guard for case in some}, silent


def sampled(made: Bench, moments: Collection[str]) -> list[kinds.Case]:
    """Every kind at these moments; all lines and components are in the full product."""
    some = [x for x in kinds.covering(made.cases()) if x.moment in moments]
    return list({(x.kind, x.moment): x for x in some}.values())


def test_a_covering_sample(tmp_path) -> None:
    made = bench()
    assert made.outputs == 2 * 4 + 1
    assert {x.guard for x in kinds.covering(made.cases())} == set(kinds.CHECKS)
    sample = sampled(made, set(kinds.MOMENTS) - {kinds.DEVICE})  # which pages have
    with_all_on(made, sample, tmp_path / "on")
    with_all_off(made, sample[::2], tmp_path / "off")  # all of them in the full product


@pytest.mark.full
def test_every_check_is_needed(tmp_path) -> None:
    made = bench()
    with_guards_off(made, kinds.covering(made.cases()), tmp_path)


def test_a_covering_sample_in_pages(tmp_path) -> None:
    made = bench("small", PagedBench)
    sample = sampled(made, (kinds.DEVICE, kinds.ROW, kinds.HOST))
    assert len({x.kind for x in sample}) >= 14
    with_all_on(made, sample, tmp_path / "on")
    with_all_off(made, sample[::2], tmp_path / "off")
    with pytest.raises(ValueError, match="all checks are on, or all are off"):
        made.run(sample[0], (kinds.AUDIT,), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["small", "v4", *families.every()])
def test_all_faults_in_pages(name: str, tmp_path) -> None:
    made = bench(name, PagedBench)
    with_all_on(made, made.cases((kinds.ALL, kinds.LAST)), tmp_path / "on")
    with_all_off(made, made.cases(), tmp_path / "off")


@pytest.mark.full
@pytest.mark.parametrize("name", ["small", "v4", *families.every()])
def test_all_faults(name: str, tmp_path) -> None:
    made = bench(name)
    every = made.cases((kinds.ALL, kinds.LAST))
    with_all_on(made, every, tmp_path / "on")
    with_all_off(made, made.cases(), tmp_path / "off")
    with_guards_alone(made, every, tmp_path / "alone")
    with_guards_off(made, made.cases(), tmp_path / "without")


def test_nothing_stays_switched_off() -> None:
    owners = list(checks._exchanges(frozenset(kinds.CHECKS), {}, world.identity()))
    before = [owner.__dict__[name] for owner, name, _ in owners]
    # AUDIT is a mode of the engine, and a residence masks what is checked on the device.
    named = set(kinds.CHECKS) - set(kinds.ON_DEVICE) - {kinds.AUDIT} | {kinds.EVIDENCE}
    assert len(owners) >= len(named)
    with (
        pytest.raises(RuntimeError, match="inside"),
        checks.switched_off(kinds.CHECKS, world.identity()),
    ):
        assert all(
            owner.__dict__[name] is not x
            for x, (owner, name, _) in zip(before, owners, strict=True)
        )
        raise RuntimeError("inside")
    assert [owner.__dict__[name] for owner, name, _ in owners] == before
    assert "damaged" in ArrayPayload.__dict__


def test_an_unknown_check_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="no such checks"),
        checks.switched_off(["luck"], world.identity()),
    ):
        pass


def test_a_bench_needs_a_boundary() -> None:
    model, params = world.model()
    prompt = np.zeros(20, np.int32)
    with pytest.raises(ValueError, match="length=15"):
        Bench(model, params, params, prompt, prompt, 15, config=model.config)
