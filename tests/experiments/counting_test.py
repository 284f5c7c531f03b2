"""Bytes against real caches, operations against the program that the decode step is traced to."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import models
from experiments import counting, counting_rows
from hetero_kv import state
from hetero_kv.attention import recurrence
from hetero_kv.attention.recurrent import Recurrent
from hetero_kv.contract import History, LayerSpec, Leaf
from models import geometries
from models.config import DecoderConfig
from tests.models import families


def products(jaxpr: core.Jaxpr) -> int:
    """Operations of all dot products; a loop of unknown length is taken to run once.

    What is computed twice from the same values counts once, as the compiler will have it.
    """
    total, seen = 0, set()
    for equation in jaxpr.eqns:
        if not equation.effects:
            same = (equation.primitive.name, *map(id, equation.invars), str(equation.params))
            if same in seen:
                continue
            seen.add(same)
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
    counted = counting.decode_flops(model, length)
    assert sum(counted.values()) == traced_products(model, length)
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


def traced_products(model: models.Decoder, length: int) -> int:
    """Of the decode step of a model, with a cache of `length` tokens."""
    cache = state.abstract(model.cache_spec, 1, length)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.make_jaxpr(lambda *x: model.stack.step(*x, None))(
        model.abstract_params(), token, cache
    )
    return products(traced.jaxpr)


def recurrent_layers(model: models.Decoder) -> list[tuple[int, Recurrent]]:
    """How often each occurs."""
    layers = [(x.repeats, y.attention) for x in model.stack.groups for y in x.layers]
    return [(n, x) for n, x in layers if isinstance(x, Recurrent)]


@pytest.mark.parametrize("name", families.names())
def test_operations_of_every_family(name: str) -> None:
    """Two operations are no dot products: the convolution, and the writing of the state."""
    model = models.build(families.model(name)[0].config.replace(kernels="reference"))
    counted = counting.decode_flops(model, 128)
    others = 0.0
    for repeats, layer in recurrent_layers(model):
        heads, keys, values = layer.form.state
        others += repeats * 3 * heads * keys * values  # its decay, the product, the sum
        conv = layer.conv
        others += repeats * 2 * conv.width * conv.channels if conv else 0
    assert sum(counted.values()) == traced_products(model, 128) + others
    assert bool(counted["state"]) == bool(recurrent_layers(model))


@pytest.mark.parametrize("name", ["gated_delta", "kda", "mamba2", "lightning"])
def test_operations_of_state_are_those_that_the_compiler_counts(name: str) -> None:
    heads, keys, values = 4, 64, 96
    shape = jax.ShapeDtypeStruct
    lead, f32 = (1, heads), jnp.float32
    by_channel, delta = name == "kda", name in ("gated_delta", "kda")
    x = recurrence.Operands(
        shape((*lead, keys), f32),
        shape((*lead, keys), f32),
        shape((*lead, values), f32),
        shape((*lead, keys if by_channel else 1), f32),
        shape(lead, f32) if delta else None,
    )
    matrix = shape((*lead, keys, values), f32)
    # Before fusions, which compute the decayed state once for each reader.
    flops = jax.jit(recurrence.step).lower(x, matrix).cost_analysis()["flops"]
    assert flops == pytest.approx((7 if delta else 5) * heads * keys * values, rel=0.03)
    fields = dict(
        key_heads=2, value_heads=4, key_dim=8, value_dim=12, linear_heads=4, linear_dim=8,
        ssm_heads=4, ssm_dim=8, ssm_states=12, n_heads=4, head_dim=8,
    )  # fmt: skip
    known = {
        "gated_delta": ("key_heads", "value_heads", "key_dim", "value_dim"),
        "kda": ("linear_heads", "linear_dim"),
        "mamba2": ("ssm_heads", "ssm_dim", "ssm_states"),
        "lightning": ("n_heads", "head_dim"),
    }[name]
    own = {x: fields[x] for x in known}
    model = models.build(FULL.replace(layer_types=(name,) * 2, attention={name: own}))
    sizes = {"gated_delta": 4 * 8 * 12, "kda": 4 * 8 * 8, "mamba2": 4 * 12 * 8,
             "lightning": 4 * 8 * 8}  # fmt: skip
    assert counting.decode_flops(model, 9)["state"] == 2 * (7 if delta else 5) * sizes[name]


NSA_SIZES = dict(nsa_span=2, nsa_stride=2, nsa_select=32, nsa_top=4)  # 64 blocks: one tile
NSA = FULL.replace(layer_types=("nsa",) * 2, attention={"nsa": NSA_SIZES}, window=8)


def test_operations_of_native_sparse_attention() -> None:
    model = models.build(NSA)
    (layer,) = model.stack.groups[0].layers
    counted = counting.decode_flops(model, 128)
    each = 4 * NSA.n_heads * NSA.head_dim
    # Traced is a step that closes a block, as one in two does, and that reads the ring and its own
    # row, one of which is not seen.
    sizes = layer.attention.compressor
    mlp = 2 * 2 * sizes.heads * (2 * sizes.dim * sizes.hidden + sizes.hidden * sizes.dim)
    assert sum(counted.values()) == traced_products(model, 128) - 2 * (mlp / 2 + each)
    # 64 blocks, all 128 tokens of four blocks of 32, 8 rows of the window.
    assert counted["attention"] == 2 * each * (64 + 128 + 8)
    assert counted["index"] == 2 * each / 2 * 64
    # Beyond, three whole blocks are picked, and what there is of the last one.
    longer = counting.decode_flops(model, 165)
    assert longer["attention"] == 2 * each * (82 + 3 * 32 + 5 + 8)


@pytest.mark.parametrize("config", [V4, MLA, NSA], ids=["v4", "mla", "nsa"])
def test_a_prompt_is_its_steps_with_one_head(config: DecoderConfig) -> None:
    model = models.build(config)
    steps = [counting.decode_flops(model, n) for n in range(38, 71)]
    whole = counting.prefill_flops(model, 37, 70)
    for part in ("index", "attention", "state"):
        assert whole[part] == sum(x[part] for x in steps)
    head = 2 * config.vocab_size * config.d_model
    assert whole["weights"] == sum(x["weights"] for x in steps) - 32 * head
    assert sum(counting.prefill_flops(model, 5, 5).values()) == 0
    with pytest.raises(ValueError, match="start"):
        counting.prefill_flops(model, 5, 4)


def test_an_unknown_mechanism_is_refused() -> None:
    class Mine:
        def spec(self) -> LayerSpec:
            return LayerSpec("mine", (("kv", Leaf(contract=History(1), component="kv")),))

    with pytest.raises(ValueError, match="Mine are not known"):
        counting_rows.rows(Mine(), np.int64(4), 8)


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
