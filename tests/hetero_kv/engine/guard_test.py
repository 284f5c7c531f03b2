"""One compile per function and bucket, whatever happens; the guard notices when one leaks."""

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.guard import Guard, LeakedShape
from hetero_kv.rows import Rows
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


def test_numpy_and_device_arrays_are_one_bucket() -> None:
    guard = Guard(strict=True)
    call = guard.jit("add", add, lambda x, y: "3")
    call(np.ones(3, np.float32), np.ones(3, np.float32))
    call(jnp.ones(3), np.ones(3, np.float32))
    assert not guard.leaks


def test_all_that_can_happen_compiles_each_function_once() -> None:
    """Every mode, length, preemption and fault of the random schedules, counted anew."""
    rows = world.engine().rows
    before = dict(rows.guard.counts)
    for seed in range(500, 512):
        Schedule(seed).run()
    assert not rows.guard.leaks
    names = {name for name, _ in rows.guard.counts}
    assert {"reset", "prefill", "decode", "pick", "take", "put", "wipe"} <= names
    assert set(before) <= set(rows.guard.counts)


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
