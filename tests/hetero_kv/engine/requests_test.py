"""Admission, refusal, cancellation: one request's trouble is its own."""

import pickle

import jax
import numpy as np
import pytest

from hetero_kv import Engine, Options, Request, Sampling
from hetero_kv.requests import ADMITTED, CANCELLED, FINISHED, REFUSED, TOKEN
from tests.hetero_kv.engine import world

TOKENS = np.arange(10, dtype=np.int32)

REFUSALS = {
    "empty": (Request(np.zeros(0, np.int32)), "n >= 1"),
    "two axes": (Request(np.zeros((2, 3), np.int32)), "n >= 1"),
    "floats": (Request(np.zeros(3)), "i32"),
    "negative": (Request(np.array([1, -1])), "must be in 0..60, got -1..1"),
    "beyond the vocabulary": (Request(np.array([61])), "must be in 0..60"),
    "too large for an i32": (Request(np.array([2**40])), "must be in 0..60"),
    "nothing to make": (Request(TOKENS, 0), "max_new_tokens"),
    "too long": (Request(TOKENS, 55), "10 + 55 = 65 tokens, but a slot holds 64"),
    "too many stops": (Request(TOKENS, 5, (1, 2, 3, 4, 5)), "at most 4"),
    "a stop outside": (Request(TOKENS, 5, (-1,)), "stop ids"),
    "temperature": (Request(TOKENS, 5, sampling=Sampling(float("nan"))), "temperature"),
    "top_p": (Request(TOKENS, 5, sampling=Sampling(1.0, top_p=0.0)), "top_p"),
    "seed": (Request(TOKENS, 5, sampling=Sampling(seed=-1)), "seed"),
    "not tokens": (Request("text"), "i32"),
    "ragged": (Request([[1], [1, 2]]), "malformed"),
    "a huge top_k": (Request(TOKENS, 5, sampling=Sampling(1.0, top_k=2**40)), "top_k"),
    "a broken top_k": (Request(TOKENS, 5, sampling=Sampling(1.0, top_k=1.5)), "top_k"),
    "a huge temperature": (Request(TOKENS, 5, sampling=Sampling(10**400)), "temperature"),
    "a broken seed": (Request(TOKENS, 5, sampling=Sampling(seed=1.5)), "seed"),
    "no sampling": (Request(TOKENS, 5, sampling=None), "Sampling"),
    "a priority in letters": (Request(TOKENS, 5, priority="a"), "priority"),
    "no priority": (Request(TOKENS, 5, priority=float("nan")), "priority"),
    "stops in a set": (Request(TOKENS, 5, stop={3}), "stop"),
    "a broken stop": (Request(TOKENS, 5, stop=(2.5,)), "stop"),
    "not a number of tokens": (Request(TOKENS, float("nan")), "max_new_tokens"),
    "half a token": (Request(TOKENS, 2.5), "max_new_tokens"),
    "never arrives": (Request(TOKENS, 5, arrival=float("inf")), "arrival"),
    "arrives at no time": (Request(TOKENS, 5, arrival=float("nan")), "arrival"),
    "arrives in words": (Request(TOKENS, 5, arrival="now"), "arrival"),
    "a numbered tenant": (Request(TOKENS, 5, tenant=5), "tenant"),
    "nothing at all": (None, "Request"),
    "a dict": ({"tokens": TOKENS}, "Request"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_is_refused_and_harms_nobody(name: str) -> None:
    request, why = REFUSALS[name]
    made = world.engine()
    good = made.submit(world.request(1))
    bad = made.submit(request)
    events = made.step()
    assert [x.detail for x in events if x.kind == REFUSED] == [made._results[bad].why]
    result = made.result(bad)
    assert result.status == REFUSED and why in result.why, result.why
    world.drain(made)
    world.same_answer(made.result(good), 1)
    world.settled(made)


def test_the_longest_request_fits() -> None:
    (result,) = world.engine().generate([Request(world.request(1).tokens[:10], 54)])
    assert result.status == FINISHED and len(result.tokens) == 54


def test_a_full_queue_refuses() -> None:
    made = world.engine(max_waiting=2)
    handles = [made.submit(world.request(x)) for x in range(4)]
    assert "2 requests are waiting" in made.result(handles[3]).why
    world.drain(made)
    for number in range(2):
        world.same_answer(made.result(handles[number]), number)


def test_generate_submits_as_the_queue_has_room() -> None:
    made = world.engine(max_waiting=2)
    results = list(made.generate(world.request(x) for x in range(9)))
    assert len(results) == 9 and {x.status for x in results} == {FINISHED}
    assert list(made.generate([])) == []


def test_results_are_given_out_once() -> None:
    made = world.engine()
    handle = made.submit(world.request(1))
    assert made.result(handle) is None
    world.drain(made)
    assert made.result(handle) is not None and made.result(handle) is None


@pytest.mark.parametrize("reuse", ["off", "validated"])
def test_cancel_at_every_moment(reuse: str) -> None:
    store = None if reuse == "off" else world.store()
    made = world.engine(reuse, store=store, audit_share=1.0)
    for moment in range(14):
        handle, mate = made.submit(world.request(1)), made.submit(world.request(3))
        for _ in range(moment):
            made.step()
        ended = made._results.get(handle) is not None
        assert made.cancel(handle) is not ended
        assert not made.cancel(handle)
        world.drain(made)
        result = made.result(handle)
        assert result.status == (FINISHED if ended else CANCELLED)
        want = world.alone(1).tokens[: len(result.tokens)]
        assert result.tokens.tolist() == want.tolist()
        world.same_answer(made.result(mate), 3)
        world.settled(made)


def test_a_waiting_or_saved_request_can_be_cancelled() -> None:
    made = world.engine(slots=1)
    first, second = made.submit(world.request(1)), made.submit(world.request(3))
    made.step()
    assert made.preempt(first) and not made.preempt(second)
    assert made.metrics()["hetero_kv_engine_saved_state_bytes"] > 0
    assert made.cancel(first) and made.cancel(second)
    assert made.metrics()["hetero_kv_engine_saved_state_bytes"] == 0
    world.drain(made)
    world.settled(made)


def test_cancel_storm_beside_a_bystander() -> None:
    """A shared prefix, many requests cancelled during and after their restores (F15)."""
    store = world.store()
    made = world.engine("validated", store=store)
    list(made.generate([world.request(7)]))
    for i in range(60):
        storm = [made.submit(world.request(x)) for x in (1, 3)]
        bystander = made.submit(world.request(5))
        for _ in range(i % 5):
            made.step()
        for handle in storm:
            made.cancel(handle)
        world.drain(made)
        world.same_answer(made.result(bystander), 5)
    world.settled(made)


def test_requests_arrive_when_they_say() -> None:
    time = 0.0
    made = world.engine(clock=lambda: time)
    late = made.submit(Request(TOKENS, 2, arrival=5.0))
    now = made.submit(Request(TOKENS, 2))
    seen = []
    for _ in range(10):
        time += 1
        seen += [(time, x.handle) for x in made.step() if x.kind == ADMITTED]
    assert seen == [(1.0, now), (5.0, late)]
    assert made.result(late).first_token_s == 1.0  # it ran in the step after


def test_generate_sleeps_until_somebody_arrives() -> None:
    time, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal time
        slept.append(seconds)
        time += seconds

    made = world.engine(clock=lambda: time, sleep=sleep)
    (result,) = made.generate([Request(TOKENS, 2, arrival=0.2)])
    assert result.status == FINISHED and 1 <= len(slept) < 50 and time >= 0.2


def test_a_tenant_cannot_take_all_slots() -> None:
    made = world.engine(tenant_slots=1)
    for _ in range(3):
        made.submit(Request(TOKENS, 8, tenant="a"))
    other = made.submit(Request(TOKENS, 8, tenant="b"))
    made.step()
    assert [x.request.tenant for x in made.scheduler.active()] == ["a", "b"]
    assert made.scheduler.active()[1].handle == other
    made.submit(Request(TOKENS, 8, tenant="a", priority=1))  # takes its own tenant's slot
    made.step()
    assert sorted(x.request.tenant for x in made.scheduler.active()) == ["a", "b"]
    assert max(x.request.priority for x in made.scheduler.active()) == 1
    world.drain(made)


def test_a_tenant_at_its_cap_holds_no_other_up() -> None:
    made = world.engine(tenant_slots=1, preempt="never")
    for tenant in "aab":
        made.submit(Request(TOKENS, 8, tenant=tenant))
    made.step()
    assert [x.request.tenant for x in made.scheduler.active()] == ["a", "b"]
    world.drain(made)


def test_stop_tokens_end_an_answer_anywhere_in_a_burst() -> None:
    tokens = world.request(1).tokens
    (free,) = world.engine().generate([Request(tokens, 12, sampling=Sampling(1.0, seed=4))])
    for i, stop in enumerate(free.tokens.tolist()):
        first = free.tokens.tolist().index(stop)
        request = Request(tokens, 12, (60, stop), Sampling(1.0, seed=4))
        made = world.engine()
        handle = made.submit(request)
        world.drain(made)
        got = made.result(handle).tokens.tolist()
        assert got == free.tokens.tolist()[: first + 1] or 60 in got, i


def test_prompt_logits_are_those_of_the_model() -> None:
    model, params = world.model()
    made = Engine(
        model,
        params,
        slots=2,
        capacity=64,
        reuse="off",
        options=Options(keep_prompt_logits=True, strict=True),
    )
    tokens = world.request(1).tokens
    want, _ = model.prefill(params, tokens[None], model.init_cache(1, 64))
    (result,) = made.generate([Request(tokens, 3)])
    assert result.prompt_logits.tobytes() == np.asarray(want)[0].tobytes()
    assert result.logits is None


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(reuse="sometimes"), "reuse must be"),
        (dict(reuse="validated"), "a store is for reuse"),
        (dict(slots=0), "slots is an integer >= 1, got 0"),
        (dict(slots=2.5), "slots is an integer >= 1, got 2.5"),
        (dict(capacity=63.5), "capacity is an integer >= 1, got 63.5"),
        (dict(options=dict(burst=2.5)), "burst is an integer, got 2.5"),
        (dict(options=dict(paging={})), "paging is a Paging or None"),
        (dict(options=dict(bundle_dir=__file__)), "is a file"),
        (dict(options=dict(preempt="perhaps")), "preempt must be"),
        (dict(options=dict(chunks_per_step=0)), "chunks_per_step"),
        (dict(options=dict(audit_share=1.5)), "0..1"),
        (dict(options=dict(audit_failures=0)), "audit_failures must be >= 1"),
        (dict(options=dict(saved_bytes=-1)), "saved_bytes"),
        (dict(options=dict(max_audits=0)), "max_audits"),
        (dict(options=dict(max_waiting=0)), "max_waiting"),
    ],
)
def test_engines_that_make_no_sense(options: dict, why: str) -> None:
    model, params = world.model()
    with pytest.raises(ValueError, match=why):
        given = {"reuse": "off", "capacity": 64} | options
        given["options"] = Options(**options.get("options", {}))
        Engine(model, params, **given)


def test_weights_of_another_model_are_refused() -> None:
    model, params = world.model()
    other, others = world.model("v4")
    for wrong in (others, {**params, "norm": np.ones(3, np.float32)}):
        with pytest.raises(ValueError, match="the weights are not of this model: at "):
            Engine(model, wrong, reuse="off", capacity=64)
        with pytest.raises(ValueError, match="the weights are not of this model: at "):
            model.forward(wrong, np.zeros((1, 4), np.int32))
        with pytest.raises(ValueError, match="the weights are not of this model: at "):
            model.prefill(wrong, np.zeros((1, 4), np.int32), model.init_cache(1, 64))
    Engine(other, other.prepare(others), reuse="off", capacity=64)


def test_stores_must_fit_the_mode_and_the_batch() -> None:
    import dataclasses

    from hetero_kv import PrefixStore

    with pytest.raises(ValueError, match="does not go with"):
        world.engine("hash_only", store=world.store())
    with pytest.raises(ValueError, match="does not go with"):
        world.engine("validated", store=world.hash_only_store())
    with pytest.raises(ValueError, match="another cache spec"):
        world.engine("validated", store=world.store("v4"))
    other = dataclasses.replace(world.identity(), batch=4)
    spec = world.model()[0].cache_spec
    with pytest.raises(ValueError, match="batch=1"):
        world.engine("validated", store=PrefixStore(spec, other, host_bytes=1 << 20))


def test_the_first_token_and_metrics() -> None:
    from hetero_kv import engine_metrics

    made = world.engine("validated", store=world.store())
    results = list(made.generate([world.request(x) for x in range(6)]))
    assert all(0 < x.first_token_s <= x.total_s for x in results)
    found = made.metrics()
    assert found["hetero_kv_engine_first_token_seconds_count"] == 6
    assert found['hetero_kv_engine_ended_total{status="finished"}'] == 6
    text = engine_metrics.to_text(found)
    assert "untyped" not in text and "# HELP hetero_kv_engine_steps_total" in text
    assert any(x.kind == TOKEN for x in _events(made))


def _events(made: Engine) -> list:
    made.submit(Request(TOKENS, 1))
    found = []
    while made.busy:
        found += made.step()
    return found


def test_a_store_of_other_weights_is_refused() -> None:
    made, params = world.model()
    other = jax.tree.map(lambda x: x + 1 if x.dtype == np.float32 else x, params)
    with pytest.raises(ValueError, match="other weights"):
        Engine(made, other, store=world.store(), slots=1, capacity=64)


def _bounded(made: Engine, most: int = 500) -> None:
    """From now on steps beyond `most` raise: what would never end fails."""
    step, left = made.step, iter(range(most))

    def counted() -> list:
        assert next(left, None) is not None, "the engine never ends"
        return step()

    made.step = counted


@pytest.mark.parametrize("later", [False, True])
def test_generators_that_take_turns_get_their_own_results(later: bool) -> None:
    made = world.engine()
    _bounded(made)
    one = made.generate(world.request(x) for x in (0, 1, 2))
    two = made.generate(world.request(x) for x in (3, 4, 5))
    first, second = [next(one)], [next(two)]
    if later:
        first, second = second, first
        one, two = two, one
    first += list(one)
    second += list(two)
    if later:
        first, second = second, first
    for results, numbers in ((first, (0, 1, 2)), (second, (3, 4, 5))):
        ordered = sorted(results, key=lambda x: x.handle.number)
        for result, number in zip(ordered, numbers, strict=True):
            world.same_answer(result, number)
    assert not made.busy and not made._claimed and not made._results
    world.settled(made)


def test_others_may_step_and_cancel_within_a_generator() -> None:
    made = world.engine()
    _bounded(made)
    results = made.generate([world.request(x) for x in range(5)] + [Request(TOKENS, 0)])
    found, seen = [next(results)], []
    while made.busy:  # all that is left happens in steps of somebody else
        seen += made.step()
        if made.scheduler.waiting:
            made.cancel(made.scheduler.waiting[0].handle)
    assert any(x.kind == TOKEN for x in seen)
    found += list(results)
    assert sorted(x.handle.number for x in found) == list(range(6)) and not made.busy
    assert {x.status for x in found} == {FINISHED, CANCELLED, REFUSED}
    world.settled(made)


def test_events_of_others_outlast_a_generator() -> None:
    made = world.engine()
    _bounded(made)
    handle = made.submit(world.request(1))
    assert len(list(made.generate([world.request(3)]))) == 1
    events = made.step()
    assert {x.handle for x in events} == {handle} and events[-1].kind == FINISHED
    assert [x.token for x in events if x.kind == TOKEN] == world.alone(1).tokens.tolist()
    assert made.step() == [] and not made.busy
    world.same_answer(made.result(handle), 1)


def test_a_result_that_was_asked_for_is_not_yielded_again() -> None:
    made = world.engine()
    _bounded(made)
    results = made.generate(world.request(x) for x in range(4))
    next(results)
    ended = [
        x.handle for _ in iter(lambda: made.busy, False) for x in made.step() if x.kind == FINISHED
    ]
    taken = made.result(ended[-1])
    assert taken.handle not in {x.handle for x in results}


def test_what_a_generator_was_refused_is_told_by_it_alone() -> None:
    made = world.engine()
    (result,) = made.generate([Request(TOKENS, 0)])
    assert result.status == REFUSED and not made.busy and made.step() == []


def test_requests_of_a_closed_generator_go_on() -> None:
    made = world.engine()
    results = made.generate(world.request(x) for x in range(4))
    next(results)
    results.close()
    world.drain(made)
    assert not made._claimed
    world.settled(made)


def test_a_handle_is_of_one_engine() -> None:
    made, other = world.engine(), world.engine()
    own, foreign = made.submit(world.request(1)), other.submit(world.request(3))
    assert own.number == foreign.number and own != foreign
    for wrong, why in ((foreign, "of another engine"), (0, "what `submit` returns, got 0")):
        for call in (made.cancel, made.preempt, made.result):
            with pytest.raises(ValueError, match=why):
                call(wrong)
    assert made.step() and own in made._entries
    again = pickle.loads(pickle.dumps(own))
    assert again == own and hash(again) == hash(own) and str(own) == "Handle(number=0)"
    assert made.preempt(again) and made.cancel(again)
    assert made.result(again).status == CANCELLED


def test_a_closed_store_serves_no_engine() -> None:
    store = world.store()
    store.close()
    with pytest.raises(ValueError, match="the store is closed: open another"):
        world.engine("validated", store=store)
    with pytest.raises(ValueError, match="store is a PrefixStore, got 5"):
        world.engine("validated", store=5)


@pytest.mark.parametrize(
    "field, value",
    [
        *((x, None) for x in ("burst", "max_waiting", "seed", "saved_bytes", "audit_share")),
        *((x, True) for x in ("burst", "tenant_slots", "noise_floor", "flight_timeout")),
        *((x, "a") for x in ("audit_share", "burst", "clock", "sleep", "drafter", "validate")),
        *((x, 5) for x in ("drafter", "clock", "bundle_dir", "weights_source", "strict")),
        ("flight_timeout", float("nan")),
        ("keep_logits", None),
    ],
)
def test_options_of_other_types_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} (is|must be) .*got {value!r}"):
        Options(**{field: value})


@pytest.mark.parametrize("field", ["options", "rows"])
@pytest.mark.parametrize("value", [5, {}, False])
def test_engines_of_other_types_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is .*got {value!r}"):
        Engine(*world.model(), reuse="off", capacity=64, **{field: value})


def test_an_engine_needs_a_model() -> None:
    with pytest.raises(ValueError, match=r"model is a decoder, .*got 5"):
        Engine(5, {}, reuse="off", capacity=64)
