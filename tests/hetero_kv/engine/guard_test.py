"""One compile per function and bucket, whatever happens; the guard notices when one leaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.guard import Guard, LeakedShape
from hetero_kv.rows import Rows
from tests import variants
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.schedules_test import Schedule


def add(x, y):
    return x + y


def test_a_leaked_shape_raises_before_it_is_compiled() -> None:
    guard = Guard(strict=True)
    call = guard.jit("add", add, lambda x, y: "any size")
    assert call(np.ones(3), np.ones(3)).shape == (3,)
    assert call(np.zeros(3), np.ones(3)).shape == (3,)
    with pytest.raises(LeakedShape, match="add was traced 2 times for bucket 'any size'"):
        call(np.ones(4), np.ones(4))
    assert guard.leaks == {("add", "any size"): 2}


def test_a_leaked_dtype_is_counted() -> None:
    guard = Guard()
    call = guard.jit("add", add, lambda x, y: f"{x.shape[0]}")
    for x in (np.ones(3, np.float32), np.ones(3, np.int32), np.ones(5, np.int32)):
        call(x, x)
    assert guard.counts == {("add", "3"): 2, ("add", "5"): 1}
    assert guard.leaks == {("add", "3"): 2}


def test_a_trace_that_fails_is_not_one() -> None:
    """What it raised is told again at the next call, and not that a shape has leaked."""
    guard, fails = Guard(strict=True), [True, True, False]

    def function(x):
        if fails.pop(0):
            raise ValueError("of its own")
        return x

    call = guard.jit("some", function, lambda x: "3")
    for _ in range(2):
        with pytest.raises(ValueError, match="of its own"):
            call(np.ones(3))
    assert call(np.ones(3)).shape == (3,)
    assert not guard.leaks and guard.counts["some", "3"] == 1


def test_numpy_and_device_arrays_are_one_bucket() -> None:
    guard = Guard(strict=True)
    call = guard.jit("add", add, lambda x, y: "3")
    call(np.ones(3, np.float32), np.ones(3, np.float32))
    call(jnp.ones(3), np.ones(3, np.float32))
    assert not guard.leaks


@pytest.mark.parametrize("paged", variants.some([False, True], [True]))
def test_all_that_can_happen_compiles_each_function_once(paged: bool) -> None:
    """Every mode, form, length, preemption and fault of the random schedules, counted anew."""
    rows = world.engine(paged=paged).rows
    before = dict(rows.guard.counts)
    for seed in range(500, 506):
        Schedule(seed, paged).run()
    assert not rows.guard.leaks
    names = {name for name, _ in rows.guard.counts}
    some = {"admit", "settle", "revoke"} if paged else {"reset", "wipe"}
    assert {"prefill", "decode", "pick", "take", "put"} | some <= names
    assert set(before) <= set(rows.guard.counts)


@pytest.mark.parametrize("paged", variants.some([False, True], [True]))
def test_the_decode_step_is_one_program_for_every_mix(paged: bool) -> None:
    """Its text, lowered with what the cache and the rows hold at the moment."""
    made = world.engine(paged=paged, validate=True)
    mixes = [made._ask()]

    def text(ask=None) -> str:
        lowered = jax.jit(made.rows._traced_decode).lower(
            made.params, made.cache, ask or made._ask(), np.int32(len(mixes) % 4)
        )
        return lowered.as_text()

    texts = [text()]
    handles = [made.submit(world.request(x)) for x in (1, 4, 3)]
    for i in range(7):
        made.step()
        if i == 3:
            made.cancel(handles[1])
        if i == 5:
            for entry in made.scheduler.active():
                world.damage(made, entry.slot, "windows", evidence=True)
                if paged:
                    world.damage_page(made, entry.slot, "csa entries", "form")
        mixes.append(made._ask())
        if i in (3, 5, 6):
            texts.append(text())
    asked = {tuple(x.budget.tolist() + x.length.tolist()) for x in mixes}
    assert len(asked) > 3
    assert len(set(texts)) == 1
    short = made._ask()
    assert text(short._replace(forced=short.forced[:, :3])) != texts[0]  # what a leak would do


def test_an_engine_that_leaks_a_shape_stops_in_strict_mode(monkeypatch) -> None:
    """As if a step asked for as many columns as there are tokens left."""
    made = world.engine()
    list(made.generate([world.request(1)]))
    inner = made.rows._decode

    def leaky(params, cache, ask, steps):
        return inner(params, cache, ask._replace(forced=ask.forced[:, :3]), steps)

    monkeypatch.setattr(made.rows, "_decode", leaky)
    counts = made.rows.guard.counts.copy()
    with pytest.raises(LeakedShape, match="decode"):
        list(made.generate([world.request(1)]))
    made.rows.guard.counts = counts


def test_sizes_must_make_sense() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Rows(world.model()[0], slots=2, capacity=8, burst=0)


def test_rows_out_of_range_are_not_clamped() -> None:
    rows = world.engine().rows
    for row in (-1, world.SLOTS):
        with pytest.raises(ValueError, match="is not within"):
            rows.reset(rows.new(), row)
