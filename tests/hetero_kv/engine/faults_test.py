"""What goes wrong in a store, a row or a call: cold answers, counters, reasons, no wrong tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import Engine, Request
from hetero_kv.guard import LeakedShape
from hetero_kv.requests import FAILED, FINISHED, REUSE_OFF, Result
from hetero_kv.scheduler import Entry
from tests.hetero_kv.engine import world

COMPONENTS = ("csa entries", "csa index keys", "windows", "tails")
NUMBER = next(x for x in range(99) if len(world.request(x).tokens) > 40 and x % 2)


def warmed(reuse: str = "validated", name: str = "small", **options):
    """An engine whose store holds everything of request NUMBER."""
    store = world.store(name)
    list(world.engine("validated", name, store=store).generate([world.request(NUMBER)]))
    return world.engine(reuse, name, store=store, **options)


def tamper(made, component: str, evidence: bool = False, unseen: bool = True):
    """From now on every restore is followed by damage to the row.

    unseen: what it has brought is not compared, as if the damage was older than the sums.
    """
    inner = made.store.restore

    def restore(lease, cache, row=0):
        cache = inner(lease, cache, row=row)
        if lease.resumable_length:
            hold, made.cache = made.cache, cache
            assert world.damage(made, row, component, evidence)
            cache, made.cache = made.cache, hold
            if unseen:
                lease.brought = None
        return cache

    made.store.restore = restore


@pytest.mark.parametrize("component", COMPONENTS)
def test_an_audit_finds_what_was_tampered_with(component: str) -> None:
    """And reuse is off from then on, and says so."""
    made = warmed(audit_share=1.0)
    tamper(made, component)
    handle = made.submit(world.request(NUMBER))
    events = []
    while made.busy:
        events += made.step()
    assert made.result(handle).resumable_length > 0
    off = [x for x in events if x.kind == REUSE_OFF]
    assert len(off) == 1 and off[0].handle == handle and component in off[0].detail
    found = made.breaker.failed[0]
    assert found.component == component and found.block == found.position // 8
    assert found.position < found.length and found.error > 0
    # A tail matters when the next entry is emitted: not within this prompt.
    assert ("logits" in found.others) == (component != "tails")
    (after,) = made.generate([world.request(NUMBER)])
    world.same_answer(after, NUMBER)
    assert after.resumable_length == 0
    assert [x.code for x in after.reasons] == ["reuse_off"]
    assert made.metrics()["hetero_kv_engine_reuse_on"] == 0
    assert world.count(made, "reuse_off_total") == 1
    world.settled(made)


def test_the_first_difference_is_located() -> None:
    """Entry 0 of the pool is damaged: tokens 0 .. 3, block 0."""
    made = warmed(audit_share=1.0)
    tamper(made, "csa entries")
    list(made.generate([world.request(NUMBER)]))
    found = made.breaker.failed[0]
    assert (found.position, found.block) == (3, 0) and "entries" in found.leaf
    assert str(found).startswith("csa entries (")


def test_the_noise_floor_and_the_number_of_failures() -> None:
    made = warmed(audit_share=1.0, noise_floor=1e9)
    tamper(made, "csa entries")
    list(made.generate([world.request(NUMBER)]))
    assert made.reuser.on and world.count(made, "audits_total", outcome="same") == 1
    made = warmed(audit_share=1.0, audit_failures=2)
    tamper(made, "csa entries")
    list(made.generate([world.request(NUMBER)]))
    assert made.reuser.on
    list(made.generate([world.request(NUMBER)]))
    assert not made.reuser.on


def test_what_was_resumed_but_not_answered_starts_over_when_reuse_goes_off() -> None:
    """Also where its state is saved on the host."""
    made = warmed(audit_share=1.0)
    tamper(made, "csa entries")
    rng = np.random.default_rng(0)
    more = [np.append(world.request(NUMBER).tokens[:40], rng.integers(0, 61, 20)) for _ in "ab"]
    first = made.submit(world.request(NUMBER))
    handles = [made.submit(Request(x, 3)) for x in more]
    made._admit()
    assert all(x.run.reused for x in made.scheduler.active())
    made.preempt(handles[1], save=True)
    made.options = dataclasses.replace(made.options, preempt="never", chunks_per_step=1)
    blocked = [made.submit(Request(world.request(NUMBER).tokens, 20, priority=1)) for _ in "ab"]
    world.drain(made)
    assert made.breaker.open
    for handle, tokens in zip(handles, more, strict=True):
        result = made.result(handle)
        (want,) = world.engine().generate([Request(tokens, 3)])
        if result.reused_length == 0:
            assert result.logits.tobytes() == want.logits.tobytes()
    assert made.result(first) and all(made.result(x) for x in blocked)
    world.settled(made)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_shadow_finds_it_too_and_answers_right(component: str) -> None:
    made = warmed("shadow")
    tamper(made, component)
    handle = made.submit(world.request(NUMBER))
    world.drain(made)
    result = made.result(handle)
    world.same_answer(result, NUMBER)
    assert result.resumable_length > 0 and result.reused_length == 0
    assert made.breaker.open and made.breaker.failed[0].component == component
    world.settled(made)


def test_a_share_is_shadowed() -> None:
    made = warmed("shadow", shadow_share=0.5)
    list(made.generate([world.request(NUMBER)] * 40))
    shadowed = sum(world.count(made, "audits_total", outcome=x) for x in ("same", "skipped"))
    assert 8 < shadowed < 32 and world.count(made, "audits_total", outcome="differs") == 0


def test_a_shadow_is_compared_with_the_run_that_was_served(monkeypatch) -> None:
    """It waits for its turn while the request starts over and goes wrong again on the way."""
    made = warmed("shadow", chunks_per_step=1)
    handle = made.submit(Request(world.request(NUMBER).tokens, 12))

    def steps_until(found) -> Entry:
        for _ in range(50):
            made.step()
            if entries := found():
                return entries[0]
        raise AssertionError("it never came to that")

    with monkeypatch.context() as patch:
        patch.setattr(made.reuser, "audit", lambda: False)
        entry = steps_until(made.scheduler.decoding)
        audit = made.reuser.audits[handle]
        assert audit.served is not None
        assert world.damage(made, entry.slot, "windows", evidence=True)
        steps_until(lambda: [x for x in made.scheduler.prefilling() if x.run.position])
        while entry.run.position < audit.length - 8:
            made.step()
        assert world.damage(made, entry.slot, "windows", evidence=True)
        made.step()
    world.drain(made)
    assert made.result(handle).status == FAILED and world.count(made, "verdicts_total") == 2
    assert world.count(made, "audits_total", outcome="differs") == 0
    assert world.count(made, "audits_total", outcome="same") == 1


def refused_beside_a_mate(made: Engine) -> Result:
    """Serves the request whose row is bad, and another: it runs cold, its mate does not notice."""
    mate = made.submit(world.request(2))
    handle = made.submit(world.request(NUMBER))
    world.drain(made)
    result = made.result(handle)
    world.same_answer(result, NUMBER)
    world.same_answer(made.result(mate), 2)
    assert result.reused_length == 0 and result.discarded > 0
    return result


@pytest.mark.parametrize("component", COMPONENTS)
def test_wrong_evidence_is_refused_within_the_call(component: str) -> None:
    """Nothing is computed on such a row; the request runs cold, its mates do not notice."""
    made = warmed()
    tamper(made, component, evidence=True)
    result = refused_beside_a_mate(made)
    (reason,) = [x for x in result.reasons if x.code == "evidence"]
    assert component in reason.detail and reason.before > 0
    assert world.count(made, "verdicts_total") == 1
    world.settled(made)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_row_that_is_not_as_it_was_brought_is_refused(component: str) -> None:
    """Its evidence is right, its values are not: the first call that reads them says so."""
    made = warmed()
    tamper(made, component, unseen=False)
    result = refused_beside_a_mate(made)
    assert f"{component}: checksum" in [x.detail for x in result.reasons if x.code == "evidence"]
    assert world.count(made, "verdict_bits_total", component=component, reason="checksum") == 1
    world.settled(made)


def test_what_was_brought_and_saved_is_compared_when_it_comes_back() -> None:
    """Preempted between its restore and its first call, and damaged in host memory."""
    for wrong in (False, True):
        made = warmed()
        handle = made.submit(world.request(NUMBER))
        made._admit()
        entry = made._entries[handle]
        assert entry.run.brought is not None and made.preempt(handle, save=True)
        if wrong:
            entry.saved.row = jax.tree.map(
                lambda x: np.nan_to_num(x) + 1 if x.dtype == np.float32 else x, entry.saved.row
            )
        world.drain(made)
        world.same_answer(result := made.result(handle), NUMBER)
        assert (
            (result.reused_length == 0)
            == wrong
            == any("checksum" in x.detail for x in result.reasons)
        )
        world.settled(made)


def test_a_length_that_is_not_the_hosts_is_refused() -> None:
    made = warmed()
    inner = made.store.restore

    def restore(lease, cache, row=0):
        cache = inner(lease, cache, row=row)
        return cache.replace(length=cache.length.at[row].add(-8))

    made.store.restore = restore
    (result,) = made.generate([world.request(NUMBER)])
    world.same_answer(result, NUMBER)
    assert any("length" in x.detail for x in result.reasons)


def test_evidence_that_goes_wrong_while_decoding() -> None:
    """The tokens streamed so far stand: the request runs again, and goes on."""
    made = world.engine()
    request = Request(world.request(NUMBER).tokens, 20)
    (want,) = world.engine().generate([request])
    handle, mate = made.submit(request), made.submit(world.request(2))
    while not made.scheduler.decoding():
        made.step()
    made.step()
    assert world.damage(made, made._entries[handle].slot, "windows", evidence=True)
    world.drain(made)
    result = made.result(handle)
    assert result.tokens.tolist() == want.tokens.tolist()
    assert result.logits.tobytes() == want.logits.tobytes()
    world.same_answer(made.result(mate), 2)
    assert world.count(made, "redecoded_tokens_total") > 0
    world.settled(made)


def test_a_request_that_goes_wrong_again_and_again_fails_alone() -> None:
    made = world.engine()
    handle, mate = made.submit(world.request(NUMBER)), made.submit(world.request(2))
    for _ in range(40):
        entry = made._entries.get(handle)
        if entry is not None and entry.slot is not None and entry.run.position:
            world.damage(made, entry.slot, "windows", evidence=True)
        made.step()
        assert made.problems() == []
    result = made.result(handle)
    assert result.status == FAILED and "windows" in result.why
    world.drain(made)
    world.same_answer(made.result(mate), 2)
    world.settled(made)


def test_numbers_that_are_none_are_never_answered() -> None:
    """Weights that overflow: the request fails, cold or not."""
    made = world.engine("validated", store=world.store())
    params = made.params
    made.params = jax.tree.map(lambda x: x * jnp.nan if x.ndim > 2 else x, params)
    (result,) = made.generate([world.request(NUMBER)])
    assert result.status == FAILED and "finite" in result.why and not len(result.tokens)
    made.params = params
    (after,) = made.generate([world.request(2)])
    world.same_answer(after, 2)
    world.settled(made)


@pytest.mark.parametrize("call", ["lookup", "restore", "publish"])
def test_a_store_that_raises_costs_a_hit(call: str) -> None:
    made = warmed()

    def fails(*args, **options):
        raise OSError("the tier is gone")

    setattr(made.store, call, fails)
    handles = {made.submit(world.request(x)): x for x in (NUMBER, 1, 3)}
    world.drain(made)
    for handle, number in handles.items():
        result = made.result(handle)
        world.same_answer(result, number)
        assert any(x.code == f"{call}_failed" and "gone" in x.detail for x in result.reasons)
        assert call == "publish" or not result.reused_length
    assert world.count(made, "store_failures_total", call=call) >= 3
    world.settled(made)


def test_a_restore_that_takes_the_cache_with_it() -> None:
    """Everybody in a slot starts over, and gets what it would have got."""
    made = warmed()
    inner = made.store.restore

    def restore(lease, cache, row=0):
        inner(lease, cache, row=row)
        raise RuntimeError("out of memory")

    mates = [made.submit(world.request(x)) for x in (2, 3)]
    for _ in range(3):
        made.step()
    made.store.restore = restore
    handle = made.submit(world.request(NUMBER))
    world.drain(made)
    world.same_answer(made.result(handle), NUMBER)
    for mate, number in zip(mates, (2, 3), strict=True):
        world.same_answer(made.result(mate), number)
    assert world.count(made, "caches_lost_total") >= 1
    world.settled(made)


@pytest.mark.parametrize("call", ["prefill", "decode"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_compiled_call_that_raises(call: str, lost: bool) -> None:
    """Once: those it was made for run again. Always: they fail, and the engine lives."""
    made = world.engine()
    inner, fails = getattr(made.rows, call), 1

    def broken(params, cache, *args, **options):
        nonlocal fails
        if fails:
            fails -= 1
            if lost:
                inner(params, cache, *args, **options)
            raise RuntimeError("the device is busy")
        return inner(params, cache, *args, **options)

    try:
        setattr(made.rows, call, broken)
        handles = {made.submit(world.request(x)): x for x in (1, 2, 3)}
        world.drain(made)
        for handle, number in handles.items():
            world.same_answer(made.result(handle), number)
        assert world.count(made, "call_failures_total") == 1
        fails = 10**9
        results = list(made.generate([Request(world.request(x).tokens, 6) for x in (1, 2)]))
        assert {x.status for x in results} == {FAILED}
        assert all("busy" in x.why for x in results)
        fails = 0
        (after,) = made.generate([world.request(1)])
        world.same_answer(after, 1)
    finally:
        delattr(made.rows, call)
    world.settled(made)


def test_a_leaked_shape_is_not_taken_for_a_fault() -> None:
    made = world.engine()

    def leaks(*args, **options):
        raise LeakedShape("a shape")

    try:
        made.rows.prefill = leaks
        made.submit(world.request(1))
        with pytest.raises(LeakedShape):
            made.step()
    finally:
        del made.rows.prefill


def test_a_closed_store_is_no_store() -> None:
    made = warmed()
    made.store.close()
    (result,) = made.generate([world.request(NUMBER)])
    assert result.status == FINISHED and result.reused_length == 0
    assert any("closed" in x.detail for x in result.reasons)


def test_other_weights_are_never_mixed_in() -> None:
    """The epoch changes while a request runs: what it computes is not published (E1)."""
    made = world.engine("validated", store=world.store())
    tokens = world.request(NUMBER).tokens
    handle = made.submit(world.request(NUMBER))
    made.step()
    made.store.advance_epoch(dataclasses.replace(world.identity(), weight_epoch=1))
    world.drain(made)
    world.same_answer(made.result(handle), NUMBER)
    assert not made.store.explain(tokens).plan.candidate_length
    made.store.advance_epoch(world.identity())
    assert made.store.explain(tokens).plan.candidate_length == 8, "published by the first step"


def test_an_unauditable_request_leaves_nothing_behind() -> None:
    """Cancelled between its restore and its first token."""
    made = warmed(audit_share=1.0)
    handle = made.submit(world.request(NUMBER))
    made._admit()
    assert made.reuser.audits
    made.cancel(handle)
    assert not made.reuser.audits
    assert world.count(made, "audits_total", outcome="dropped") == 1
    world.drain(made)
    world.settled(made)


def test_the_classical_rule_is_wrong_and_an_audit_says_so() -> None:
    store = world.hash_only_store()
    options = dict(audit_share=1.0, audit_failures=100, max_audits=100, debug_poison=False)
    made = world.engine("hash_only", store=store, **options)
    list(made.generate([world.request(NUMBER)]))
    list(made.generate([world.request(x) for x in (1, 2, 3)]))  # what the slots hold then
    (result,) = made.generate([world.request(NUMBER)])
    assert result.resumable_length > 0
    want = world.alone(NUMBER)
    assert result.status == FINISHED and result.logits.tobytes() != want.logits.tobytes()
    assert made.breaker.failed[-1].handle == result.handle
