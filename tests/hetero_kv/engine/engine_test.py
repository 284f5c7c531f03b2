"""What a request gets depends on it alone: not on mates, slot, arrival, reuse or preemption."""

import dataclasses

import numpy as np
import pytest

from hetero_kv import Request, Sampling
from hetero_kv.requests import ADMITTED, FINISHED, PREEMPTED, TOKEN
from tests.hetero_kv.engine import world
from tests.models import families

SOME = range(8)
OTHERS = ["v4", "scanned", "full_mixed", "no_overlap", "no_window", "full", *families.every()]


def serve(made, numbers) -> dict[int, object]:
    """Results by the number of the request."""
    handles = {made.submit(world.request(x)): x for x in numbers}
    world.drain(made)
    return {x: made.result(handle) for handle, x in handles.items()}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("reuse", ["off", "validated", "shadow"])
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(list(SOME), id="forth"),
        pytest.param(list(SOME)[::-1], id="back", marks=pytest.mark.full),
    ],
)
def test_batch_mates_and_slots_do_not_matter(reuse: str, order: list[int], paged: bool) -> None:
    store = None if reuse == "off" else world.store()
    made = world.engine(reuse, store=store, audit_share=1.0, paged=paged)
    for _ in range(2):  # cold, then warm
        for number, result in serve(made, order).items():
            world.same_answer(result, number)
    world.settled(made)
    if reuse != "off":
        assert world.count(made, "audits_total", outcome="same") >= 4
        assert world.count(made, "audits_total", outcome="differs") == 0
    reused = world.count(made, "prompt_tokens_total", how="reused")
    assert (reused > 0) == (reuse == "validated")


@pytest.mark.full
@pytest.mark.parametrize("name, paged", [("v4", False), ("v4", True), ("packed", True)])
def test_a_model_of_every_mechanism(name: str, paged: bool) -> None:
    store = world.store(name)
    made = world.engine("validated", name, store=store, audit_share=1.0, paged=paged)
    for _ in range(2):
        for number, result in serve(made, SOME).items():
            world.same_answer(result, number, name)
    assert world.count(made, "prompt_tokens_total", how="reused") > 0
    assert world.count(made, "audits_total", outcome="differs") == 0
    world.settled(made)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("slots", "paged"), [(1, True), (2, False), (5, True)])
def test_other_models_and_numbers_of_slots(name: str, slots: int, paged: bool) -> None:
    store = world.store(name)
    made = world.engine("validated", name, slots, store, audit_share=1.0, paged=paged)
    for _ in range(2):
        for number, result in serve(made, SOME).items():
            world.same_answer(result, number, name, slots)
    assert world.count(made, "audits_total", outcome="differs") == 0
    world.settled(made)


@pytest.mark.parametrize("slots", [1, 3])
def test_prompts_run_as_the_model_runs_them_at_batch_one(slots: int) -> None:
    model, params = world.model()
    made = world.engine(slots=slots)
    for number in (0, 1, 5):
        tokens = world.request(number).tokens
        want, _ = model.prefill(params, tokens[None], model.init_cache(1, world.CAPACITY))
        handle = made.submit(Request(tokens, 1))
        world.drain(made)
        assert made.result(handle).logits[0].tobytes() == np.asarray(want)[0, -1].tobytes()


def test_greedy_answers_are_the_models() -> None:
    model, params = world.model()
    tokens = world.request(1).tokens
    logits, cache = model.prefill(params, tokens[None], model.init_cache(1, 64), logits="last")
    first = np.asarray(logits).argmax(-1).astype(np.int32)
    more, _ = model.decode_many(params, first, cache, 9)
    (result,) = world.engine().generate([Request(tokens, 10)])
    assert result.tokens.tolist() == [int(first[0]), *np.asarray(more)[0].tolist()]


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("save", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("reuse", ["off", "validated"])
def test_preemption_at_every_step(save: bool, reuse: str, paged: bool) -> None:
    """Also while the prompt runs, and while tokens are being decoded again."""
    long = Request(world.request(1).tokens, 30, sampling=Sampling(1.0, seed=3))
    (want,), again = world.engine().generate([long]), 0
    for every in (1, 2, 3):
        store = None if reuse == "off" else world.store()
        made = world.engine(reuse, store=store, paged=paged)
        handle, mate = made.submit(long), made.submit(world.request(2))
        for i in range(60):
            made.step()
            if i % (every + 1) == every and i < 40:
                made.preempt(handle, save=save)
            assert made.problems() == []
        world.drain(made)
        result = made.result(handle)
        assert result.preemptions >= 2
        assert result.tokens.tolist() == want.tokens.tolist()
        assert result.logits.tobytes() == want.logits.tobytes()
        world.same_answer(made.result(mate), 2)
        assert world.count(made, "redecode_mismatches_total") == 0
        assert (result.discarded > 0) != save
        again += world.count(made, "redecoded_tokens_total")
        world.settled(made)
    assert (again > 0) != save


def test_saved_state_that_has_no_room_is_computed_again() -> None:
    made = world.engine(saved_bytes=10)
    handle = made.submit(world.request(1))
    made.step()
    assert made.preempt(handle, save=True)
    assert [x.detail for x in made.step() if x.kind == PREEMPTED] == ["recomputed"]
    world.drain(made)
    world.same_answer(made.result(handle), 1)


def test_higher_priority_preempts_the_last_of_the_lowest() -> None:
    made = world.engine(slots=1)
    low = made.submit(Request(world.request(1).tokens, 8))
    events = made.step()
    high = made.submit(Request(world.request(2).tokens, 8, priority=1))
    while made.busy:
        events += made.step()
    order = [(x.kind, x.handle) for x in events if x.kind in (ADMITTED, PREEMPTED, FINISHED)]
    assert order == [
        (ADMITTED, low),
        (PREEMPTED, low),
        (ADMITTED, high),
        (FINISHED, high),
        (ADMITTED, low),
        (FINISHED, low),
    ]


def test_preemption_can_be_forbidden() -> None:
    made = world.engine(slots=1, preempt="never")
    low = made.submit(world.request(1))
    made.step()
    made.submit(Request(world.request(2).tokens, 8, priority=1))
    world.drain(made)
    assert made.result(low).preemptions == 0


def test_tokens_are_streamed_in_order() -> None:
    made = world.engine()
    handles = [made.submit(world.request(x)) for x in SOME]
    streamed: dict = {x: [] for x in handles}
    while made.busy:
        for event in made.step():
            if event.kind == TOKEN:
                assert event.index == len(streamed[event.handle])
                streamed[event.handle].append(event.token)
    for handle in handles:
        assert streamed[handle] == made.result(handle).tokens.tolist()


def test_short_prompts_do_not_wait_for_long_answers() -> None:
    """Prompt chunks and decode steps take turns."""
    made = world.engine()
    long = made.submit(Request(world.request(1).tokens, 12))
    while not any(x.kind == TOKEN for x in made.step()):
        pass
    made.submit(Request(world.document(1), 1))
    events = made.step()
    assert sum(x.kind == TOKEN and x.handle == long for x in events) == 1


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_exact_replay_and_its_ledger(paged: bool) -> None:
    store = world.store(policy="zero")
    made = world.engine("validated", store=store, audit_share=1.0, paged=paged)
    numbers = (1, 3, 5, 7)
    for _ in range(2):
        results = serve(made, numbers)
        for number, result in results.items():
            world.same_answer(result, number)
    assert world.count(made, "prompt_tokens_total", how="replayed") > 0
    assert any(x.replayed_length for x in results.values())
    assert world.count(made, "audits_total", outcome="differs") == 0
    assert world.count(made, "audits_total", outcome="same") > 0
    world.settled(made)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_approximate_replay_says_so_and_is_not_audited(paged: bool) -> None:
    store = world.store(policy="bounded:8")
    made = world.engine("validated", store=store, audit_share=1.0, paged=paged)
    for _ in range(2):
        results = serve(made, (1, 3, 5, 7))
    assert all(x.status == FINISHED for x in results.values())
    resumed = [x for x in results.values() if x.resumable_length]
    assert resumed and any(x.approximate for x in resumed)
    assert not made.breaker.failed and not world.count(made, "verdicts_total")
    world.settled(made)


def test_shadow_of_an_exact_replay() -> None:
    store = world.store(policy="zero")
    made = world.engine("shadow", store=store)
    for _ in range(2):
        for number, result in serve(made, (1, 3, 5)).items():
            world.same_answer(result, number)
    assert world.count(made, "audits_total", outcome="same") > 0
    assert world.count(made, "audits_total", outcome="differs") == 0


def test_the_store_accounts_for_every_prompt_token() -> None:
    store = world.store()
    made = world.engine("validated", store=store)
    for _ in range(2):
        serve(made, SOME)
    found = {x.removeprefix("hetero_kv_prefix_"): n for x, n in store.metrics().items()}
    parts = ("restored_tokens_total", "replay_tokens_total", "computed_tokens_total")
    assert sum(found[x] for x in parts) == found["prompt_tokens_total"]


@pytest.mark.full
def test_wide_models_too() -> None:
    """d = 512, where calls off the chunk grid differ in their last bits."""
    import models
    from hetero_kv import Engine, PrefixStore
    from hetero_kv.pages.layout import Paging
    from hetero_kv.prefix.identity import Identity
    from tests.models import tiny

    config = tiny.BASE.replace(d_model=512, head_dim=64, n_heads=8, d_ff=512, window=17)
    made = models.build(config)
    params = tiny.random_params(made, seed=5)
    identity = Identity.of(made.cache_spec, params, made.config, batch=1)

    paging = Paging.of(made.cache_spec, 3, 64)

    def run(reuse: str, numbers: list[int], paging: Paging | None = None) -> dict:
        store = None
        if reuse != "off":
            store = PrefixStore(made.cache_spec, identity, host_bytes=1 << 28)
        engine = Engine(
            made,
            params,
            store=store,
            slots=3,
            capacity=64,
            reuse=reuse,
            options=dataclasses.replace(world.OPTIONS, paging=paging),
        )
        for _ in range(2):
            found = serve(engine, numbers)
        return found

    want, got = run("off", [1]) | run("off", [2, 3, 5]), run("validated", [5, 3, 2, 1])
    pages = run("validated", [5, 3, 2, 1], paging)
    assert any(any(x.shared_pages.values()) for x in pages.values())
    for some in (got, pages):
        assert sum(x.reused_length for x in some.values()) > 0
        for number, result in some.items():
            assert result.logits.tobytes() == want[number].logits.tobytes()
