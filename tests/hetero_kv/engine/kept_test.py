"""Pages that outlive their last holder: shared later without a copy, gone when they are needed."""

import dataclasses

import numpy as np
import pytest

from hetero_kv import Request
from hetero_kv.kept import Kept
from hetero_kv.options import Options
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.pages_test import (
    BLOCK_BYTES,
    DOCUMENT,
    HISTORY,
    PAGING,
    _fetched,
    ask,
    engine,
    same,
    start,
    warm_store,
)


def kept(made, component: str = HISTORY[0]) -> int:
    return made.pages.gauges()[f'pages{{component="{component}",state="kept"}}']


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    books = Kept()
    books.use([1, 2, 3], [10, 20, 30])
    books.use([7, 8], [70, 80])
    books.use([1, 2], [10, 20])
    assert books.pages() == [3, 8, 7, 2, 1] and len(books) == 5 and 7 in books
    books.spoil(7)
    books.spoil(99)
    assert books.generation(7) == 70 and books.generation(99) is None
    assert books.drop(2, {3}) == [(7, 70), (8, 80)]
    books.forget(3)
    assert books.drop(9, ()) == [(2, 20), (1, 10)] and not books.pages()


@pytest.mark.parametrize("warm", [False, True], ids=["computed", "restored"])
def test_a_later_request_shares_what_nobody_holds_any_more(warm: bool) -> None:
    store = warm_store() if warm else world.store()
    made = engine("validated", store=store, keep_pages=True, audit_share=1.0)
    (first,) = made.generate([ask(1)])
    same(first, ask(1))
    assert not made.scheduler.active() and kept(made) == 5 and made.problems() == []
    before = _fetched(store)
    for number in (2, 3):
        (result,) = made.generate([ask(number)])
        same(result, ask(number))
        assert dict(result.shared_pages) == {"csa entries": 5, "csa index keys": 2}
        assert result.routes["csa entries"] == "share" and result.reused_length == 40
        assert made.problems() == []
    # Windows and tails, and the block of which the index keys have no whole page.
    assert _fetched(store) == before + 2 * BLOCK_BYTES
    for component, count in zip(HISTORY, (5, 2), strict=True):
        assert world.count(made, "revived_pages_total", component=component) == 2 * count
    assert world.count(made, "audits_total", outcome="same") >= 2
    assert made.metrics()['hetero_kv_engine_pages{component="csa entries",state="kept"}'] == 5
    world.settled(made)
    assert world.count(made, "dropped_pages_total", component=HISTORY[0]) == 5
    assert not kept(made)


def test_an_admission_takes_as_many_as_it_needs() -> None:
    """None of those that it shares, and of the others no more than are missing."""
    made = engine("validated", store=warm_store(), keep_pages=True)
    list(made.generate([ask(1)]))
    assert kept(made) == 5
    (result,) = made.generate([ask(2, 20)])
    same(result, ask(2, 20))
    assert world.count(made, "dropped_pages_total", component=HISTORY[0]) == 0
    others = [Request(world.document(0), 20), Request(world.document(0)[::-1].copy(), 20)]
    handles = [start(made, x) for x in others]
    page = PAGING.page(HISTORY[0])
    missing = 2 * page.pages_for(59) - (page.count - 5)
    gone = world.count(made, "dropped_pages_total", component=HISTORY[0])
    assert 0 < gone == missing < 5 and made.problems() == []
    world.drain(made)
    for handle, request in zip(handles, others, strict=True):
        same(made.result(handle), request)
    world.settled(made)


def test_the_end_of_a_prefix_goes_first() -> None:
    made = engine("validated", store=warm_store(), keep_pages=True)
    list(made.generate([ask(1)]))
    one = start(made, Request(world.document(0), 20))  # 7 of the 11 free pages
    two = start(made, Request(DOCUMENT[:33][::-1].copy(), 8))  # 5 pages: one must go
    assert world.count(made, "dropped_pages_total", component=HISTORY[0]) == 1
    three = made.submit(ask(2, 1, size=24))  # 3 pages, all of them kept
    world.drain(made)
    result = made.result(three)
    same(result, ask(2, 1, size=24))
    assert result.shared_pages[HISTORY[0]] == 3
    assert made.result(one) and made.result(two)
    world.settled(made)


@pytest.mark.parametrize("field", ["bytes", "form", "generation"])
def test_a_kept_page_that_goes_wrong_is_not_served(field: str) -> None:
    made = engine("validated", store=warm_store(), keep_pages=True)
    one = start(made, ask(1, 6))
    slot = made._entries[one].slot
    page = int(made.cache.pages.tables[HISTORY[0]].table[slot, 1])
    world.drain(made)
    assert kept(made) == 5
    table = np.array(made.cache.pages.tables[HISTORY[0]].table)
    whole = made.cache
    table[0, 1] = page  # so that damage_page finds it
    pages = whole.pages.tables[HISTORY[0]]
    tables = whole.pages.tables | {HISTORY[0]: pages._replace(table=table)}
    made.cache = whole.replace(pages=whole.pages.replace(tables=tables))
    assert world.damage_page(made, 0, HISTORY[0], field, column=1)
    tables = made.cache.pages.tables
    tables |= {HISTORY[0]: tables[HISTORY[0]]._replace(table=pages.table)}
    made.cache = made.cache.replace(pages=made.cache.pages.replace(tables=tables))
    for number in (2, 3):
        handle = made.submit(ask(number))
        while made.busy:
            made.step()
        same(made.result(handle), ask(number))
    if field == "bytes":
        assert world.count(made, "corrupt_pages_total", component=HISTORY[0]) == 1
        world.settled(made)
    else:  # the books and the page table disagree: a new cache
        assert world.count(made, "caches_lost_total") == 1


def test_epochs_and_tenants_share_nothing_that_is_kept() -> None:
    store = warm_store()
    made = engine("validated", store=store, keep_pages=True)
    list(made.generate([ask(1)]))
    (other,) = made.generate([ask(2, tenant="b")])
    assert not any(other.shared_pages.values()) and kept(made) > 5
    store.advance_epoch(dataclasses.replace(world.identity(), weight_epoch=1))
    (later,) = made.generate([ask(3)])
    assert not any(later.shared_pages.values())
    for result, number in ((other, 2), (later, 3)):
        same(result, ask(number))
    store.advance_epoch(world.identity())
    world.settled(made)


def test_without_pages_there_is_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="keep_pages=True needs pages"):
        Options(keep_pages=True)
    assert Options(keep_pages=True, paging=PAGING).keep_pages
