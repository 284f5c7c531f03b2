"""The engine over shared pages: one copy of a prefix, admission by pages, leases at use."""

import dataclasses

import jax
import numpy as np
import pytest

from hetero_kv import Engine, Request
from hetero_kv.pages import table
from hetero_kv.pages.layout import Paging
from hetero_kv.requests import ADMITTED, FAILED, PREEMPTED, REFUSED
from tests.hetero_kv.engine import world

HISTORY = ("csa entries", "csa index keys")
BLOCK_BYTES = 2 * 12 * 4  # of entries
PAGING = world.paging()  # 16 and 8 pages; a row may need 8 and 4
DOCUMENT = world.document(1)  # 40 tokens: 5 blocks


def engine(reuse: str = "off", **options) -> Engine:
    """One step runs a whole prompt, and four tokens of every answer."""
    return world.engine(reuse, paging=PAGING, chunks_per_step=8, **options)


def ask(number: int, new: int = 6, size: int = 40, **fields) -> Request:
    """A question of its own about the document."""
    own = np.random.default_rng([3, number]).integers(0, world.VOCAB, 3)
    return Request(np.concatenate([DOCUMENT[:size], own]).astype(np.int32), new, **fields)


def warm_store():
    store = world.store()
    list(world.engine("validated", store=store).generate([ask(0)]))
    return store


def cold(request: Request):
    """What the contiguous engine answers, without reuse."""
    (result,) = world.engine("off").generate([request])
    return result


def same(result, request: Request) -> None:
    want = cold(request)
    assert result.tokens.tolist() == want.tokens.tolist(), result.why
    assert result.logits.tobytes() == want.logits.tobytes()


def used(made: Engine) -> dict[str, int]:
    gauges = made.pages.gauges()
    return {
        name: sum(gauges[f'pages{{component="{name}",state="{x}"}}'] for x in ("owned", "shared"))
        for name in HISTORY
    }


def start(made: Engine, request: Request):
    """Submits, and steps until its answer has begun."""
    handle = made.submit(request)
    while not (made._entries[handle].slot is not None and made._entries[handle].emitted):
        made.step()
        assert made.problems() == []
    return handle


def test_a_prefix_is_held_once() -> None:
    """Of a live row that computed it, and of one that restored it; each may leave first."""
    for store in (world.store(), warm_store()):
        made = engine("validated", store=store, audit_share=1.0)
        requests = [ask(1, 20), ask(2, 18), ask(3, 17)]
        first = start(made, requests[0])
        before, fetched = used(made), _fetched(store)
        rest = [start(made, x) for x in requests[1:]]
        # Of the index keys, whose pages span two blocks, the fifth block is not in a whole page.
        assert _fetched(store) == fetched + 2 * BLOCK_BYTES
        assert {x.component: x.span for x in PAGING.pages} == dict(
            zip(HISTORY, (8, 16), strict=True)
        )
        for page in PAGING.pages:
            # 40 tokens are shared, whole pages of them; the rest is the row's own.
            own = sum(page.pages_for(len(x.tokens) + x.max_new_tokens - 1) for x in requests[1:])
            own -= 2 * (40 // page.span)
            assert used(made)[page.component] == before[page.component] + own
        world.drain(made)
        for handle, request in zip([first, *rest], requests, strict=True):
            result = made.result(handle)
            same(result, request)
            shared = {"csa entries": 5, "csa index keys": 2}
            assert dict(result.shared_pages) == (
                shared if handle in rest else {x: 0 for x in shared}
            )
            assert (result.routes["csa entries"] == "share") == (handle in rest)
            assert result.reused_length == (40 if handle in rest or fetched else 0)
        assert used(made) == dict.fromkeys(HISTORY, 0)
        assert world.count(made, "audits_total", outcome="same") >= 2
        world.settled(made)


def _fetched(store) -> int:
    return sum(
        n for x, n in store.metrics().items() if "restored_bytes_total" in x and HISTORY[0] in x
    )


def test_tenants_and_other_prefixes_share_nothing() -> None:
    made = engine("validated", store=world.store())
    start(made, ask(1, 12, tenant="a"))
    start(made, ask(2, 12, tenant="b"))
    other = made.submit(ask(3, 9, size=7, tenant="a"))
    world.drain(made)
    assert world.count(made, "shared_pages_total", component=HISTORY[0]) == 0
    same(made.result(other), ask(3, 9, size=7))


def test_saved_state_shares_again() -> None:
    made = engine("validated", store=warm_store())
    one, two = (start(made, ask(x, 16)) for x in (1, 2))
    held = used(made)
    assert made.preempt(two, save=True)
    assert used(made)[HISTORY[0]] < held[HISTORY[0]]
    made.step()
    assert used(made) == held
    world.drain(made)
    for handle, number in ((one, 1), (two, 2)):
        same(made.result(handle), ask(number, 16))
    world.settled(made)


def test_what_can_never_fit_is_refused() -> None:
    tight = Paging.of(world.model()[0].cache_spec, world.SLOTS, world.CAPACITY, 8, 4)
    made = world.engine(paging=tight)
    handle = made.submit(ask(1))
    assert made.problems() == []
    result = made.result(handle)
    assert result.status == REFUSED
    assert result.why == (
        "needs 6 pages of 'csa entries', but the pool has 4; ask for fewer tokens, or make larger "
        "pools (Paging.of(…, count=…))"
    )


def test_without_pages_a_request_waits_and_nobody_overtakes_it() -> None:
    made = world.engine(paging=PAGING)
    long = [made.submit(ask(x, 15)) for x in (1, 2)]  # 8 pages each: all there are
    short = made.submit(Request(DOCUMENT[:3], 2))
    admitted = []
    while made.busy:
        admitted += [x.handle for x in made.step() if x.kind == ADMITTED]
        assert made.problems() == []
        assert len(made.scheduler.active()) <= 2
    assert admitted == [*long, short]
    assert world.count(made, "page_waits_total") > 3
    made.result(short)
    for handle, number in zip(long, (1, 2), strict=True):
        same(made.result(handle), ask(number, 15))


@pytest.mark.parametrize("preempt", ["save", "recompute", "never"])
def test_a_higher_priority_gets_the_pages_it_needs(preempt: str) -> None:
    """There is a slot, but too few pages."""
    made = world.engine(paging=PAGING, preempt=preempt)
    requests = [ask(x, 15) for x in (1, 2)] + [ask(3, 15, priority=1)]
    low = [made.submit(x) for x in requests[:2]]
    made.step()
    high = made.submit(requests[2])
    events = []
    while made.busy:
        events += made.step()
        assert made.problems() == []
    gone = [x.handle for x in events if x.kind == PREEMPTED]
    assert gone == ([] if preempt == "never" else low[1:])
    for handle, request in zip([*low, high], requests, strict=True):
        same(made.result(handle), request)
    world.settled(made)


@pytest.mark.parametrize("component", HISTORY)
@pytest.mark.parametrize(
    "field, reason",
    [
        ("generation", "generation"),
        ("owner", "owner"),
        ("form", "missing"),
        ("count", "valid"),
        ("table", "owner"),
        ("sentinel", "missing"),
        ("negative", "missing"),
        ("far", "missing"),
    ],
)
def test_a_page_that_is_not_as_it_was_leased(component: str, field: str, reason: str) -> None:
    """The row is refused within the call and runs again; its mates do not notice."""
    made = engine()
    requests = [ask(1, 20), ask(2, 18)]
    handles = [start(made, x) for x in requests]
    streamed = len(made._entries[handles[0]].emitted)
    assert world.damage_page(made, made._entries[handles[0]].slot, component, field)
    made.step()
    assert made._entries[handles[0]].slot is None
    assert len(made._entries[handles[0]].emitted) == streamed
    world.drain(made)
    for handle, request in zip(handles, requests, strict=True):
        same(result := made.result(handle), request)
        assert (result.discarded > 0) == (handle == handles[0])
        told = [x.detail for x in result.reasons if x.code == "evidence"]
        assert any(f"{component}: {reason}" in x for x in told) == (handle == handles[0])
    assert world.count(made, "verdicts_total") == 1
    assert world.count(made, "verdict_bits_total", component=component, reason=reason) == 1
    world.settled(made)


@pytest.mark.parametrize("prefills", [False, True])
def test_a_shared_page_that_goes_wrong_is_replanned(prefills: bool) -> None:
    """Everybody who reads it is refused; each runs again, on pages of its own."""
    made = engine("validated", store=warm_store())
    requests = [ask(1, 20), ask(2, 20), ask(3, 20)]
    handles = [start(made, x) for x in requests[: 3 - prefills]]
    if prefills:
        handles.append(made.submit(requests[2]))
        made._admit()
    assert world.damage_page(made, made._entries[handles[2]].slot, HISTORY[1], "form")
    world.drain(made)
    for handle, request in zip(handles, requests, strict=True):
        same(result := made.result(handle), request)
        assert any(x.code == "evidence" for x in result.reasons)
    # Those that had it by sharing: with the hit, but from the store. The first one: cold.
    assert not any(any(made.pages.shared(x).values()) for x in range(world.SLOTS))
    assert result.reused_length == 40 and not any(result.shared_pages.values())
    assert world.count(made, "verdicts_total") == 3
    world.settled(made)


def test_bytes_that_changed_are_not_shared() -> None:
    """They are read once more before they are: the page is corrupt then, for its holder too."""
    made = engine("validated", store=warm_store())
    one = start(made, ask(1, 16))
    assert world.damage_page(made, made._entries[one].slot, HISTORY[0], "bytes", column=1)
    two = made.submit(ask(2, 16))
    made._admit()
    slot = made._entries[one].slot
    pages = made.cache.pages.tables[HISTORY[0]]
    assert int(pages.form[pages.table[slot, 1]]) == table.CORRUPT
    assert made.pages.shared(made._entries[two].slot)[HISTORY[0]] == 1
    world.drain(made)
    assert world.count(made, "corrupt_pages_total", component=HISTORY[0]) == 1
    same(result := made.result(two), ask(2, 16))
    assert result.reused_length == 40 and result.shared_pages[HISTORY[0]] == 1
    result = made.result(one)  # what it had streamed of them stands; it runs again
    assert any("csa entries: missing" in x.detail for x in result.reasons)
    world.settled(made)


@pytest.mark.parametrize("component", HISTORY)
@pytest.mark.parametrize("whose", ["shared", "restored"])
def test_bytes_that_change_before_their_first_use(component: str, whose: str) -> None:
    """After they were verified, sealed and leased, and before the row's first call reads them."""
    made = engine("validated", store=warm_store())
    one = start(made, ask(1, 20)) if whose == "shared" else None
    two = made.submit(ask(2, 16))
    made._admit()
    slot = made._entries[two].slot
    assert bool(made.pages.shared(slot)[component]) == (whose == "shared")
    assert world.damage_page(made, slot, component, "bytes", column=1)
    world.drain(made)
    same(result := made.result(two), ask(2, 16))
    assert f"{component}: checksum" in [x.detail for x in result.reasons if x.code == "evidence"]
    assert world.count(made, "verdict_bits_total", component=component, reason="checksum") == 1
    if one is not None:  # who holds the page too is refused from then on, and runs again
        told = [x.detail for x in made.result(one).reasons]
        assert any(f"{component}: missing" in x for x in told)
    (after,) = made.generate([ask(3, 16)])
    same(after, ask(3, 16))
    assert world.count(made, "caches_lost_total") == 0
    world.settled(made)


def test_changed_pages_and_no_others() -> None:
    """Who was to share them goes back to the queue, and is served when there are pages."""
    made = engine("validated", store=warm_store())
    one, other = start(made, ask(1, 16)), start(made, ask(3, 12, size=7))
    for component in HISTORY:
        assert world.damage_page(made, made._entries[one].slot, component, "bytes")
    two = made.submit(ask(2, 16))
    made._admit()
    assert made._entries[two].slot is None and made.problems() == []
    world.drain(made)
    same(made.result(two), ask(2, 16))
    same(made.result(other), ask(3, 12, size=7))
    assert world.count(made, "corrupt_pages_total", component=HISTORY[0]) == 1
    world.settled(made)


def _forms(made: Engine, cache, slot: int) -> list[int]:
    pages = cache.pages.tables[HISTORY[0]]
    return np.asarray(pages.column("form", pages.table[slot])).tolist()[:8]


@pytest.mark.parametrize("fails", [False, True])
def test_pages_are_loading_until_the_copy_has_ended(fails: bool, monkeypatch) -> None:
    made = engine("validated", store=warm_store())
    inner, failed, seen = made.store.restore, made.rows.fail_load, []

    def restore(lease, cache, row=0):
        seen.append(_forms(made, cache, row))
        cache = inner(lease, cache, row=row)
        seen.append(_forms(made, cache, row))
        if fails:
            made.cache = cache  # what a store holds when it raises before the copy
            raise OSError("the tier is gone")
        return cache

    def fail_load(cache, row):
        cache = failed(made.cache, row)
        seen.append(_forms(made, cache, row))
        return cache

    made.store.restore = restore
    monkeypatch.setattr(made.rows, "fail_load", fail_load)
    monkeypatch.setattr("hetero_kv.reusing.is_lost", lambda cache: False)
    handle = made.submit(ask(1))
    made._admit()
    rest = [table.WRITING] + [table.ABSENT] * 2  # 48 tokens: 6 of 8 pages, 5 of them restored
    assert seen[:2] == [[table.LOADING] * 5 + rest] * 2
    if fails:
        assert seen[2] == [table.CORRUPT] * 5 + rest
        assert (
            _forms(made, made.cache, made._entries[handle].slot) == [table.WRITING] * 6 + rest[1:]
        )
    else:
        assert _forms(made, made.cache, 0) == [table.COMPLETE] * 5 + rest
    assert made.problems() == []
    world.drain(made)
    same(result := made.result(handle), ask(1))
    assert any(x.code == "restore_failed" for x in result.reasons) == fails
    world.settled(made)


def test_a_copy_that_never_ended_is_refused() -> None:
    made = engine("validated", store=warm_store())
    made.pages.settle = lambda cache, slot, restored=None: cache
    (result,) = made.generate([ask(1)])
    same(result, ask(1))
    assert any("csa entries: missing" in x.detail for x in result.reasons)


@pytest.mark.parametrize("always", [False, True])
def test_a_hit_that_gets_shorter_than_what_is_shared(always: bool) -> None:
    """Sealed pages beyond the row's length could not be written: it gets fewer, or none."""
    made = engine("validated", store=warm_store())
    one = start(made, ask(1, 12))
    inner, limits = made.store.restore, iter((16, 8))

    def restore(lease, cache, row=0, held=0):
        limit = next(limits) if always else 16
        if lease.resumable_length > limit:
            made.store._fetcher._replan(lease, limit, ("windows", "lost"))
        return inner(lease, cache, row=row, held=held)

    made.store.restore = restore
    two = made.submit(ask(2, 12))
    made._admit()
    assert made.problems() == []
    world.drain(made)
    same(made.result(one), ask(1, 12))
    same(result := made.result(two), ask(2, 12))
    assert result.reused_length == (0 if always else 16)
    assert any(result.shared_pages.values()) != always
    world.settled(made)


def test_books_that_disagree_cost_a_cache_and_no_answer() -> None:
    """The page table has no free page where the books have some."""
    made = engine()
    one = start(made, ask(1, 12))
    pages = made.cache.pages.tables[HISTORY[0]]
    full = pages._replace(form=np.where(pages.form == 0, table.COMPLETE, pages.form))
    tables = made.cache.pages.tables | {HISTORY[0]: jax.tree.map(jax.numpy.array, full)}
    made.cache = made.cache.replace(pages=made.cache.pages.replace(tables=tables))
    two = made.submit(ask(2, 12))
    world.drain(made)
    for handle, number in ((one, 1), (two, 2)):
        same(made.result(handle), ask(number, 12))
    assert world.count(made, "caches_lost_total") == 1
    world.settled(made)


@pytest.mark.parametrize("validate", [True, False])
def test_validation_can_be_switched_off(validate: bool) -> None:
    """Another row's page is then read as if it were one's own."""
    made = engine(validate=validate)
    (right,) = made.generate([ask(1, 20)])
    same(right, ask(1, 20))
    handles = [start(made, x) for x in (ask(1, 20), Request(world.document(0), 20))]
    for component in HISTORY:
        world.damage_page(made, made._entries[handles[0]].slot, component, "table")
    while made.busy:
        made.step()
    have = [made.result(x) for x in handles]
    assert have[0].status != FAILED
    assert (have[0].logits.tobytes() == right.logits.tobytes()) == validate
    assert world.count(made, "verdicts_total") == validate
    assert made.problems() == []


def test_sizes_and_modes_that_do_not_go_together() -> None:
    other = Paging.of(world.model()[0].cache_spec, world.SLOTS, 32)
    model, params = world.model()
    options = dataclasses.replace(world.OPTIONS, paging=other)
    with pytest.raises(ValueError, match="pages for rows of 32 tokens, not of capacity=64"):
        Engine(model, params, slots=3, capacity=64, reuse="off", options=options)
    with pytest.raises(ValueError, match="Options\\(paging=None\\)"):
        world.engine("hash_only", store=world.hash_only_store(), paged=True)
    store = world.store()
    with store.lookup(DOCUMENT) as lease, pytest.raises(ValueError, match="contiguous"):
        store.restore(lease, model.init_cache(1, 64), held=1)
