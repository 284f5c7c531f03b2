"""Small random models that tests share, one for every switch of the config; families by their name.

Compilation takes most of the time of these tests, so models, weights and results are made once per
process, and every test uses the same number of rows, capacity and call size.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import models
from hetero_kv.contract import Derived, Evidence, LeafSlot, Scratch
from hetero_kv.params import Params
from hetero_kv.state import Cache
from models.config import DecoderConfig
from models.decoder import Decoder
from models.hf import deepseek_v4
from tests.models import families
from tests.models.weights import random_params
from tests.oracle import decoder as oracle
from tests.oracle.trace import Trace

ROWS = 2
CAPACITY = 64
CHUNK = 16
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # for what is compiled here and run once

BASE = DecoderConfig(
    vocab_size=61,
    d_model=24,
    layer_types=("swa", "csa", "hca"),
    mlp_types=("dense", "dense", "dense"),
    n_heads=4,
    head_dim=12,
    rope_dim=8,
    window=6,
    n_kv_heads=2,
    csa_ratio=4,
    hca_ratio=8,
    index_heads=8,
    index_dim=8,
    index_topk=3,
    rope_theta=100.0,
    compress_rope_theta=1000.0,
    d_ff=16,
    init_scale=1.0,
    chunk=CHUNK,
)
# Every switch is on in one of these and off in another.
CHANGES: Mapping[str, dict] = {
    "v4": dict(
        layer_types=("swa", "csa", "hca"),
        mlp_types=("hash_moe", "moe", "moe"),
        q_lora_rank=10,
        o_groups=2,
        o_lora_rank=6,
        window=7,
        swiglu_limit=1.0,
        hc_streams=4,
        yarn_factor=4.0,
        yarn_original_max=32,
        yarn_beta_fast=2.0,
        yarn_beta_slow=0.25,
    ),
    "scanned": dict(  # one body of two layers, run twice
        layer_types=("csa", "hca", "csa", "hca"),
        mlp_types=("moe", "dense", "moe", "dense"),
        hc_streams=2,
        n_shared_experts=2,
    ),
    "full_mixed": dict(
        layer_types=("full", "csa", "hca"),
        mlp_types=("dense", "moe", "dense"),
        csa_ratio=3,
        hca_ratio=7,
        window=3,
        hc_streams=1,
        scan_layers=False,
    ),
    "no_overlap": dict(
        layer_types=("csa", "hca"),
        mlp_types=("dense", "dense"),
        csa_ratio=2,
        hca_ratio=5,
        index_topk=2,
        window=1,
        csa_overlap=False,
        tie_embeddings=True,
        q_lora_rank=9,
    ),
    "no_window": dict(
        layer_types=("csa", "hca"),
        mlp_types=("moe", "dense"),
        window=0,
        n_shared_experts=0,
        o_groups=4,
        o_lora_rank=5,
    ),
    "nothing_to_see": dict(  # the first tokens see no key at all, not even a sink
        layer_types=("hca", "csa"),
        mlp_types=("dense", "dense"),
        window=0,
        sinks=False,
        rope_dim=0,
        indexer=False,
        swiglu_limit=0.5,
    ),
    "all_entries": dict(
        layer_types=("csa", "swa"),
        mlp_types=("hash_moe", "moe"),
        index_topk=-1,
        window=8,
        experts_per_token=1,
    ),
    "packed": dict(  # one leaf of every row layout
        layer_types=("swa", "csa", "full"),
        mlp_types=("dense", "dense", "dense"),
        cache_layouts={
            "window": "fp8_rope",
            "entries": "int8",
            "index_keys": "fp4",
            "kv": "fp8_f32",
        },
    ),
    "full": dict(
        layer_types=("full", "full"), mlp_types=("dense", "dense"), qk_norm=False, n_kv_heads=1
    ),
}


def config(name: str, **changes) -> DecoderConfig:
    """The configuration of that name."""
    return BASE.replace(**(CHANGES[name] | changes))


@functools.cache
def model(name: str) -> tuple[Decoder, Params]:
    """A model and its weights."""
    if name in families.every():
        return families.model(name)
    made = models.build(config(name))
    return made, random_params(made, seed=2)


@functools.cache
def tokens() -> np.ndarray:
    """i32[ROWS, CAPACITY]."""
    size = (ROWS, CAPACITY)
    return np.random.default_rng(3).integers(0, BASE.vocab_size, size).astype(np.int32)


def empty(made: Decoder, poison: bool = False) -> Cache:
    """A cache of the sizes that all tests share."""
    return made.init_cache(ROWS, CAPACITY, poison)


def copy(cache: Cache) -> Cache:
    """A cache of its own, since model calls donate theirs."""
    return jax.tree.map(jnp.copy, cache)


@functools.cache
def forward(name: str) -> np.ndarray:
    """Logits f32[ROWS, CAPACITY, V] of the differentiable forward."""
    made, params = model(name)
    return np.asarray(jax.jit(made.forward, compiler_options=FAST_COMPILE)(params, tokens()))


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    """The weights by the reference's names."""
    return dict(deepseek_v4.state_dict(*model(name)))


@functools.cache
def reference(name: str, row: int) -> tuple[np.ndarray, Trace]:
    """Logits float64[T, V] and internals of the reference for one row of `tokens`."""
    return oracle.forward(model(name)[0].config, weights(name), tokens()[row])


def decode(
    name: str, cache: Cache, steps: int, active: Sequence[bool] = (True,) * ROWS
) -> tuple[np.ndarray, Cache]:
    """Feeds each row its own next tokens, one by one: f32[ROWS, steps, V] and the cache."""
    made, params = model(name)
    out, rows, moves = [], np.arange(ROWS), np.asarray(active)
    length = np.asarray(cache.length)
    for step in range(steps):
        token = tokens()[rows, np.minimum(length + step * moves, CAPACITY - 1)]
        logits, cache = made.decode_step(params, token, cache, moves)
        out.append(np.asarray(logits))
    return np.stack(out, axis=1), cache


def live_values(made: Decoder, cache: Cache) -> Iterator[tuple[LeafSlot, int, np.ndarray]]:
    """Yields (slot, row, values of the live rows [repeats, live, ...]) of every stored leaf.

    Evidence of positions has the live rows of the leaf it vouches for.
    """
    for slot in made.cache_spec.slots():
        leaf, contract = slot.leaf, slot.leaf.contract
        if isinstance(contract, Derived | Scratch):
            continue
        values = np.asarray(cache.leaf(slot))
        if isinstance(contract, Evidence) and contract.kind == "positions":
            leaf = dict(made.cache_spec.segments[slot.segment].layers[slot.layer].leaves)[
                contract.of
            ]
        for row, length in enumerate(np.asarray(cache.length)):
            value = values[:, row]
            if leaf.row_count(cache.capacity):
                value = value[:, leaf.live_rows(int(length), cache.capacity)]
            yield slot, row, value


def assert_same_state(made: Decoder, one: Cache, two: Cache, atol: float = 0.0) -> float:
    """Equal lengths, evidence and live rows; bitwise with atol = 0. Returns the largest error."""
    np.testing.assert_array_equal(one.length, two.length)
    worst = 0.0
    pairs = zip(live_values(made, one), live_values(made, two), strict=True)
    for (slot, row, a), (_, _, b) in pairs:
        where = f"{slot.path} of row {row}"
        if isinstance(slot.leaf.contract, Evidence) or not atol:
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=where)
        worst = max(worst, np.abs(a - b).max(initial=0.0))
    return worst
