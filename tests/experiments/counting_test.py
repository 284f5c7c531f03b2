"""Bytes against real caches, operations against the program that the decode step is traced to."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

import models
from experiments import counting
from hetero_kv import state
from models import geometries
from models.config import DecoderConfig


def products(jaxpr: core.Jaxpr) -> int:
    """Operations of all dot products; a loop of unknown length is taken to run once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[i] for i in left)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        inner = []
        for value in equation.params.values():
            values = value if isinstance(value, tuple | list) else (value,)
            inner += [getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns")
                      or hasattr(getattr(x, "jaxpr", None), "eqns")]  # fmt: skip
        each = [products(x) for x in inner]
        if equation.primitive.name == "cond":
            total += max(each)
        else:
            total += sum(each) * equation.params.get("length", 1)
    return total


# Every pool holds exactly one tile of entries when the cache is full.
V4 = DecoderConfig(
    d_model=48,
    layer_types=("swa", "csa", "hca", "csa", "hca"),
    mlp_types=("dense", "moe", "hash_moe", "moe", "hash_moe"),
    n_heads=4,
    head_dim=24,
    rope_dim=8,
    q_lora_rank=20,
    o_groups=2,
    o_lora_rank=12,
    window=16,
    csa_ratio=4,
    hca_ratio=4,
    index_heads=2,
    index_topk=8,
    d_ff=40,
    n_experts=6,
    experts_per_token=2,
)
FULL = DecoderConfig(
    d_model=48, layer_types=("local", "full"), mlp_types=("dense",) * 2, n_heads=4, n_kv_heads=2,
    head_dim=16, tie_embeddings=True,
)  # fmt: skip
MLA = DecoderConfig(
    d_model=48,
    layer_types=("mla",) * 2,
    mlp_types=("dense",) * 2,
    attention={"mla": {"kv_lora_rank": 24, "nope_dim": 12, "v_dim": 10}},
    n_heads=4,
    rope_dim=8,
    index_heads=2,
    index_topk=8,
)


@pytest.mark.parametrize(
    "config, length",
    [(V4, 256), (V4.replace(hc_streams=2), 256), (FULL, 128), (MLA, 128)],
    ids=["v4", "streams", "full", "mla"],
)
def test_operations_are_those_of_the_traced_step(config: DecoderConfig, length: int) -> None:
    model = models.build(config.replace(kernels="reference"))  # one program, not one a platform
    cache = state.abstract(model.cache_spec, 1, length)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.make_jaxpr(lambda *x: model.stack.step(*x, None))(
        model.abstract_params(), token, cache
    )
    counted = counting.decode_flops(model, length)
    assert sum(counted.values()) == products(traced.jaxpr)
    assert all(counted[x] > 0 for x in ("weights", "attention"))


def test_rows_that_are_not_visible_cost_nothing() -> None:
    model = models.build(V4)
    short, long = (counting.decode_flops(model, n) for n in (4, 64))
    assert short["weights"] == long["weights"]
    # One entry a layer and four rows of each window, against windows that are full.
    each = 4 * V4.n_heads * V4.head_dim
    assert short["attention"] == each * (5 * 4 + 4 * 1)
    assert long["attention"] == each * (5 * 16 + 2 * 8 + 2 * 16)
    assert long["index"] == 16 * short["index"] == 2 * 2 * V4.index_heads * V4.index_dim * 16
    half = counting.decode_flops(model, 64, counting.HALF_INDEXER)
    assert half == {**long, "index": long["index"] / 2}


def test_an_unknown_mechanism_is_refused() -> None:
    fields = {"nsa_span": 8, "nsa_stride": 4, "nsa_select": 8, "nsa_top": 4}
    model = models.build(V4.replace(layer_types=("nsa",) * 5, attention={"nsa": fields}))
    with pytest.raises(ValueError, match="not known"):
        counting.decode_flops(model, 64)


def test_bytes_are_those_of_an_allocated_cache() -> None:
    spec = models.build(V4).cache_spec
    cache = state.init(spec, 1, 256)
    counted = counting.cache_bytes(spec, 256)
    assert sum(counted.values()) == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert sum(counted.values()) == spec.cache_bytes(1, 256)


def test_packed_rows() -> None:
    spec = models.build(geometries.v4_flash()).cache_spec
    small = models.build(geometries.deployed("v4_flash")).cache_spec
    # 21 CSA and 20 HCA layers.
    assert small.history_bytes_per_token() == 21 * (584 + 68) / 4 + 20 * 584 / 128
    assert counting.window_bytes_per_token(small) == 43 * 584
    assert [x.path for x in small.slots()] == [x.path for x in spec.slots()]
    cache = state.abstract(small, 1, 4_096)
    rows = {x.name: cache.leaf(x).shape[-1] for x in small.slots() if x.leaf.packing}
    assert rows == {"window": 584, "entries": 584, "index_keys": 68}
    small = models.build(geometries.deployed("v3_2")).cache_spec
    assert small.history_bytes_per_token() == 61 * (656 + 132)


def test_packed_rows_cost_the_same_operations() -> None:
    plain, small = (
        models.build(x) for x in (geometries.v4_flash(), geometries.deployed("v4_flash"))
    )
    assert counting.decode_flops(plain, 4_096) == counting.decode_flops(small, 4_096)
