"""One compile per function and call size, donated caches, deep models of few bodies (rule 5)."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv import state
from models import schedule
from models.config import DecoderConfig
from models.decoder import Decoder
from models.sampling import Sampler
from tests.models import tiny

NAME = "all_entries"  # the cheapest one with history, tails and windows


@pytest.fixture(scope="module")
def fresh() -> Decoder:
    """A model that no other test has compiled anything with."""
    return models.build(tiny.config(NAME, chunk=32))


def test_one_compile_per_call_size_and_one_for_decode(fresh: Decoder, compiled: list[str]) -> None:
    params = tiny.model(NAME)[1]
    assert fresh.call_sizes == (16, 32)
    cache, zeros, on = tiny.empty(fresh), jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    for valid in ((3, 0), (1, 16), (20, 1), (0, 9), (2, 2), (5, 1)):
        part = np.ones((2, max(valid)), np.int32)
        _, cache = fresh.prefill(params, part, cache, np.array(valid))
        _, cache = fresh.decode_step(params, zeros + 1, cache, on)
        _, cache = fresh.decode_step(params, zeros + 2, cache, on)
    assert list(cache.length) == [31 + 12, 29 + 12]
    _, cache = fresh.decode_step(params, zeros, cache, jnp.array([True, False]))
    _, cache = fresh.decode_step(params, zeros, cache, ~on)

    # A full row, restored leaves and a row that starts over are the same graph too.
    cache = cache.replace(length=jnp.array([tiny.CAPACITY, 3], jnp.int32))
    _, cache = fresh.decode_step(params, zeros, cache, on)
    cache = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), cache)
    _, cache = fresh.decode_step(params, zeros, cache, on)
    cache = state.reset_row(fresh.cache_spec, cache, 0)
    _, cache = fresh.decode_step(params, zeros, cache, on)
    assert fresh._step._cache_size() == 1
    assert fresh._call._cache_size() == len(fresh.call_sizes)

    # Arrays of numpy are looked up separately and compile nothing.
    _, cache = fresh.decode_step(params, np.zeros(2, np.int32), cache, np.zeros(2, bool))
    assert [name for name in compiled if "step" in name] == ["jit(step)"]
    assert [name for name in compiled if "call" in name] == ["jit(call)"] * 2


def test_bits_of_a_row_do_not_depend_on_its_mates(fresh: Decoder) -> None:
    params = tiny.model(NAME)[1]
    runs = []
    for mate in (0, 3, 16, 17, 40):  # which runs beside it, in its call or in a larger one
        valid = np.array([35, mate])
        logits, cache = fresh.prefill(params, tiny.tokens()[:, :40], tiny.empty(fresh), valid)
        runs.append([logits[0, :35], *(leaf[:, 0] for leaf in jax.tree.leaves(cache.layers))])
    for run in runs[1:]:
        for one, two in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_cache_is_donated(fresh: Decoder) -> None:
    params = tiny.model(NAME)[1]
    old = tiny.empty(fresh)
    step = fresh._step.lower(params, jnp.zeros(2, jnp.int32), old, jnp.ones(2, bool)).compile()
    need = fresh.cache_spec.cache_bytes(tiny.ROWS, tiny.CAPACITY)
    assert need == sum(leaf.nbytes for leaf in jax.tree.leaves(old))
    assert step.memory_analysis().alias_size_in_bytes >= need

    _, new = fresh.decode_step(params, jnp.zeros(2, jnp.int32), old)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    for prefill in (True, False):
        old = new
        before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(old)]
        if prefill:
            _, new = fresh.prefill(params, tiny.tokens()[:, :3], old)
        else:
            _, new = fresh.decode_step(params, jnp.zeros(2, jnp.int32), old)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)]
        assert before == after  # updated in place


@pytest.mark.parametrize("scanned", [False, True])
def test_a_step_copies_nothing_that_is_cached(scanned: bool) -> None:
    """Neither a ring of raw rows, read only when a group closes, nor a pool of one tile."""
    kinds = ("csa", "hca", "full") * 2
    config = tiny.config("full_mixed", layer_types=kinds, mlp_types=("dense",) * len(kinds))
    model = models.build(config.replace(scan_layers=scanned, hc_streams=0))
    cache = model.abstract_cache(1, tiny.CAPACITY)  # rows' writes are then no scatters
    token = jax.ShapeDtypeStruct((1,), "int32")
    lowered = model._step.lower(model.abstract_params(), token, cache, None)
    text = lowered.compile(compiler_options=tiny.FAST_COMPILE).as_text()
    rows = [leaf for leaf in jax.tree.leaves(cache.layers) if leaf.ndim == 4]
    shapes = {",".join(map(str, leaf.shape)) for leaf in rows}
    copied = re.findall(r"= [a-z0-9]+\[([0-9,]*)\]\S* copy\(", text)
    assert copied and not shapes & set(copied)


def flash(repeats: int = 20) -> DecoderConfig:
    """The schedule of DeepSeek-V4-Flash with `repeats` pairs of HCA and CSA layers, tiny sizes."""
    pairs = ("hca", "csa") * repeats
    kinds = ("swa", "swa", "csa", *pairs)
    return tiny.config("v4", layer_types=kinds, mlp_types=("hash_moe",) * 3 + ("moe",) * len(pairs))


def test_the_flash_schedule_is_cut_into_four_bodies() -> None:
    config = flash()
    assert len(config.layer_types) == 43
    assert config.layer_types.count("csa") == 21
    runs = schedule.cut(list(zip(config.layer_types, config.mlp_types, strict=True)), True)
    assert sum(len(run.pattern) for run in runs) == 4
    assert [(len(run.pattern), run.repeats) for run in runs] == [(1, 2), (1, 1), (2, 20)]


def equations(jaxpr: Any) -> Iterator[str]:
    """Yields the primitive of every equation of a jaxpr, inner ones too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_a_deep_model_traces_as_a_shallow_one() -> None:
    counts = []
    for repeats in (2, 20):
        made = models.build(flash(repeats))
        params, cache = made.abstract_params(), made.abstract_cache(1, tiny.CAPACITY)
        token = jax.ShapeDtypeStruct((1,), jnp.int32)
        active = jax.ShapeDtypeStruct((1,), jnp.bool_)
        jaxpr = jax.make_jaxpr(made.stack.step)(params, token, cache, active)
        counts.append(sum(1 for _ in equations(jaxpr.jaxpr)))
    assert counts[0] == counts[1] > 100


def test_structure_shapes_and_hashes_are_stable(fresh: Decoder) -> None:
    params = tiny.model(NAME)[1]
    twin = models.build(tiny.config(NAME, chunk=32))
    assert twin.stack == fresh.stack and hash(twin.stack) == hash(fresh.stack)
    assert twin.cache_spec == fresh.cache_spec
    assert hash(twin.cache_spec) == hash(fresh.cache_spec)
    assert Sampler(0.5) == Sampler(0.5) and hash(Sampler(0.5)) == hash(Sampler(0.5))

    def form(cache) -> tuple:
        leaves = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(cache)]
        return jax.tree.structure(cache), leaves

    cache = tiny.empty(fresh)
    start = form(cache)
    assert jax.tree.structure(fresh.abstract_cache(tiny.ROWS, tiny.CAPACITY)) == start[0]
    _, cache = fresh.prefill(params, tiny.tokens()[:, :5], cache)
    assert form(cache) == start
    _, cache = fresh.decode_step(params, jnp.zeros(2, jnp.int32), cache)
    assert form(cache) == start


def test_later_changes_to_the_config_do_not_reach_the_model() -> None:
    config = tiny.config("full")
    made = models.build(config)
    config.layer_types, config.n_heads = ("swa", "swa"), 2
    assert made.config == tiny.config("full")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layer_types=("swa",)), "same number of layers"),
        (dict(layer_types=(), mlp_types=()), "at least one"),
        (dict(layer_types=("swa", "gru", "full")), "no mechanism 'gru'"),
        (dict(mlp_types=("dense", "mlp", "dense")), "unknown MLP type 'mlp'"),
        (dict(window=0), "'swa' layer needs window"),
        (dict(n_kv_heads=3), "must divide n_heads"),
        (dict(index_topk=0), "index_topk=0"),
        (dict(index_topk=-2), "index_topk=-2"),
        (dict(index_dim=4), "at least rope_dim"),
        (dict(csa_ratio=1), "ratio=1 must be at least 2"),
        (dict(rope_dim=7), "even"),
        (dict(rope_dim=14), "exceeds head_dim"),
        (dict(o_groups=3), "o_groups=3 must divide"),
        (dict(experts_per_token=5), "experts_per_token=5"),
        (dict(hc_streams=-1), "streams"),
        (dict(chunk=0), "chunk"),
        (dict(block=6), "multiple of the strides"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    base = dict(layer_types=("swa", "csa", "full"), mlp_types=("dense", "moe", "dense"))
    with pytest.raises(ValueError, match=message):
        models.build(tiny.BASE.replace(**(base | changes)))
