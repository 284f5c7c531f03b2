"""Rows of a paged cache: reserve, release, seal and share, all components or none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import state
from hetero_kv.contract import Evidence, History
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages.layout import Paging, history_slots
from hetero_kv.state import Cache
from tests.hetero_kv import synthetic, validators
from tests.hetero_kv.pages import convert
from tests.hetero_kv.pages.convert import owner, reserve

SPEC = synthetic.everything()
CAPACITY, ROWS = 48, 3
SPANS = {"full kv": 4, "csa entries": 16}
TOKENS = np.arange(CAPACITY) * 5 % 11
RELEASE = jax.jit(functools.partial(paged.release, SPEC))
POISON = jax.jit(functools.partial(paged.release, SPEC, poison=True))
SEAL = jax.jit(functools.partial(paged.seal, SPEC))
SHARE = jax.jit(functools.partial(paged.share_prefix, SPEC))
SUMS = jax.jit(functools.partial(paged.checksums, SPEC), static_argnums=1)


def paging(**sizes) -> Paging:
    return Paging.of(SPEC, ROWS, CAPACITY, **({"span": SPANS} | sizes))


@functools.cache
def standing(*lengths: int) -> Cache:
    """A paged cache whose rows were run to these lengths; only those have pages."""
    cache = synthetic.empty(SPEC, batch=ROWS, capacity=CAPACITY)
    for row, length in enumerate(lengths):
        cache = synthetic.advance(SPEC, cache, row, TOKENS + row, length)
    rows = tuple(reversed(range(len(lengths))))  # so that no row has the pages of its number
    return convert.into_pages(SPEC, cache, paging(), rows)


def flagged(flags: jax.Array) -> set[str]:
    return {name for name, bit in table.FLAGS.items() if int(flags) & bit}


def check_books(cache: Cache) -> None:
    for name, books in validators.ledgers(cache).items():
        assert bool(books.exact), name
        total = int(books.free + books.owned + books.shared)
        assert total == cache.pages.paging.page(name).count, name


def assert_equal(one: Cache, two: Cache) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.array(a).view(np.uint8), np.array(b).view(np.uint8))


def test_an_empty_cache() -> None:
    cache, shapes = paged.init(SPEC, ROWS, paging(), True), paged.abstract(SPEC, ROWS, paging())
    assert jax.tree.structure(cache) == jax.tree.structure(shapes)
    for have, want in zip(jax.tree.leaves(cache), jax.tree.leaves(shapes), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)  # or donation would give one away twice
    assert cache.capacity == CAPACITY and cache.batch == ROWS
    for slot in SPEC.slots():
        if isinstance(slot.leaf.contract, History):
            page = paging().page(slot.leaf.component)
            assert cache.leaf(slot).shape[:3] == (slot.repeats, page.count, page.entries)
            assert np.isnan(np.asarray(cache.leaf(slot), np.float32)).all()
    check_books(cache)
    other = Paging.of(synthetic.only(synthetic.FULL), ROWS, CAPACITY)
    with pytest.raises(ValueError, match="the paging is of"):
        paged.init(SPEC, ROWS, other)


def test_reserving_more_keeps_what_is_there() -> None:
    cache = paged.init(SPEC, ROWS, paging())
    cache, flags = reserve(cache, 1, 9, owner(1))
    assert int(flags) == 0
    before = {name: np.asarray(x.table[1]) for name, x in cache.pages.tables.items()}
    cache, flags = reserve(cache, 1, 40, owner(1))
    assert int(flags) == 0
    for name, pages in cache.pages.tables.items():
        page, row = cache.pages.paging.page(name), np.asarray(pages.table[1])
        assert (row != pages.size).sum() == page.pages_for(40)
        held = before[name] != pages.size
        assert held.sum() == page.pages_for(9)
        np.testing.assert_array_equal(row[held], before[name][held])
    again, flags = reserve(cache, 1, 20, owner(1))  # has them already
    assert int(flags) == 0
    assert_equal(again, cache)
    check_books(cache)


@pytest.mark.parametrize(
    "row, tokens, who, why",
    [
        (-1, 8, 5, "bad_row"),
        (ROWS, 8, 5, "bad_row"),
        (-(2**31), 8, 5, "bad_row"),
        (2, 2**31 - 1, 5, "bad_range"),
        (2, -1, 5, "bad_range"),
        (2, 8, 1, "bad_owner"),  # row 0's
        (0, 8, 2, "bad_owner"),  # row 0 is another's
        (2, CAPACITY, 5, "no_room"),
    ],
)
def test_all_components_or_none(row: int, tokens: int, who: int, why: str) -> None:
    small = paging(count={"full kv": 14})  # 12 pages of 4 tokens are one row
    cache = paged.init(SPEC, ROWS, small)
    cache, flags = reserve(cache, 0, 8, owner(1))
    cache, flags = reserve(cache, 1, 24, owner(7))
    assert int(flags) == 0
    after, flags = reserve(cache, row, tokens, owner(who))
    assert why in flagged(flags)
    assert_equal(after, cache)
    after, flags = reserve(cache, 2, 8, np.zeros(2, np.uint32))
    assert flagged(flags) == {"bad_owner"}
    assert_equal(after, cache)


@pytest.mark.parametrize("length", [0, 3, 8, 21, CAPACITY])
def test_release_gives_all_back_and_poisons(length: int) -> None:
    cache = standing(40, length, 17)
    after, flags = POISON(cache, 1)
    assert int(flags) == 0
    check_books(after)
    assert list(after.length) == [40, 0, 17]
    assert int(after.pages.owner[1].sum()) == 0
    for name, pages in after.pages.tables.items():
        gone = np.asarray(cache.pages.tables[name].table[1])
        gone = gone[gone != pages.size]
        assert (np.asarray(pages.form)[gone] == table.ABSENT).all()
        assert (np.asarray(pages.generation)[gone] == 1).all()
        for slot in history_slots(SPEC)[name]:
            assert np.isnan(np.asarray(after.leaf(slot), np.float32)[:, gone]).all()
    rows = convert.contiguous(SPEC, after)
    for row in (0, 2):
        assert not synthetic.wrong_rows(SPEC, rows, row, TOKENS + row)
    again, flags = RELEASE(after, 1)
    assert flagged(flags) == {"not_held"}
    assert_equal(again, after)
    for bad in (-1, ROWS, 2**31 - 1, -(2**31)):
        again, flags = RELEASE(after, bad)
        assert "bad_row" in flagged(flags)
        assert_equal(again, after)
    kept, _ = RELEASE(cache, 1)
    assert_equal(kept.pages, after.pages)


def test_seal_completes_what_is_full_and_notices_bytes() -> None:
    cache, flags = SEAL(standing(40, 21, 0), 1)
    assert int(flags) == 0
    check_books(cache)
    for name, pages in cache.pages.tables.items():
        page = cache.pages.paging.page(name)
        full = int(page.contract.count(21)) // page.entries
        form = np.asarray(pages.column("form", pages.table[1]))
        assert form.tolist()[:full] == [table.COMPLETE] * full
        assert (form[full:] != table.COMPLETE).all()
        sums = np.asarray(pages.column("checksum", pages.table[1]))[:full]
        assert len(set(sums.tolist())) == full and (sums != 0).all()
        again = SUMS(cache, name, pages.table[1])
        np.testing.assert_array_equal(again[:full], sums)
        for slot in history_slots(SPEC)[name]:
            index = (slot.repeats - 1, pages.table[1, 0], page.entries - 1, ..., 0)
            changed = SUMS(synthetic.edit(cache, slot, index, 1, add=True), name, pages.table[1])
            assert (np.asarray(changed)[:full] != sums).tolist() == [True] + [False] * (full - 1)
    again, flags = SEAL(cache, 1)
    assert int(flags) == 0
    assert_equal(again, cache)


def test_seal_refuses_short_pages_and_foreign_ones() -> None:
    cache = standing(40, 21, 0)
    longer = cache.replace(length=cache.length.at[1].set(40))
    after, flags = SEAL(longer, 1)
    assert flagged(flags) == {"not_complete"}
    assert_equal(after, longer)
    foreign = cache.replace(pages=cache.pages.replace(owner=cache.pages.owner.at[1].set(9)))
    after, flags = SEAL(foreign, 1)
    assert flagged(flags) == {"bad_owner"}
    assert_equal(after, foreign)
    keys = {x.component: np.full((x.columns, 2), 77, np.uint32) for x in paging().pages}
    cache, flags = SEAL(cache, 1, keys)
    assert int(flags) == 0
    pages = cache.pages.tables["full kv"]
    assert (np.asarray(pages.owner)[np.asarray(pages.table[1, :5])] == 77).all()


@pytest.mark.parametrize("length", [0, 8, 16, 23, 32, 40])
def test_a_shared_prefix_reads_as_the_original(length: int) -> None:
    cache, flags = SEAL(standing(40), 0)
    free = {name: int(x.free) for name, x in validators.ledgers(cache).items()}
    cache, flags = SHARE(cache, 0, 2, length, CAPACITY, owner(3))
    assert int(flags) == 0, flagged(flags)
    check_books(cache)
    assert list(cache.length) == [40, 0, length]
    rows = convert.contiguous(SPEC, cache)
    assert not synthetic.wrong_rows(SPEC, rows, 0, TOKENS)
    wrong = synthetic.wrong_rows(SPEC, rows, 2, TOKENS)
    kinds = {x.path: x.leaf.contract for x in SPEC.slots()}
    named = [x.split("[")[0] for x in wrong]
    assert not [x for x in named if isinstance(kinds[x], History)]
    counts = [x for x in named if isinstance(kinds[x], Evidence) and kinds[x].kind == "count"]
    assert not counts
    for name, books in validators.ledgers(cache).items():
        page = cache.pages.paging.page(name)
        whole = int(page.contract.count(length)) // page.entries
        assert int(books.shared) == whole
        assert free[name] - int(books.free) == page.pages_for(CAPACITY) - whole
    # Either may go first.
    for first, second in ((0, 2), (2, 0)):
        one, _ = POISON(cache, first)
        if first == 0:
            named = [
                x.split("[")[0]
                for x in synthetic.wrong_rows(SPEC, convert.contiguous(SPEC, one), 2, TOKENS)
            ]
            assert not [x for x in named if isinstance(kinds[x], History)]
        none, flags = POISON(one, second)
        assert int(flags) == 0
        check_books(none)
        assert all(int(x.free) == len(none.pages.tables[n].form) for n, x in
                   validators.ledgers(none).items())  # fmt: skip


@pytest.mark.parametrize(
    "source, row, length, tokens, why",
    [
        (0, 0, 16, 40, {"bad_row", "occupied", "bad_owner"}),
        (0, 1, 16, 40, {"occupied", "bad_owner"}),
        (0, 2, 41, 48, {"bad_range", "not_complete"}),  # longer than the source
        (0, 2, 16, 8, {"bad_range"}),
        (0, 2, 16, CAPACITY + 1, {"bad_range"}),
        (1, 2, 16, 40, {"not_complete"}),  # not sealed
        (-1, 2, 16, 40, {"bad_range", "bad_id"}),
        (ROWS, 2, 16, 40, {"bad_range", "bad_id"}),
        (0, -1, 16, 40, {"bad_row"}),
        (0, ROWS, 16, 40, {"bad_row"}),
    ],
)
def test_sharing_what_cannot_be_shared(source, row, length, tokens, why) -> None:
    cache, _ = SEAL(standing(40, 40), 0)
    after, flags = SHARE(cache, source, row, length, tokens, owner(3))
    found = flagged(flags)
    assert found and found <= why | {"not_complete"} and found & why, found
    assert_equal(after, cache)


def test_random_requests_keep_the_books(seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    cache = paged.init(SPEC, ROWS, paging(count={"csa index keys": 9}))
    refused = 0
    for n in range(60):
        row, other = rng.integers(-1, ROWS + 1, 2)
        kind = rng.integers(4)
        if kind == 0:
            cache, flags = reserve(cache, row, rng.integers(0, CAPACITY + 2), owner(n + 1))
        elif kind == 1:
            cache, flags = RELEASE(cache, row)
        elif kind == 2:
            cache, flags = SHARE(cache, row, other, rng.integers(0, 20), 24, owner(n + 1))
        else:  # as if the row had run as far as its pages go
            if 0 <= row < ROWS and int(cache.pages.owner[row].sum()):
                tables, length = {}, CAPACITY
                for name, pages in cache.pages.tables.items():
                    page = paging().page(name)
                    held = int((np.asarray(pages.table)[row] != pages.size).sum())
                    length = min(length, held * page.span)
                for name, pages in cache.pages.tables.items():
                    page, count = paging().page(name), np.array(pages.count)
                    left = int(page.contract.count(length)) - np.arange(page.columns) * page.entries
                    for i, held in zip(np.asarray(pages.table)[row], left, strict=True):
                        if i != pages.size and int(pages.form[i]) == table.WRITING:
                            count[i] = min(max(held, 0), page.entries)
                    tables[name] = pages._replace(count=jnp.asarray(count))
                cache = cache.replace(
                    length=cache.length.at[row].set(length),
                    pages=cache.pages.replace(tables=tables),
                )
            cache, flags = SEAL(cache, row)
        refused += int(flags) != 0
        check_books(cache)
    assert 10 < refused < 55
    for row in range(ROWS):
        cache, _ = RELEASE(cache, row)
    check_books(cache)
    for pages in cache.pages.tables.values():
        assert not pages.form.any() and pages.generation.max() > 1
    assert all(x._cache_size() <= 3 for x in (RELEASE, SEAL, SHARE))


def test_reset_row_leaves_pages_alone() -> None:
    cache = standing(40, 21, 0)
    after = state.reset_row(SPEC, cache, 1)
    assert_equal(after.pages, cache.pages)
    assert list(after.length) == [40, 0, 0]
