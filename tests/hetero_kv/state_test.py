"""The cache pytree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from hetero_kv import state
from hetero_kv.contract import Evidence, Point
from tests.hetero_kv import synthetic

SPEC = synthetic.everything()


def test_abstract_and_init_agree():
    shapes = state.abstract(SPEC, batch=3, capacity=40)
    cache = state.init(SPEC, batch=3, capacity=40)
    assert jax.tree.structure(shapes) == jax.tree.structure(cache)
    for want, have in zip(jax.tree.leaves(shapes), jax.tree.leaves(cache), strict=True):
        assert (want.shape, want.dtype) == (have.shape, have.dtype)
    assert cache.batch == 3
    for slot in SPEC.slots():
        assert cache.leaf(slot).shape == (slot.repeats, 3, *slot.leaf.shape(40))


def test_structure_is_stable():
    # An unstable tree or shape would compile again and again.
    a = jax.tree.structure(state.init(SPEC, 1, 16))
    assert a == jax.tree.structure(state.init(SPEC, 1, 16))
    assert a != jax.tree.structure(state.init(SPEC, 1, 32))


def test_every_buffer_is_its_own():
    cache = state.init(SPEC, 2, 16)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)  # or donation would give one away twice


def test_poison_spares_evidence_and_what_is_read_before_it_is_written():
    cache = state.init(SPEC, 2, 16, poison=True)
    for slot in SPEC.slots():
        value = np.asarray(cache.leaf(slot)).astype(np.float32)
        contract = slot.leaf.contract
        if isinstance(contract, Evidence):
            assert (value == (-1 if contract.kind == "positions" else 0)).all()
        elif isinstance(contract, Point) and not contract.group:
            assert (value == 0).all()
        else:
            assert np.isnan(value).all()


def test_leaves_can_be_exchanged():
    cache = state.init(SPEC, 2, 16)
    slot = next(SPEC.slots())
    changed = cache.with_leaves({slot: cache.leaf(slot) + 1})
    assert (changed.leaf(slot) == 1).all()
    assert (cache.leaf(slot) == 0).all()


def test_reset_row_leaves_other_rows_alone():
    tokens = np.arange(50) % 7
    cache = synthetic.empty(SPEC, batch=3)
    for row in range(3):
        cache = synthetic.advance(SPEC, cache, row, tokens + row, 40)
    reset = jax.jit(lambda c, row: state.reset_row(SPEC, c, row))(cache, 1)
    assert list(reset.length) == [40, 0, 40]
    assert list(reset.grid_length) == [32, 0, 32]
    for row in range(3):
        assert not synthetic.wrong_rows(SPEC, reset, row, tokens + row)


@pytest.mark.parametrize("batch, capacity", [(0, 4), (1, 0)])
def test_bad_sizes_are_refused(batch, capacity):
    with pytest.raises(ValueError):
        state.init(SPEC, batch, capacity)


def test_shardings_have_the_shape_of_the_cache():
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    shardings = state.shardings(SPEC, 2, 16, mesh, "rows")
    cache = jax.device_put(state.init(SPEC, 2, 16), shardings)
    assert jnp.all(cache.length == 0)


@pytest.mark.parametrize("batch, capacity", [(1, 1.5), (True, 10), (None, 10), (1, "10")])
def test_sizes_are_integers(batch, capacity):
    for make in (state.init, state.abstract):
        with pytest.raises(ValueError, match="of a cache is an integer, got "):
            make(SPEC, batch, capacity)
