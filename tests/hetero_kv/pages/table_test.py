"""The page table against a simple model of it in Python, and at the limits of its ids."""

import copy
import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.pages import table

PAGES, ROWS, COLUMNS, ENTRIES = 7, 3, 4, 5
LOW, HIGH = -(2**31), 2**31 - 1

OPS = {
    "alloc": jax.jit(table.alloc),
    "share": jax.jit(table.share),
    "pin": jax.jit(table.pin),
    "unpin": jax.jit(table.unpin),
    "release": jax.jit(table.release),
    "seal": jax.jit(lambda t, row, owner, filled, sums: table.seal(
        t, row, owner, filled, ENTRIES, sums
    )),
    "ledger": jax.jit(table.ledger),
}  # fmt: skip


def digest(owner: int) -> np.ndarray:
    return np.array([owner, owner], np.uint32)


def i32(x) -> np.ndarray:
    return np.asarray(x, np.int32)


@dataclasses.dataclass
class Page:
    form: int = table.ABSENT
    generation: int = 0
    owner: int = 0
    count: int = 0
    pins: int = 0
    checksum: int = 0


class Books:
    """The same table in plain Python. Operations return whether they were done."""

    def __init__(self):
        self.pages = [Page() for _ in range(PAGES)]
        self.rows = [[PAGES] * COLUMNS for _ in range(ROWS)]

    def shares(self, i: int) -> int:
        return self.pages[i].pins + sum(row.count(i) for row in self.rows)

    def fits(self, row: int, first: int, count: int) -> bool:
        inside = 0 <= row < ROWS and first >= 0 and count >= 0 and first + count <= COLUMNS
        return inside and all(x == PAGES for x in self.rows[row][first : first + count])

    def alloc(self, row: int, first: int, count: int, owner: int) -> bool:
        free = [i for i in range(PAGES) if not self.shares(i)]
        if not self.fits(row, first, count) or count > len(free) or not owner:
            return False
        for column, i in enumerate(free[:count], first):
            page = self.pages[i]
            page.form, page.owner, page.count = table.WRITING, owner, 0
            self.rows[row][column] = i
        return True

    def known(self, ids: list[int], generations: list[int]) -> bool:
        return all(
            0 <= i < PAGES and self.pages[i].generation == generation
            for i, generation in zip(ids, generations, strict=True)
        )

    def complete(self, ids: list[int], generations: list[int]) -> bool:
        good = self.known(ids, generations)
        return good and all(self.pages[i].form == table.COMPLETE for i in ids)

    def share(self, row: int, first: int, ids: list[int], generations: list[int]) -> bool:
        if not self.fits(row, first, len(ids)) or not self.complete(ids, generations):
            return False
        self.rows[row][first : first + len(ids)] = ids
        return True

    def pin(self, ids: list[int], generations: list[int]) -> bool:
        if not self.complete(ids, generations):
            return False
        for i in ids:
            self.pages[i].pins += 1
        return True

    def unpin(self, ids: list[int], generations: list[int]) -> bool:
        held = all(self.pages[i].pins >= n for i, n in Counter(ids).items() if 0 <= i < PAGES)
        if not self.known(ids, generations) or not held:
            return False
        for i in ids:
            self.pages[i].pins -= 1
        self.free(ids)
        return True

    def release(self, row: int, first: int) -> bool:
        if not (0 <= row < ROWS and 0 <= first <= COLUMNS):
            return False
        ids = [i for i in self.rows[row][first:] if i != PAGES]
        self.rows[row][first:] = [PAGES] * (COLUMNS - first)
        self.free(ids)
        return bool(ids)

    def free(self, ids: list[int]) -> None:
        for i in set(ids):
            if not self.shares(i):
                self.pages[i] = Page(generation=self.pages[i].generation + 1)

    def seal(self, row: int, owner: int, filled: int, sums: list[int]) -> bool:
        if not (0 <= row < ROWS and 0 <= filled <= COLUMNS):
            return False
        ids = self.rows[row][:filled]
        if PAGES in ids:
            return False
        new = [i for i in ids if self.pages[i].form == table.WRITING]
        if any(self.pages[i].count != ENTRIES or self.pages[i].owner != owner for i in new):
            return False
        for i, value in zip(ids, sums, strict=False):
            if i in new:
                self.pages[i].form, self.pages[i].checksum = table.COMPLETE, value
        return True

    def check(self, real: table.PageTable) -> None:
        for field in ("form", "generation", "count", "pins", "checksum"):
            want = [getattr(x, field) for x in self.pages]
            np.testing.assert_array_equal(getattr(real, field), want, err_msg=field)
        np.testing.assert_array_equal(real.owner, [[x.owner] * 2 for x in self.pages])
        shares = [self.shares(i) for i in range(PAGES)]
        np.testing.assert_array_equal(real.shares, shares)
        np.testing.assert_array_equal(real.table, self.rows)
        books = OPS["ledger"](real)
        assert bool(books.exact)
        assert int(books.free + books.owned + books.shared) == PAGES
        assert int(books.free) == shares.count(0) and int(books.owned) == shares.count(1)


NUMBERS = st.one_of(st.integers(0, COLUMNS), st.sampled_from([-1, COLUMNS + 1, LOW, HIGH]))
ROW = st.one_of(st.integers(0, ROWS - 1), st.sampled_from([-1, ROWS, LOW, HIGH]))
OWNER = st.integers(0, 2)
COMMANDS = st.one_of(
    st.tuples(st.just("alloc"), ROW, NUMBERS, NUMBERS, OWNER),
    st.tuples(st.just("fill"), st.integers(0, ROWS - 1)),
    st.tuples(st.just("seal"), ROW, OWNER, NUMBERS),
    st.tuples(st.just("release"), ROW, NUMBERS),
    st.tuples(
        st.sampled_from(["share", "pin", "unpin"]),
        ROW,
        NUMBERS,
        st.lists(
            st.one_of(st.integers(0, PAGES - 1), st.sampled_from([-1, PAGES, LOW, HIGH])),
            max_size=COLUMNS,
        ),
        st.booleans(),  # whether generations are what they were
    ),
    st.tuples(st.just("copy"), ROW, st.integers(0, ROWS - 1), st.integers(0, COLUMNS)),
)


@settings(max_examples=60)
@given(st.lists(COMMANDS, max_size=25))
def test_any_history_leaves_the_table_that_a_simple_model_has(commands) -> None:
    real, books = table.empty(PAGES, ROWS, COLUMNS), Books()
    for n, (name, *args) in enumerate(commands):
        sums = [n * COLUMNS + i for i in range(COLUMNS)]
        if name == "fill":  # what the model's calls do
            ids = [i for i in books.rows[args[0]] if i != PAGES]
            ids = [i for i in ids if books.pages[i].form == table.WRITING]
            for i in ids:
                books.pages[i].count = ENTRIES
            real = real._replace(count=jnp.array([x.count for x in books.pages], jnp.int32))
            continue
        if name == "copy":  # a row shares the first pages of another one
            row, source, count = args
            ids = books.rows[source][:count]
            name, args = "share", (row, 0, ids, True)
        if name == "alloc":
            row, first, count, owner = args
            done = books.alloc(row, first, count, owner)
            real, flags = OPS[name](real, i32(row), i32(first), i32(count), digest(owner))
        elif name == "seal":
            row, owner, filled = args
            done = books.seal(row, owner, filled, sums)
            real, flags = OPS[name](
                real, i32(row), digest(owner), i32(filled), np.asarray(sums, np.uint32)
            )
        elif name == "release":
            row, first = args
            done = books.release(row, first)
            real, flags, _ = OPS[name](real, i32(row), i32(first))
        else:
            row, first, ids, right = args
            now = [books.pages[i].generation if 0 <= i < PAGES else 0 for i in ids]
            then = [x if right else x + 1 for x in now]
            padded = i32((ids + [0] * COLUMNS)[:COLUMNS])
            generations = i32((then + [0] * COLUMNS)[:COLUMNS])
            if name == "share":
                done = books.share(row, first, ids, then)
                real, flags = OPS[name](
                    real, i32(row), i32(first), padded, i32(len(ids)), generations
                )
            else:
                done = getattr(books, name)(ids, then)
                real, flags = OPS[name](real, padded, i32(len(ids)), generations)[:2]
        assert (int(flags) == 0) == done, (name, args, int(flags))
        books.check(real)
    assert all(op._cache_size() <= 1 for op in OPS.values())


def filled(rows: int = 1) -> table.PageTable:
    """Row 0 has sealed pages in its first two columns and one to write; others nothing."""
    pages, _ = OPS["alloc"](table.empty(PAGES, ROWS, COLUMNS), i32(0), i32(0), i32(3), digest(1))
    pages = pages._replace(count=pages.count.at[:2].set(ENTRIES))
    pages, flags = OPS["seal"](pages, i32(0), digest(1), i32(2), np.arange(4, dtype=np.uint32))
    assert int(flags) == 0
    return pages


def flagged(flags: jax.Array) -> set[str]:
    return {name for name, bit in table.FLAGS.items() if int(flags) & bit}


def test_flags_say_why() -> None:
    pages = filled()
    alloc, share, zeros = OPS["alloc"], OPS["share"], np.zeros(COLUMNS, np.int32)
    cases = {
        "no_room": alloc(pages, i32(1), i32(0), i32(5), digest(2))[1],
        "bad_row": alloc(pages, i32(-1), i32(0), i32(1), digest(2))[1],
        "bad_range": alloc(pages, i32(1), i32(HIGH), i32(HIGH), digest(2))[1],
        "occupied": alloc(pages, i32(0), i32(2), i32(1), digest(2))[1],
        "bad_owner": alloc(pages, i32(1), i32(0), i32(1), digest(0))[1],
        "not_complete": share(pages, i32(1), i32(0), i32([2, 0, 0, 0]), i32(1), zeros)[1],
        "bad_id": share(pages, i32(1), i32(0), i32([-1, 0, 0, 0]), i32(1), zeros)[1],
        "stale": share(pages, i32(1), i32(0), i32([0, 0, 0, 0]), i32(1), zeros - 1)[1],
        "not_held": OPS["release"](pages, i32(1), i32(0))[1],
    }
    for name, flags in cases.items():
        assert name in flagged(flags), name
    assert set(cases) == set(table.FLAGS)


def test_released_twice() -> None:
    pages, flags, freed = OPS["release"](filled(), i32(0), i32(0))
    assert int(flags) == 0 and list(np.flatnonzero(freed)) == [0, 1, 2]
    again, flags, freed = OPS["release"](pages, i32(0), i32(0))
    assert flagged(flags) == {"not_held"} and not freed.any()
    for one, two in zip(pages, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert list(pages.generation) == [1, 1, 1, 0, 0, 0, 0]


def test_a_page_lives_as_long_as_anyone_refers_to_it() -> None:
    pages, now = filled(), np.zeros(COLUMNS, np.int32)
    pages, flags = OPS["share"](pages, i32(2), i32(0), i32([0, 1, 0, 0]), i32(2), now)
    assert int(flags) == 0
    pages, flags = OPS["pin"](pages, i32([0, 0, 0, 0]), i32(1), now)
    pages, flags, freed = OPS["release"](pages, i32(0), i32(0))
    assert int(flags) == 0 and list(np.flatnonzero(freed)) == [2]
    pages, flags, freed = OPS["release"](pages, i32(2), i32(0))
    assert list(np.flatnonzero(freed)) == [1]
    pages, flags, freed = OPS["unpin"](pages, i32([0, 0, 0, 0]), i32(1), now)
    assert int(flags) == 0 and list(np.flatnonzero(freed)) == [0]
    assert int(OPS["ledger"](pages).free) == PAGES


@pytest.mark.parametrize("where", range(4))
def test_only_own_unshared_open_pages_are_writable(where: int) -> None:
    pages = filled()
    owners = np.stack([digest(1), digest(2), digest(0)])
    got = np.asarray(table.writable(pages, owners))
    assert got[0].tolist() == [PAGES, PAGES, 2, PAGES] and (got[1:] == PAGES).all()
    # A page of row 0 in the table of another row, or ids that are no pages: nobody may write.
    wrong = [2, -1, LOW, HIGH][where]
    got = table.writable(pages._replace(table=pages.table.at[1, 0].set(wrong)), owners)
    assert (np.asarray(got)[1] == PAGES).all()
    got = table.writable(pages._replace(shares=pages.shares.at[2].set(2)), owners)
    assert (np.asarray(got) == PAGES).all()


@pytest.mark.parametrize(
    "change",
    [
        {"shares": (0, 2)},
        {"pins": (0, 1)},
        {"form": (5, table.WRITING)},
        {"form": (0, table.ABSENT)},
        {"owner": (6, 1)},
        {"owner": (1, 0)},
        {"count": (4, 1)},
        {"table": ((1, 1), 0)},
        {"table": ((1, 1), -1)},
        {"table": ((1, 1), PAGES + 1)},
    ],
)
def test_the_ledger_notices(change: dict) -> None:
    pages = filled()
    assert bool(OPS["ledger"](pages).exact)
    (field, (index, value)) = next(iter(change.items()))
    wrong = copy.copy(getattr(pages, field)).at[index].set(value)
    assert not bool(OPS["ledger"](pages._replace(**{field: wrong})).exact)


def test_operations_trace_under_vmap_and_scan() -> None:
    def life(pages: table.PageTable, row: jax.Array):
        pages, one = table.alloc(pages, row, 0, 2, jnp.array([1, 1], jnp.uint32))
        pages, two, _ = table.release(pages, row)
        return pages, (one, two)

    _, flags = jax.lax.scan(life, filled(), jnp.array([1, 2, 0], jnp.int32))
    assert flags[0].tolist() == [0, 0, table.OCCUPIED] and flags[1].tolist() == [0, 0, 0]
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), filled())
    _, (one, _) = jax.vmap(life)(stacked, jnp.array([1, -1], jnp.int32))
    assert one.tolist() == [0, table.BAD_ROW]
