"""Validators at use: every fault of a page has its bit, in its component and row alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.contract import History, LayerSpec, Leaf
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages import validate as at_use
from hetero_kv.pages.layout import Paging, history_slots
from hetero_kv.state import Cache
from tests.hetero_kv import synthetic, validators
from tests.hetero_kv.pages import convert

SPEC = synthetic.everything()
CAPACITY, ROWS = 48, 3
TOKENS = np.arange(CAPACITY) * 5 % 11
NAMES = ["csa entries", "csa index keys", "nsa entries", "full kv"]
CHECK = jax.jit(functools.partial(at_use.check, SPEC))
DEEP = jax.jit(functools.partial(at_use.check, SPEC, finite=True, sealed=True))
SEAL = jax.jit(functools.partial(paged.seal, SPEC))
ONES = np.ones(ROWS, np.int32)
LENGTH = 29  # of row 1, which the faults are in


@functools.cache
def standing(*lengths: int) -> Cache:
    cache = synthetic.empty(SPEC, batch=ROWS, capacity=CAPACITY)
    for row, length in enumerate(lengths):
        cache = synthetic.advance(SPEC, cache, row, TOKENS + row, length)
    paging = Paging.of(SPEC, ROWS, CAPACITY, span={"full kv": 4, "csa entries": 16})
    return convert.into_pages(SPEC, cache, paging, (2, 0, 1))


@functools.cache
def sealed() -> Cache:
    cache, flags = SEAL(standing(40, LENGTH, 8), 1)
    assert int(flags) == 0
    return cache


def with_pages(cache: Cache, name: str, **fields) -> Cache:
    """The table of a component with entries changed: field=(index, value)."""
    pages = cache.pages.tables[name]
    new = {f: getattr(pages, f).at[index].set(value) for f, (index, value) in fields.items()}
    tables = cache.pages.tables | {name: pages._replace(**new)}
    return cache.replace(pages=cache.pages.replace(tables=tables))


def found(verdict: validate.Verdict, row: int = 1) -> set[str]:
    """What is wrong with a row; the others must be fine."""
    others = [r for r in range(ROWS) if r != row]
    assert np.asarray(verdict.ok)[others].all()
    assert not np.asarray(verdict.bits)[others].any()
    return set(validate.describe(SPEC, verdict, row))


@pytest.mark.parametrize("lengths", [(40, 29, 8), (0, 1, 47), (48, 16, 15), (3, 4, 5)])
def test_true_state_passes(lengths: tuple[int, ...]) -> None:
    cache = standing(*lengths)
    for row in range(ROWS):
        cache, flags = SEAL(cache, row)
        assert int(flags) == 0
    expected, room = (
        validators.expect(cache),
        np.asarray([min(5, CAPACITY - n) for n in lengths], np.int32),
    )
    for verdict in (CHECK(cache, expected, room), DEEP(cache, expected, room)):
        assert verdict.ok.all() and not verdict.bits.any()
        assert verdict.bits.shape == (ROWS, len(validate.components(SPEC)))


@pytest.mark.parametrize("name", NAMES)
def test_faults_of_pages(name: str) -> None:
    cache = sealed()
    expected, pages, page = (
        validators.expect(cache),
        cache.pages.tables[name],
        cache.pages.paging.page(name),
    )
    last = page.pages_for(LENGTH) - 1
    first_id, last_id = int(pages.table[1, 0]), int(pages.table[1, last])
    joint = "lengths: joint"
    stale = {f"{name}: generation", joint}
    other = {f"{name}: owner", joint}
    gone = {f"{name}: missing", *stale, *other}
    cases = [
        (dict(generation=(first_id, 5)), stale),
        (dict(generation=(last_id, 5)), stale),
        (dict(owner=(first_id, 5)), other),
        (dict(count=(first_id, page.entries - 1)), {f"{name}: valid", joint}),
        (dict(form=(first_id, table.ABSENT)), {f"{name}: missing", joint}),
        (dict(form=(first_id, table.LOADING)), {f"{name}: missing", joint}),
        (dict(form=(first_id, table.CORRUPT)), {f"{name}: missing", joint}),
        (dict(table=((1, 0), pages.size)), gone),
        (dict(table=((1, 0), -1)), gone),
        (dict(table=((1, 0), 2**31 - 1)), gone),
        (dict(table=((1, 0), -(2**31))), gone),
        # Another row's page: as complete, but not the one that was leased.
        (dict(table=((1, 0), int(pages.table[0, 0]))), None),
    ]
    for fields, want in cases:
        verdict = CHECK(with_pages(cache, name, **fields), expected, ONES)
        have = found(verdict)
        if want is None:
            assert other <= have, fields
        else:
            assert have - {f"{name}: write"} == want, fields
        assert not verdict.ok[1]
    assert CHECK._cache_size() <= 2  # jitted for [R] and, elsewhere, without a lease


@pytest.mark.parametrize("name", NAMES)
def test_what_is_to_be_written_must_be_the_rows_own(name: str) -> None:
    cache = sealed()
    expected, pages, page = (
        validators.expect(cache),
        cache.pages.tables[name],
        cache.pages.paging.page(name),
    )
    count = np.asarray([0, 40 - LENGTH, 0], np.int32)
    column = page.pages_for(LENGTH)  # the first page that is still empty
    index = int(pages.table[1, column])
    for fields in (
        dict(form=(index, table.COMPLETE)),
        dict(shares=(index, 2)),
        dict(owner=(index, 7)),
        dict(table=((1, column), pages.size)),
        dict(table=((1, column), -1)),
    ):
        changed = with_pages(cache, name, **fields)
        have = found(CHECK(changed, expected, count))
        assert f"{name}: write" in have, fields
        # Not written and not read: none of its business.
        assert not found(CHECK(changed, expected, count * 0)), fields
    # A row without the right to write.
    nobody = cache.replace(pages=cache.pages.replace(owner=cache.pages.owner.at[1].set(0)))
    assert f"{name}: write" in found(CHECK(nobody, expected, count))
    quiet = jax.jit(functools.partial(at_use.check, SPEC, writes=False))
    assert not found(quiet(nobody, expected, count))


def test_evidence_and_joint_state() -> None:
    cache, expected = sealed(), validators.expect(sealed())
    slot = next(x for x in SPEC.slots() if x.name == "keys_count")
    changed = synthetic.edit(cache, slot, (0, 1), 1, add=True)
    have = found(CHECK(changed, expected, ONES))
    assert have == {"csa index keys: count", "lengths: joint"}
    longer = cache.replace(length=cache.length.at[1].set(CAPACITY + 1))
    assert "lengths: length" in found(CHECK(longer, expected, ONES * 0))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_pages(name: str) -> None:
    cache, expected = sealed(), validators.expect(sealed())
    pages, page = cache.pages.tables[name], cache.pages.paging.page(name)
    for slot in history_slots(SPEC)[name]:
        first = (slot.repeats - 1, int(pages.table[1, 0]), page.entries - 1)
        changed = synthetic.edit(cache, slot, first, 1, add=True)
        assert not found(CHECK(changed, expected, ONES))
        assert found(DEEP(changed, expected, ONES)) == {f"{name}: checksum", "lengths: joint"}
        count = int(page.contract.count(LENGTH))
        column, row = divmod(count - 1, page.entries)
        live = (0, int(pages.table[1, column]), row)
        have = found(DEEP(synthetic.edit(cache, slot, live, np.nan), expected, ONES))
        assert f"{name}: nonfinite" in have
        column, row = divmod(count, page.entries)
        dead = (0, int(pages.table[1, column]), row)
        assert not found(DEEP(synthetic.edit(cache, slot, dead, np.nan), expected, ONES))


def test_rows_that_are_not_asked_about_pass() -> None:
    cache = sealed().replace(length=sealed().length + 1)
    rows = np.array([False, True, False])
    verdict = CHECK(cache, validators.expect(cache), ONES, rows)
    assert verdict.ok.tolist() == [True, False, True] and not verdict.bits[0].any()


def test_one_program_under_vmap_and_scan() -> None:
    caches = [standing(40, 29, 8), standing(3, 4, 5)]
    caches[1] = with_pages(caches[1], "full kv", form=(slice(None), table.CORRUPT))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    check = functools.partial(at_use.check, SPEC)
    want = [[True] * 3, [False] * 3]
    assert jax.jit(jax.vmap(check))(stacked).ok.tolist() == want
    _, ok = jax.jit(lambda x: jax.lax.scan(lambda c, one: (c, check(one).ok), 0, x))(stacked)
    assert ok.tolist() == want


def test_without_pages_there_is_the_evidence() -> None:
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC, ROWS, CAPACITY), 1, TOKENS, LENGTH)
    assert CHECK(cache).ok.all()
    wrong = cache.replace(length=cache.length.at[1].add(1))
    assert "lengths: joint" in found(CHECK(wrong))


def test_static_validators_raise_while_tracing() -> None:
    cache = sealed()
    at_use.check_static(SPEC, cache, at_use.abi_code(SPEC, cache))
    with pytest.raises(ValueError, match="made for pages of layout 0x00000007"):
        at_use.check_static(SPEC, cache, 7)

    slot = history_slots(SPEC)["full kv"][0]
    other = cache.with_leaves({slot: cache.leaf(slot).astype(jnp.float16)})
    with pytest.raises(ValueError, match="pages are float16"):
        jax.eval_shape(lambda c: at_use.check(SPEC, c), other)
    other = cache.with_leaves({slot: cache.leaf(slot)[:, 1:]})
    with pytest.raises(ValueError, match="declared are"):
        jax.eval_shape(lambda c: at_use.check(SPEC, c), other)
    with pytest.raises(ValueError, match="not of 64"):
        at_use.check_static(SPEC, cache.replace(capacity=64))
    with pytest.raises(ValueError, match="block tables"):
        at_use.check_static(SPEC, cache.replace(length=cache.length[:2]))
    coarse = dataclasses.replace(SPEC, block=24)
    with pytest.raises(ValueError, match="do not align with blocks of 24"):
        at_use.check_static(coarse, cache)

    leaf = Leaf(contract=History(4), component="entries", width=(3,), align=16)
    spec = synthetic.only(LayerSpec("x", (("entries", leaf),)))
    made = paged.init(spec, 1, Paging.of(spec, 1, 16))
    with pytest.raises(ValueError, match="rows of 12 bytes do not lie at multiples of 16"):
        at_use.check_static(spec, made)


def test_the_abi_code_is_of_the_layout_alone() -> None:
    def code(spec=SPEC, batch: int = ROWS, **sizes) -> int:
        return at_use.abi_code(
            spec,
            jax.eval_shape(lambda: paged.init(spec, batch, Paging.of(spec, batch, 32, **sizes))),
        )

    assert code() == code(batch=5) == code(count=77)
    other = synthetic.only(synthetic.FULL)
    assert len({code(), code(span=16), code(span={"full kv": 4}), code(other)}) == 4
