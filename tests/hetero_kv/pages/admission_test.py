"""A row's pages from admission to end: forms, what is shared, and books that outlive the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.pages import admission, table
from hetero_kv.pages import cache as paged
from hetero_kv.pages.admission import Some, Want
from hetero_kv.pages.layout import Paging, history_slots
from hetero_kv.state import Cache
from tests import variants
from tests.hetero_kv import synthetic, validators
from tests.hetero_kv.pages import convert
from tests.hetero_kv.pages.convert import owner

SPEC = synthetic.everything()
CAPACITY, ROWS = 48, 3
TOKENS = np.arange(CAPACITY) * 5 % 11
PAGING = Paging.of(SPEC, ROWS, CAPACITY, span={"full kv": 4, "csa entries": 16})
PAGES = PAGING.pages
MOST = max(x.columns for x in PAGES)
KEYS = np.arange(len(PAGES) * MOST * 2, dtype=np.uint32).reshape(len(PAGES), MOST, 2) + 1000

ADMIT = jax.jit(functools.partial(admission.admit, SPEC))
SETTLE = jax.jit(functools.partial(admission.settle, SPEC))
FAIL = jax.jit(admission.fail_load)
REVOKE = jax.jit(functools.partial(admission.revoke, SPEC, poison=True))
KEEP = jax.jit(admission.keep)
DROP = jax.jit(functools.partial(admission.drop, SPEC, poison=True))


@functools.cache
def holder() -> Cache:
    """Row 0 stands at 40 tokens, with all of its pages that are full sealed."""
    cache = synthetic.empty(SPEC, batch=ROWS, capacity=CAPACITY)
    cache = synthetic.advance(SPEC, cache, 0, TOKENS, 40)
    cache = convert.into_pages(SPEC, cache, PAGING, (0,))
    cache, done = SETTLE(cache, 0, KEYS, 40, 40)
    assert int(done.flags) == 0 and int(done.exact) == 40
    assert done.filled.tolist() == [int(x.contract.count(40)) // x.entries for x in PAGES]
    return cache


def want(cache: Cache, length: int, size: int, number: int = 2, **changes) -> Want:
    """Pages for `size` tokens, of which row 0 lends those of the first `length`."""
    ids, generation = (np.zeros((len(PAGES), MOST), np.int32) for _ in "ab")
    whole = np.zeros(len(PAGES), np.int32)
    for c, page in enumerate(PAGES):
        pages = cache.pages.tables[page.component]
        whole[c] = int(page.contract.count(length)) // page.entries
        ids[c, : page.columns] = pages.table[0]
        generation[c, : page.columns] = pages.column("generation", pages.table[0])
    made = Want(ids, generation, whole, np.int32(size), np.int32(length), owner(number))
    return made._replace(**changes)


def forms(cache: Cache, row: int) -> list[list[int]]:
    """By component, of the columns that have a page."""
    found = []
    for page in PAGES:
        pages = cache.pages.tables[page.component]
        ids = np.asarray(pages.table[row])
        found.append(np.asarray(pages.form)[ids[ids != pages.size]].tolist())
    return found


def check_books(cache: Cache) -> None:
    for name, books in validators.ledgers(cache).items():
        assert bool(books.exact), name


def assert_equal(one: Cache, two: Cache) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.array(a).view(np.uint8), np.array(b).view(np.uint8))


@pytest.mark.parametrize("length", [0, 8, 24, 40])
def test_what_is_shared_awaited_and_free_to_write(length: int) -> None:
    cache, given = ADMIT(holder(), 2, want(holder(), length, 44))
    assert int(given.flags) == 0 and not given.changed.any()
    check_books(cache)
    for c, page in enumerate(PAGES):
        whole = int(page.contract.count(length)) // page.entries
        load, need = page.pages_for(length), page.pages_for(44)
        assert forms(cache, 2)[c] == (
            [table.COMPLETE] * whole
            + [table.LOADING] * (load - whole)
            + [table.WRITING] * (need - load)
        )
        pages = cache.pages.tables[page.component]
        np.testing.assert_array_equal(given.ids[c, : page.columns], pages.table[2])
        np.testing.assert_array_equal(pages.table[2, :whole], pages.table[0, :whole])
        have = np.asarray(given.generation[c, :need]), np.asarray(given.owner[c, :need])
        np.testing.assert_array_equal(have[0], pages.generation[pages.table[2, :need]])
        np.testing.assert_array_equal(have[1][whole:], np.tile(owner(2), (need - whole, 1)))
        np.testing.assert_array_equal(have[1][:whole], KEYS[c, :whole])


@pytest.mark.parametrize(
    "row, changes, why",
    [
        (-1, {}, "bad_row"),
        (ROWS, {}, "bad_row"),
        (2**31 - 1, {}, "bad_row"),
        (0, {}, "occupied"),
        (2, dict(tokens=CAPACITY + 1), "bad_range"),
        (2, dict(tokens=-1), "bad_range"),
        (2, dict(load=45), "bad_range"),
        (2, dict(owner=np.zeros(2, np.uint32)), "bad_owner"),
        (2, dict(owner=owner(1)), "bad_owner"),
        (2, dict(generation=np.full((len(PAGES), MOST), 7, np.int32)), "stale"),
        (2, dict(ids=np.full((len(PAGES), MOST), -1, np.int32)), "bad_id"),
        (2, dict(ids=np.full((len(PAGES), MOST), 2**31 - 1, np.int32)), "bad_id"),
    ],
)
def test_nothing_is_given_in_part(row: int, changes: dict, why: str) -> None:
    changes = {x: np.int32(y) if isinstance(y, int) else y for x, y in changes.items()}
    before = holder()
    after, given = ADMIT(before, row, want(before, 24, 44, **changes))
    assert int(given.flags) & table.FLAGS[why]
    if row == 2:
        assert (np.asarray(given.ids) == [[x.count] * MOST for x in PAGES]).all()
    assert_equal(after, before)


@pytest.mark.parametrize("component", range(len(PAGES)))
def test_changed_bytes_make_a_page_corrupt(component: int) -> None:
    page, before = PAGES[component], holder()
    i = int(before.pages.tables[page.component].table[0, 0])
    slot = history_slots(SPEC)[page.component][-1]
    wrong = synthetic.edit(
        before, slot, (slot.repeats - 1, i, page.entries - 1, ..., 0), 1, add=True
    )
    after, given = ADMIT(wrong, 2, want(before, 24, 44))
    assert int(given.flags) == table.NOT_COMPLETE
    changed = np.zeros((len(PAGES), MOST), bool)
    changed[component, 0] = True
    np.testing.assert_array_equal(given.changed, changed)
    form = after.pages.tables[page.component].form
    assert int(form[i]) == table.CORRUPT
    tables = after.pages.tables | {
        page.component: after.pages.tables[page.component]._replace(
            form=form.at[i].set(table.COMPLETE)
        )
    }
    assert_equal(after.replace(pages=after.pages.replace(tables=tables)), wrong)
    # What is not shared is not read.
    whole = np.array(want(before, 24, 44).whole)
    whole[component] = 0
    after, given = ADMIT(wrong, 2, want(before, 24, 44, whole=whole))
    assert int(given.flags) == 0
    check_books(after)


@pytest.mark.parametrize("arrived", variants.some([0, 21, 32], [21]))
def test_the_end_of_a_copy(arrived: int) -> None:
    """32 tokens were awaited; what has come is sealed, as far as pages are full."""
    cache, _ = ADMIT(holder(), 2, want(holder(), 0, 44, load=np.int32(32)))
    before = cache
    counts = {}
    for page in PAGES:
        pages = cache.pages.tables[page.component]
        held = np.clip(
            int(page.contract.count(arrived)) - np.arange(page.columns) * page.entries,
            0,
            page.entries,
        )
        ids = np.asarray(pages.table[2])
        count = np.array(pages.count)
        count[ids[ids != pages.size]] = held[ids != pages.size]
        counts[page.component] = pages._replace(count=jnp.asarray(count))
    cache = cache.replace(
        length=cache.length.at[2].set(arrived), pages=cache.pages.replace(tables=counts)
    )
    cache, done = SETTLE(cache, 2, KEYS, 32, 40)
    assert int(done.flags) == 0 and int(done.exact) == arrived
    check_books(cache)
    for c, page in enumerate(PAGES):
        full = int(page.contract.count(arrived)) // page.entries
        need = page.pages_for(44)
        assert int(done.filled[c]) == full
        assert forms(cache, 2)[c] == [table.COMPLETE] * full + [table.WRITING] * (need - full)
        pages = cache.pages.tables[page.component]
        ids = pages.table[2, :full]
        np.testing.assert_array_equal(pages.owner[ids], KEYS[c, :full])
        sums = paged.checksums(SPEC, cache, page.component, ids)
        np.testing.assert_array_equal(pages.checksum[ids], sums)
    # Without a key nothing is sealed; and a copy that failed is nobody's to read.
    again, done = SETTLE(before, 2, KEYS, 32, 0)
    assert not np.asarray(done.filled).any()
    failed = FAIL(before, 2)
    for c, page in enumerate(PAGES):
        load, need = page.pages_for(32), page.pages_for(44)
        assert forms(again, 2)[c] == [table.WRITING] * need
        assert forms(failed, 2)[c] == [table.CORRUPT] * load + [table.WRITING] * (need - load)
    assert forms(failed, 0) == forms(before, 0)
    assert_equal(FAIL(before, 1), before)


def test_only_what_is_exact_is_sealed() -> None:
    """Restored, or computed on the chunk grid: not what decode has made."""
    cache = synthetic.empty(SPEC, batch=ROWS, capacity=CAPACITY)
    cache = synthetic.advance(SPEC, cache, 0, TOKENS, 40)
    cache = convert.into_pages(SPEC, cache, PAGING, (0,))
    for grid, restored, exact in ((16, 0, 16), (0, 24, 24), (16, 24, 24), (48, 0, 40)):
        some = cache.replace(grid_length=cache.grid_length.at[0].set(grid))
        _, done = SETTLE(some, 0, KEYS, restored, 44)
        assert int(done.exact) == exact
        assert done.filled.tolist() == [int(x.contract.count(exact)) // x.entries for x in PAGES]


@pytest.mark.parametrize("damage", ["none", "foreign", "negative", "cleared", "owner", "form"])
def test_the_books_take_back_what_they_gave(damage: str) -> None:
    """Whatever the row's block table has come to say; nobody else loses a page."""
    cache, given = ADMIT(holder(), 2, want(holder(), 24, 44))
    right = cache
    name = PAGES[-1].component
    pages = cache.pages.tables[name]
    changes = {
        "none": {},
        "foreign": dict(table=pages.table.at[2, 0].set(pages.table[0, 4])),
        "negative": dict(table=pages.table.at[2, 1].set(-5)),
        "cleared": dict(table=pages.table.at[2].set(pages.size)),
        "owner": dict(owner=pages.owner.at[pages.table[2, 7]].set(0)),
        "form": dict(form=pages.form.at[pages.table[2, 7]].set(table.CORRUPT)),
    }[damage]
    tables = cache.pages.tables | {name: pages._replace(**changes)}
    cache = cache.replace(pages=cache.pages.replace(tables=tables))
    left = np.zeros((len(PAGES), MOST), np.int32)
    for c, page in enumerate(PAGES):
        left[c, : int(page.contract.count(24)) // page.entries] = 1  # row 0 has them still
    after = REVOKE(cache, 2, given.ids, left)
    check_books(after)
    assert forms(after, 2) == [[]] * len(PAGES) and forms(after, 0) == forms(right, 0)
    rows = convert.contiguous(SPEC, after)
    assert not synthetic.wrong_rows(SPEC, rows, 0, TOKENS)
    for page in PAGES:
        old, new = holder().pages.tables[page.component], after.pages.tables[page.component]
        np.testing.assert_array_equal(old.form, new.form)
        np.testing.assert_array_equal(old.shares, new.shares)
        gone = np.asarray(right.pages.tables[page.component].table[2])
        gone = gone[
            (gone != old.size) & (np.asarray(new.form)[np.minimum(gone, old.size - 1)] == 0)
        ]
        assert len(gone) and (np.asarray(new.generation)[gone] == 1).all()
        for slot in history_slots(SPEC)[page.component]:
            assert np.isnan(np.asarray(after.leaf(slot), np.float32)[:, gone]).all()
    again = REVOKE(after, 2, np.full_like(left, 2**31 - 1), left * 0)
    assert_equal(again, after)


def test_kept_pages_outlive_their_row() -> None:
    cache = holder()
    lent = want(cache, 40, 40)
    ids = np.stack([np.pad(cache.pages.tables[x.component].table[0], (0, MOST - x.columns),
                           constant_values=x.count) for x in PAGES])  # fmt: skip
    some = Some(lent.ids, lent.generation, lent.whole)
    kept, flags = KEEP(cache, some)
    assert not np.asarray(flags).any()
    kept = REVOKE(kept, 0, ids, np.zeros_like(ids))
    for c, page in enumerate(PAGES):
        pages, mine = kept.pages.tables[page.component], lent.ids[c, : lent.whole[c]]
        held = np.zeros(page.count, bool)
        held[mine] = True
        np.testing.assert_array_equal(pages.form, np.where(held, table.COMPLETE, table.ABSENT))
        np.testing.assert_array_equal(pages.pins, held)
        for slot in history_slots(SPEC)[page.component]:
            for one, two in ((x.leaf(slot)[:, mine] for x in (kept, cache)),):
                assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    assert all(bool(x.exact) for x in validators.ledgers(kept).values())
    shared, given = ADMIT(kept, 2, lent)
    assert int(given.flags) == 0 and not np.asarray(given.changed).any()
    assert all(bool(x.exact) for x in validators.ledgers(shared).values())
    for c, page in enumerate(PAGES):  # whatever the page table has come to say
        pages = kept.pages.tables[page.component]
        wrong = pages._replace(generation=pages.generation + 1, form=pages.form * 0 + table.CORRUPT)
        damaged = kept.replace(
            pages=kept.pages.replace(tables=kept.pages.tables | {page.component: wrong})
        )
        gone = np.where(np.arange(MOST) < lent.whole[:, None], lent.ids, 10**6)
        for before in (kept, damaged):
            free = DROP(before, gone)
            left = free.pages.tables[page.component]
            mine = lent.ids[c, : lent.whole[c]]
            for field in ("form", "pins", "shares", "owner", "count"):
                assert not np.asarray(getattr(left, field))[mine].any(), field
            assert (np.asarray(left.generation)[mine] > np.asarray(pages.generation)[mine]).all()
            for slot in history_slots(SPEC)[page.component]:
                if jnp.issubdtype(free.leaf(slot).dtype, jnp.floating):
                    assert jnp.isnan(free.leaf(slot)[:, mine]).all(), slot.path
    free = DROP(kept, gone)
    assert all(bool(x.exact) and int(x.owned) == 0 for x in validators.ledgers(free).values())
    _, flags = KEEP(free, some)
    assert (np.asarray(flags)[lent.whole > 0] != 0).all()


@pytest.mark.full
def test_one_program_for_all() -> None:
    assert all(x._cache_size() <= 2 for x in (ADMIT, SETTLE, FAIL, REVOKE))
