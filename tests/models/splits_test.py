"""However a sequence is split into calls, logits and state are the same; padding enters nothing."""

import functools

import jax
import numpy as np
import pytest

from hetero_kv.state import Cache
from tests.models import tiny

NAMES = ("v4", "full_mixed", "no_window")
TOLERANCE = 3e-5  # a split changes the shapes of products, and with them the last bits
SIZE = tiny.CAPACITY


def random_sizes(seed: int) -> tuple[int, ...]:
    """Sizes of 1 to 19 that add up to the length of `tiny.tokens`."""
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < SIZE:
        sizes.append(min(int(rng.integers(1, 20)), SIZE - sum(sizes)))
    return tuple(sizes)


SPLITS = {
    "chunks of 1": (1,) * 20,
    "chunks of 5": (5,) * 12,
    "chunks of 7": (7,) * 9,
    "chunks of 16": (16,) * 4,
    "off the grid": (3, 16, 32, 13),
    "random": random_sizes(0),
    "another random": random_sizes(1),
}


def run(name: str, sizes: tuple[int, ...], cache: Cache) -> tuple[np.ndarray, Cache]:
    """Prefill calls of those sizes, from the length that the cache has; the same in every row."""
    made, params = tiny.model(name)
    out, at = [], int(cache.length[0])
    for size in sizes:
        logits, cache = made.prefill(params, tiny.tokens()[:, at : at + size], cache)
        out.append(np.asarray(logits))
        at += size
    return np.concatenate(out, axis=1), cache


@functools.cache
def whole(name: str, size: int = SIZE) -> tuple[np.ndarray, Cache]:
    """One call for everything. Copy the cache before it is used."""
    return run(name, (size,), tiny.empty(tiny.model(name)[0]))


def assert_logits(name: str, got: np.ndarray, start: int = 0) -> None:
    want = tiny.forward(name)[:, start : start + got.shape[1]]
    print("logits", np.abs(got - want).max())
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_call(name: str) -> None:
    logits, cache = whole(name)
    assert_logits(name, logits)
    assert list(cache.length) == list(cache.grid_length) == [SIZE, SIZE]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_pieces(name: str, split: str) -> None:
    made, _ = tiny.model(name)
    logits, cache = run(name, SPLITS[split], tiny.empty(made))
    assert_logits(name, logits)
    _, want = whole(name, sum(SPLITS[split]))
    print("state", tiny.assert_same_state(made, cache, want, TOLERANCE))
    on_grid = split == "chunks of 16"
    assert (int(cache.grid_length[0]) == sum(SPLITS[split])) == on_grid
    if on_grid:  # the very calls that one call is split into
        np.testing.assert_array_equal(logits, whole(name)[0])
        tiny.assert_same_state(made, cache, want)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name: str) -> None:
    made, _ = tiny.model(name)
    logits, cache = tiny.decode(name, tiny.empty(made), SIZE)
    assert_logits(name, logits)
    print("state", tiny.assert_same_state(made, cache, whole(name)[1], TOLERANCE))
    assert not cache.grid_length.any()  # state made by decode is not publishable


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_in_turns(name: str) -> None:
    made, _ = tiny.model(name)
    cache, at = tiny.empty(made), 0
    for prefilled, decoded in ((13, 6), (16, 1), (9, 19)):
        logits, cache = run(name, (prefilled,), cache)
        assert_logits(name, logits, at)
        logits, cache = tiny.decode(name, cache, decoded)
        assert_logits(name, logits, at + prefilled)
        at += prefilled + decoded
    assert at == SIZE
    tiny.assert_same_state(made, cache, whole(name)[1], TOLERANCE)


def in_turns(
    name: str, valids: tuple[tuple[int, int], ...], cache: Cache, junk: int = 0
) -> tuple[np.ndarray, Cache]:
    """Prefill calls in which row r takes its own next `valid[r]` tokens: logits by position.

    What lies behind them in a call are random tokens, other ones for every `junk`.
    """
    made, params = tiny.model(name)
    out = np.zeros((tiny.ROWS, SIZE, made.config.vocab_size), np.float32)
    at, rng = np.asarray(cache.length).copy(), np.random.default_rng(junk)
    for valid in valids:
        part = rng.integers(0, made.config.vocab_size, (tiny.ROWS, max(valid) + 3))
        for row, count in enumerate(valid):
            part[row, :count] = tiny.tokens()[row, at[row] : at[row] + count]
        logits, cache = made.prefill(params, part, cache, np.array(valid))
        for row, count in enumerate(valid):
            assert not np.asarray(logits)[row, count:].any()
            out[row, at[row] : at[row] + count] = np.asarray(logits)[row, :count]
            at[row] += count
    return out, cache


UNEVEN = ((29, 7), (0, 12), (18, 1), (1, 30))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_lengths(name: str) -> None:
    made, _ = tiny.model(name)
    logits, cache = in_turns(name, UNEVEN, tiny.empty(made))
    lengths = np.sum(UNEVEN, axis=0)
    np.testing.assert_array_equal(cache.length, lengths)
    for row, length in enumerate(lengths):
        want = tiny.forward(name)[row, :length]
        np.testing.assert_allclose(logits[row, :length], want, atol=TOLERANCE, rtol=0)
    logits, cache = tiny.decode(name, cache, 14)
    for row, length in enumerate(lengths):
        want = tiny.forward(name)[row, length : length + 14]
        np.testing.assert_allclose(logits[row], want, atol=TOLERANCE, rtol=0)


def test_a_row_equals_its_run_alone() -> None:
    name, row, length = "no_window", 1, 44
    made, params = tiny.model(name)
    alone = tiny.tokens()[row : row + 1]
    logits, cache = made.prefill(params, alone[:, :length], made.init_cache(1, tiny.CAPACITY))
    np.testing.assert_allclose(logits[0], tiny.forward(name)[row, :length], atol=TOLERANCE, rtol=0)
    mates, both = in_turns(name, ((48, length),), tiny.empty(made))
    np.testing.assert_allclose(mates[row, :length], logits[0], atol=TOLERANCE, rtol=0)
    for slot in made.cache_spec.slots():
        one, two = cache.leaf(slot)[:, 0], both.leaf(slot)[:, row]
        np.testing.assert_allclose(one, two, atol=TOLERANCE, rtol=0, err_msg=slot.path)


@pytest.mark.parametrize("name", NAMES)
def test_padding_enters_no_state(name: str) -> None:
    made, _ = tiny.model(name)
    one, first = in_turns(name, UNEVEN, tiny.empty(made), junk=1)
    two, second = in_turns(name, UNEVEN, tiny.empty(made), junk=2)
    np.testing.assert_array_equal(one, two)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)  # dead rows too


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_nobody_wrote_are_never_read(name: str) -> None:
    made, _ = tiny.model(name)
    caches = tiny.empty(made), tiny.empty(made, poison=True)
    (clean, one), (poisoned, two) = (in_turns(name, UNEVEN, cache) for cache in caches)
    np.testing.assert_array_equal(clean, poisoned)
    tiny.assert_same_state(made, one, two)
    for active in ((True, True), (False, True), (True, False), (True, True)):
        (clean, one), (poisoned, two) = (
            tiny.decode(name, cache, 3, active) for cache in (one, two)
        )
        assert np.isfinite(poisoned[np.array(active)]).all()
        np.testing.assert_array_equal(clean[np.array(active)], poisoned[np.array(active)])
        tiny.assert_same_state(made, one, two)


@pytest.mark.parametrize("name", NAMES)
def test_idle_rows_do_not_move_and_stay_finite(name: str) -> None:
    made, _ = tiny.model(name)
    for length in (0, 1, 2, 3, 6, 7, 13):  # on either side of where groups close
        cache = tiny.empty(made, poison=True)
        if length:
            _, cache = in_turns(name, ((length, 20),), cache)
        before = tiny.copy(cache)
        logits, cache = tiny.decode(name, cache, 1, (False, False))
        assert np.isfinite(logits).all(), length
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(a, b)


def test_prefill_in_a_trace() -> None:
    name = "no_window"
    made, params = tiny.model(name)

    @jax.jit
    def traced(params, tokens, valid, cache):
        return made.prefill(params, tokens, cache, valid)

    _, cache = in_turns(name, ((9, 0),), tiny.empty(made))
    valid = np.array([33, 40], np.int32)
    part = np.stack([tiny.tokens()[0, 9:49], tiny.tokens()[1, :40]])
    want, expected = made.prefill(params, part, tiny.copy(cache), valid)
    got, moved = traced(params, part, valid, cache)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    tiny.assert_same_state(made, moved, expected, TOLERANCE)
    np.testing.assert_array_equal(moved.grid_length, expected.grid_length)

    before = tiny.copy(moved)  # 42 and 40 tokens: the second call fits the second row only
    logits, after = traced(params, part, np.array([23, 24], np.int32), moved)
    assert list(after.length) == [42, 64]
    assert not np.asarray(logits[0]).any()
    assert np.asarray(logits[1, :24]).any()
    for slot in made.cache_spec.slots():
        np.testing.assert_array_equal(after.leaf(slot)[:, 0], before.leaf(slot)[:, 0])


@pytest.mark.parametrize("name", ("no_window", "full_mixed"))
def test_full_rows_are_refused(name: str) -> None:
    made, params = tiny.model(name)
    _, cache = in_turns(name, ((SIZE, SIZE - 3),), tiny.empty(made, poison=True))
    with pytest.raises(ValueError, match="capacity 64"):
        made.prefill(params, tiny.tokens()[:, :1], cache)
    _, cache = made.prefill(params, tiny.tokens()[:, SIZE - 3 : SIZE - 2], cache, np.array([0, 1]))
    before = tiny.copy(cache)
    token = np.array([5, tiny.tokens()[1, SIZE - 2]], np.int32)
    logits, cache = made.decode_step(params, token, cache, np.ones(2, bool))
    assert list(cache.length) == [SIZE, SIZE - 1]
    assert np.isnan(logits[0]).all()
    want = tiny.forward(name)[1, SIZE - 2]
    np.testing.assert_allclose(logits[1], want, atol=TOLERANCE, rtol=0)
    for slot in made.cache_spec.slots():
        np.testing.assert_array_equal(cache.leaf(slot)[:, 0], before.leaf(slot)[:, 0])


@pytest.mark.parametrize(
    "part, valid, kind, message",
    [
        (np.zeros((3, 4), int), None, "all", r"i32\[2, S\]"),
        (np.zeros((2, 0), int), None, "all", "S >= 1"),
        (np.zeros(2, int), None, "all", r"i32\[2, S\]"),
        (np.zeros((2, 4), int), [1, 5], "all", r"0\.\.4"),
        (np.zeros((2, 4), int), [-1, 4], "all", r"0\.\.4"),
        (np.zeros((2, 4), int), [4], "all", "2 numbers"),
        (np.zeros((2, 4), int), None, "some", "'none'"),
    ],
)
def test_bad_calls_are_refused(part, valid, kind, message) -> None:
    made, params = tiny.model("full")
    with pytest.raises(ValueError, match=message):
        made.prefill(params, part, tiny.empty(made), valid, kind)


def test_kinds_of_logits() -> None:
    name = "full"
    made, params = tiny.model(name)
    part, valid = tiny.tokens()[:, :40], np.array([40, 21])
    everything, cache = made.prefill(params, part, tiny.empty(made), valid)
    last, same = made.prefill(params, part, tiny.empty(made), valid, logits="last")
    assert last.shape == (2, made.config.vocab_size)
    for row in range(2):
        want = everything[row, valid[row] - 1]
        np.testing.assert_allclose(last[row], want, atol=TOLERANCE, rtol=0)
    tiny.assert_same_state(made, cache, same)
    nothing, same = made.prefill(params, part, tiny.empty(made), valid, logits="none")
    assert nothing.shape == (2, 0)
    tiny.assert_same_state(made, cache, same)
    before = tiny.copy(cache)
    last, cache = made.prefill(params, part, cache, np.array([0, 2]), logits="last")
    assert not np.asarray(last[0]).any()
    assert np.asarray(last[1]).any()
    for slot in made.cache_spec.slots():
        np.testing.assert_array_equal(cache.leaf(slot)[:, 0], before.leaf(slot)[:, 0])


@pytest.mark.parametrize("kind, shape", [("all", (2, 3, 61)), ("last", (2, 61)), ("none", (2, 0))])
def test_a_call_in_which_nothing_runs(kind: str, shape: tuple[int, ...]) -> None:
    made, params = tiny.model("full")
    part = tiny.tokens()[:, :3]
    logits, cache = made.prefill(params, part, tiny.empty(made), np.zeros(2, int), kind)
    assert logits.shape == shape
    assert not np.asarray(logits).any()
    assert not cache.length.any()
