"""Joint softmax over sets of keys, windows in bands, and the visibility of entries."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import attend, ring
from hetero_kv.attention.call import Call, View
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.window import WindowBranch
from hetero_kv.kernels.chunk_attention import reference
from hetero_kv.kernels.chunk_attention.api import chunk_attention
from hetero_kv.kernels.chunk_attention.operands import Entries, Rule
from hetero_kv.kernels.compressor.reference import Pooling

HEADS, DIM, SCALE = 2, 4, 0.5


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """Softmax attention q [S, H, c], k and v [K, c], bool[S, K], by loops in float64."""
    out = np.zeros(q.shape)
    for s in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = np.flatnonzero(mask[s])
            weight = np.exp(k[seen].astype(np.float64) @ q[s, h] * SCALE)
            total = weight.sum() + (0 if sinks is None else np.exp(float(sinks[h])))
            if total:
                out[s, h] = weight @ v[seen] / total
    return out


@functools.partial(jax.jit, static_argnames="cuts")
def in_sets(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array | None, cuts: tuple[int, ...]
) -> jax.Array:
    """The output after keys [1, K, c] in consecutive sets."""
    state = attend.begin(q.shape[:-1], DIM, sinks)
    edges = [0, *cuts, keys.shape[1]]
    for low, high in itertools.pairwise(edges):
        state = attend.add(state, q, keys[:, low:high], mask[:, :, low:high], SCALE)
    return attend.finish(state)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_sets_add_up_to_one_softmax(with_sinks: bool) -> None:
    q, keys = draw(1, 3, HEADS, DIM), draw(1, 9, DIM)
    mask = np.random.default_rng(1).random((1, 3, 9)) < 0.6
    mask[0, 0] = False  # a query that sees nothing
    sinks = draw(HEADS) if with_sinks else None
    want = dense(q[0], keys[0], keys[0], mask[0], sinks)
    for cuts in ((), (4,), (1, 3, 8)):
        found = np.asarray(in_sets(q, keys, mask, sinks, cuts))
        np.testing.assert_allclose(found[0], want, atol=2e-6)
        assert not found[0, 0].any()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_masked_set_changes_no_bit(with_sinks: bool) -> None:
    q, keys, junk = draw(1, 3, HEADS, DIM), draw(1, 5, DIM), 1e3 * draw(1, 4, DIM)
    sinks = draw(HEADS) if with_sinks else None
    add = jax.jit(functools.partial(attend.add, scale=SCALE))
    none = np.zeros((1, 3, 4), bool)
    begin = attend.begin((1, 3, HEADS), DIM, sinks)
    mask = np.array([True, False, True, True, True]) & np.ones((1, 3, 1), bool)
    once = add(begin, q, keys, mask)
    for state in (
        add(add(begin, q, junk, none), q, keys, mask),
        add(add(add(begin, q, keys, mask), q, junk, none), q, junk, none),
    ):
        for a, b in zip(once, state, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_keys_and_no_sink_give_zero() -> None:
    for sinks in (None, jnp.array([0.3, -50.0])):
        out = attend.finish(attend.begin((2, 3, HEADS), DIM, sinks))
        assert out.shape == (2, 3, HEADS, DIM)
        assert not np.asarray(out).any()


def test_large_logits_and_sinks_stay_finite() -> None:
    q, keys = 100 * draw(1, 2, HEADS, DIM), 100 * draw(1, 3, DIM)
    mask = np.ones((1, 2, 3), bool)
    for sinks in (None, np.array([1e6, -1e6], np.float32)):
        out = np.asarray(in_sets(q, keys, mask, sinks, (1,)))
        assert np.isfinite(out).all()
    assert not out[..., 0, :].any()  # a huge sink takes everything


def test_clean_rows_have_no_nan() -> None:
    rows = jnp.full((1, 2, 3), jnp.nan).at[0, 0].set(1.0)
    cleaned = attend.clean(rows, jnp.array([[True, False]]))
    assert cleaned.tolist() == [[[1, 1, 1], [0, 0, 0]]]


def test_grouped_heads() -> None:
    groups, per_group, keys = 2, 3, 7
    q = draw(1, 4, groups, per_group, DIM)
    k, v = draw(1, keys, groups, DIM, seed=1), draw(1, keys, groups, DIM, seed=2)
    mask = np.random.default_rng(3).random((1, 4, keys)) < 0.7
    sinks = draw(groups, per_group)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        state = attend.begin(q.shape[:-1], DIM, sinks)
        state = attend.add_grouped(state, q, k[:, :3], v[:, :3], mask[..., :3], SCALE)
        state = attend.add_grouped(state, q, k[:, 3:], v[:, 3:], mask[..., 3:], SCALE)
        return attend.finish(state)

    found = np.asarray(run(q, k, v, sinks))
    for g in range(groups):
        want = dense(q[0, :, g], k[0, :, g], v[0, :, g], mask[0], sinks[g])
        np.testing.assert_allclose(found[0, :, g], want, atol=2e-6)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_the_form_of_rows_of_keys_and_values(softcap: float) -> None:
    """A mask per group, and logits that are capped."""
    groups, per_group, keys = 2, 2, 6
    q, rows = draw(1, 3, groups, per_group, DIM), draw(1, keys, 2 * groups * DIM)
    mask = np.random.default_rng(4).random((1, 3, groups, keys)) < 0.7
    form = attend.Form(groups, softcap)
    state = form.add(attend.begin(q.shape[:-1], DIM, None), q, rows, mask, SCALE)
    found = np.asarray(attend.finish(state))
    k, v = rows[0].astype(np.float64).reshape(keys, 2, groups, DIM).swapaxes(0, 1)
    for s, g, h in itertools.product(range(3), range(groups), range(per_group)):
        seen = np.flatnonzero(mask[0, s, g])
        logit = k[seen, g] @ q[0, s, g, h] * SCALE
        weight = np.exp(softcap * np.tanh(logit / softcap) if softcap else logit)
        want = weight @ v[seen, g] / max(weight.sum(), 1e-30)
        np.testing.assert_allclose(found[0, s, g, h], want, atol=2e-6)


# -- windows ---------------------------------------------------------------------------------------


def window_mask(tokens: int, width: int) -> np.ndarray:
    gap = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return (gap >= 0) & (gap < width)


@pytest.mark.parametrize(
    "width, tokens", [(1, 1), (1, 18), (3, 17), (8, 33), (9, 50), (40, 5), (5, 16)]
)
def test_window_in_bands(width: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BAND", 8)
    branch = WindowBranch(width, DIM, "float32")
    q, kv, sinks = draw(2, tokens, HEADS, DIM), draw(2, tokens, DIM), draw(HEADS)

    @jax.jit
    def run(q: jax.Array, kv: jax.Array, sinks: jax.Array) -> jax.Array:
        begin = attend.begin(q.shape[:-1], DIM, sinks)
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (2, tokens))
        return attend.finish(branch.forward(begin, q, kv, positions, SCALE))

    found = np.asarray(run(q, kv, sinks))
    for row in range(2):
        want = dense(q[row], kv[row], kv[row], window_mask(tokens, width), sinks)
        np.testing.assert_allclose(found[row], want, atol=2e-6)


def call(start: Sequence[int], count: Sequence[int], columns: int, first=(0, 0)) -> Call:
    start = jnp.asarray(start, jnp.int32)
    positions = start[:, None] + jnp.arange(columns, dtype=jnp.int32)
    counts = jnp.asarray(count, jnp.int32)
    return Call(start, counts, positions, {}, jnp.asarray(first, jnp.int32), False)


def filled_window(branch: WindowBranch, kv: np.ndarray, length: Sequence[int]) -> View:
    """A ring that holds the rows before `length`, everything else NaN."""
    rows = jnp.full((1, 2, branch.width, DIM), jnp.nan)
    zero, end = jnp.zeros(2, jnp.int32), jnp.asarray(length, jnp.int32)
    held = ring.advance(rows[0], zero, jnp.asarray(kv), end)
    seen = jnp.broadcast_to(jnp.arange(kv.shape[1], dtype=jnp.int32), kv.shape[:2])
    seen = ring.advance(jnp.full((2, branch.width), -1, jnp.int32), zero, seen, end)
    return View({"window": held[None], "window_pos": seen[None]}, 0)


@pytest.mark.parametrize("width, first", [(1, (0, 0)), (3, (9, 2)), (8, (0, 0)), (8, (9, 2))])
@pytest.mark.parametrize("columns", [5, 21])
def test_window_of_a_call_and_of_a_step(
    width: int, first: tuple[int, int], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows before `first` are absent; the two sequences stand at 11 and 2 tokens."""
    monkeypatch.setattr(reference, "BAND", 8)  # so that 21 columns are three bands
    branch, start, count = WindowBranch(width, DIM, "float32"), (11, 2), (columns, columns - 2)
    kv, q = draw(2, 11 + columns, DIM), draw(2, columns, HEADS, DIM)
    now = call(start, count, columns, first)
    new = jnp.stack([kv[r, start[r] : start[r] + columns] for r in range(2)])
    view = filled_window(branch, kv, start)

    @jax.jit
    def prefill(view: View, now: Call) -> tuple[jax.Array, View]:
        out = chunk_attention(
            q,
            layer=0,
            start=now.start,
            count=now.count,
            window=branch.before(new, view, now),
            rule=Rule(SCALE),
        )
        return out, branch.advance(new, view, now)

    @jax.jit
    def decode(view: View, step: Call) -> jax.Array:
        rows, live = branch.rows(branch.write(new[:, 0], view, step), step)
        alone = attend.begin((2, 1, HEADS), DIM, None)
        return attend.finish(attend.add(alone, q[:, :1], rows, live[:, None], SCALE))

    found, moved = prefill(view, now)
    found = np.asarray(found)
    for row in range(2):
        mask = window_mask(11 + columns, width) & (np.arange(11 + columns) >= first[row])
        mask = mask[start[row] : start[row] + count[row]]
        want = dense(q[row, : count[row]], kv[row], kv[row], mask, None)
        np.testing.assert_allclose(found[row, : count[row]], want, atol=2e-6)
    assert moved.leaves["window_pos"].max() == 11 + columns - 1

    stepped = np.asarray(decode(view, call(start, (1, 1), 1, first)))
    np.testing.assert_allclose(stepped[:, 0], found[:, 0], atol=2e-6)


# -- entries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 3, 7])
def test_an_entry_is_visible_once_its_last_token_is(ratio: int) -> None:
    pool_ = EntryPool("entries", "csa entries", ratio, DIM, "float32")
    positions = np.arange(40, dtype=np.int32)
    for t, count in zip(positions, np.asarray(pool_.visible(positions)), strict=True):
        assert count == sum(ratio * (i + 1) - 1 <= t for i in range(40))


def test_entries_of_a_pool() -> None:
    """Tile by tile over what is visible; NaN beyond; the pool's size changes no bit."""
    ratio, columns, starts, counts = 2, 4, (13, 2), (4, 1)
    q, sinks = draw(2, columns, HEADS, DIM), draw(HEADS)
    now = call(starts, counts, columns)
    stored = draw(2, 8, DIM)
    results = []
    for capacity in (12, 40):
        pool_ = EntryPool("entries", "hca entries", ratio, DIM, "float32", tile=4)
        rows = jnp.full((1, 2, capacity, DIM), jnp.nan)
        for row in range(2):
            written = (starts[row] + counts[row]) // ratio
            rows = rows.at[0, row, :written].set(stored[row, :written])
        view = View({"entries": rows}, 0)

        @jax.jit
        def run(view: View, now: Call, pool_: EntryPool = pool_) -> jax.Array:
            return chunk_attention(
                q,
                layer=0,
                start=now.start,
                count=now.count,
                entries=Entries(view.leaves["entries"], None),
                sinks=sinks,
                rule=Rule(SCALE, ratio, pool_.tile),
            )

        assert int(pool_.tiles(now)) == 2
        results.append(np.asarray(run(view, now)))
    for row in range(2):
        t = starts[row] + np.arange(counts[row])
        mask = np.arange(8) < ((t + 1) // ratio)[:, None]
        want = dense(q[row, : counts[row]], stored[row], stored[row], mask, sinks)
        np.testing.assert_allclose(results[0][row, : counts[row]], want, atol=2e-6)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0][row, : counts[row]], other[row, : counts[row]])


@pytest.mark.parametrize("replay", [False, True])
def test_entries_are_counted_where_they_are_written(replay: bool) -> None:
    pool_ = EntryPool("entries", "csa entries", 2, DIM, "float32", tile=4)
    leaves = pool_.leaves()
    assert leaves["entries"].row_count(10) == 8  # 5 entries, in whole tiles
    view = View({"entries": jnp.zeros((1, 2, 8, DIM)), "entries_count": jnp.zeros((1, 2), int)}, 0)
    now = call((4, 0), (3, 2), 3)._replace(replay=replay)
    how = Pooling(2, DIM, False, Rope(0, 1.0), 1e-6, "float32")
    tail, raw = jnp.asarray(draw(1, 2, 2, 2 * DIM)), jnp.asarray(draw(2, 3, 2 * DIM))
    after = pool_.close(view, now, how, jnp.ones(DIM), tail, raw).leaves
    written = np.asarray(after["entries"]).any(axis=-1)[0]
    assert written.tolist() == [
        [i == 2 and not replay for i in range(8)],
        [i == 0 and not replay for i in range(8)],
    ]
    assert after["entries_count"].tolist() == [[0, 0] if replay else [1, 1]]
