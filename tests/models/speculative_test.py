"""Drafts: whatever was rejected leaves no trace, for every accepted count, at every boundary."""

import functools

import jax
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.pages import table
from hetero_kv.pages import validate as at_use
from hetero_kv.pages.layout import Paging
from tests.hetero_kv import validators
from tests.hetero_kv.pages import convert
from tests.models import tiny

NAME = "v4"  # windows, tails with overlap, index keys; m = 4 and 8, calls of 16 columns
SIZES = (1, 3, 4, 5, 8, 12, 16)
CHECK = jax.jit(
    functools.partial(at_use.check, tiny.model(NAME)[0].cache_spec), static_argnames="finite"
)


def prefilled(length: int):
    made, params = tiny.model(NAME)
    _, cache = made.prefill(params, tiny.tokens()[:, :length], tiny.empty(made, poison=True))
    return cache


def in_pages(length: int, reserved: int = tiny.CAPACITY):
    """The same on pages: of one entry of the heavy layers, of two or more of the others."""
    made, params = tiny.model(NAME)
    paging = Paging.of(made.cache_spec, tiny.ROWS, tiny.CAPACITY, span=8)
    cache = made.init_paged_cache(tiny.ROWS, tiny.CAPACITY, paging, poison=True)
    for row in (1, 0):
        cache, flags = convert.reserve(cache, row, reserved, convert.owner(row + 1))
        assert int(flags) == 0
    _, cache = made.prefill(params, tiny.tokens()[:, :length], cache)
    return cache


def drafted(cache, size: int, wrong_from: int):
    """Verifies the right tokens up to `wrong_from`, then wrong ones."""
    made, params = tiny.model(NAME)
    at = int(np.asarray(cache.length)[0])
    tokens = tiny.tokens()[:, at : at + size].copy()
    tokens[:, wrong_from:] = (tokens[:, wrong_from:] + 17) % tiny.BASE.vocab_size
    return made.verify(params, tokens, cache)


@pytest.mark.parametrize("length", [13, 16])
@pytest.mark.parametrize("size", SIZES)
def test_rejected_tokens_leave_no_trace(length: int, size: int) -> None:
    made, params = tiny.model(NAME)
    start = prefilled(length)
    for count in range(size + 1):
        _, draft = drafted(tiny.copy(start), size, count)
        cache = made.accept(params, draft, np.full(tiny.ROWS, count))
        want = tiny.copy(start)
        if count:
            logits, draft = drafted(want, count, count)
            want = made.accept(params, draft, np.full(tiny.ROWS, count))
            cold = tiny.forward(NAME)[:, length : length + count]
            np.testing.assert_allclose(logits, cold, atol=2e-4)
        tiny.assert_same_state(made, cache, want)
        np.testing.assert_array_equal(cache.grid_length, start.grid_length)
        if count in (0, size // 2, size):  # and the next tokens come out the same
            got, _ = tiny.decode(NAME, cache, 9)
            again, _ = tiny.decode(NAME, want, 9)
            assert got.tobytes() == again.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("length", [13, 16])
@pytest.mark.parametrize("size", SIZES)
def test_pages_count_what_was_accepted(length: int, size: int) -> None:
    """Bits of a contiguous cache, and a page table as if nothing else had been drafted."""
    made, params = tiny.model(NAME)
    start, rows = in_pages(length), prefilled(length)
    for count in sorted({0, 1, size // 2, size - 1, size}):
        got, draft = drafted(tiny.copy(start), size, count)
        want, plain = drafted(tiny.copy(rows), size, count)
        np.testing.assert_array_equal(got, want)
        counts = np.array([count, max(0, count - 1)])
        cache, plain = made.accept(params, draft, counts), made.accept(params, plain, counts)
        tiny.assert_same_state(made, convert.contiguous(made.cache_spec, cache), plain)
        verdict = CHECK(cache, count=2 * 8 + 1, finite=True)
        assert verdict.ok.all(), [validate.describe(made.cache_spec, verdict, r) for r in (0, 1)]
        for name, pages in cache.pages.tables.items():
            page, held = cache.pages.paging.page(name), np.asarray(pages.table) < pages.size
            column = np.arange(page.columns) * page.entries
            entries = page.contract.count(length + counts)[:, None] - column
            have = np.asarray(pages.column("count", pages.table))
            np.testing.assert_array_equal(have, np.clip(entries, 0, page.entries) * held)
            form = np.asarray(pages.column("form", pages.table))
            np.testing.assert_array_equal(form, table.WRITING * held)
        assert all(bool(x.exact) for x in validators.ledgers(cache).values())


@pytest.mark.full
def test_a_draft_that_has_too_few_pages_is_refused() -> None:
    made, params = tiny.model(NAME)
    cache = in_pages(13, reserved=16)
    _, draft = made.verify(params, tiny.tokens()[:, 13:16], cache)
    cache = made.accept(params, draft, np.array([3, 3]))
    before = tiny.copy(cache)
    with pytest.raises(ValueError, match="too few writable pages for"):
        made.verify(params, tiny.tokens()[:, 16:24], cache)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, two)


def test_rows_accept_different_counts() -> None:
    made, params = tiny.model(NAME)
    start = prefilled(13)
    _, draft = drafted(tiny.copy(start), 12, 5)
    mixed = made.accept(params, draft, np.array([5, 2]))
    for row, count in enumerate((5, 2)):
        _, draft = drafted(tiny.copy(start), 12, 12)
        alone = made.accept(params, draft, np.full(tiny.ROWS, count))
        have = [x for x in tiny.live_values(made, mixed) if x[1] == row]
        want = [x for x in tiny.live_values(made, alone) if x[1] == row]
        for (slot, _, a), (_, _, b) in zip(have, want, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=slot.path)


def test_rows_that_are_not_active_do_not_move() -> None:
    made, params = tiny.model(NAME)
    start = prefilled(13)
    tokens = tiny.tokens()[:, 13:18]
    _, draft = made.verify(params, tokens, tiny.copy(start), np.array([True, False]))
    cache = made.accept(params, draft, np.array([4, 0]))
    assert np.asarray(cache.length).tolist() == [17, 13]


def test_beyond_the_budget_is_refused() -> None:
    made, params = tiny.model(NAME)
    cache = prefilled(13)
    with pytest.raises(ValueError, match="rewind budget"):
        made.verify(params, tiny.tokens()[:, : made.rewind_budget + 1], cache)
    _, draft = made.verify(params, tiny.tokens()[:, 13:16], cache)
    for count in ([4, 0], [-1, 0], [1]):
        with pytest.raises(ValueError, match="accepted"):
            made.accept(params, draft, np.array(count))
    made.accept(params, draft, np.array([1, 1]))
    with pytest.raises(ValueError, match="already"):
        made.accept(params, draft, np.array([1, 1]))
    full = prefilled(60)
    with pytest.raises(ValueError, match="capacity"):
        made.verify(params, tiny.tokens()[:, :5], full)
