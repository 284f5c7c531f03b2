"""The rows of `tables`, as JSON values: each function counts one published claim's numbers."""

import numpy as np

import models
from experiments import allocation, counting
from experiments.tables_config import Price, TablesConfig
from hetero_kv.contract import CacheSpec
from models import geometries
from models.config import DecoderConfig

# V4's index keys are FP4, V3.2's are FP8.
CONVENTIONS = {
    "plain": dict.fromkeys(geometries.DEPLOYED, counting.PLAIN),
    "fp4_half": {
        "v4_pro": counting.HALF_INDEXER,
        "v4_flash": counting.HALF_INDEXER,
        "v3_2": counting.PLAIN,
    },
}
GIB = 1 << 30


def gqa8() -> DecoderConfig:
    """V3.2's depth and width with 8 key and value heads of 128 channels in every layer."""
    base = geometries.v3_2()
    return DecoderConfig(
        d_model=base.d_model,
        layer_types=("full",) * 61,
        mlp_types=("none",) * 61,
        n_heads=64,
        n_kv_heads=8,
        head_dim=128,
        rope_dim=128,
        **geometries.HALF,
        **geometries.GRID,
    )


def interleaved(local: int, layers: int, window: int, kv_heads: int = 16) -> DecoderConfig:
    """`local` layers with windows before each full one; 0: all are full."""
    unit = ("local",) * local + ("full",)
    return DecoderConfig(
        layer_types=unit * (layers // len(unit)),
        mlp_types=("none",) * layers,
        n_heads=kv_heads,
        n_kv_heads=kv_heads,
        head_dim=128,
        rope_dim=128,
        window=window,
        **geometries.HALF,
        **geometries.GRID,
    )


def spec_of(config: DecoderConfig) -> CacheSpec:
    """The model's own cache declaration."""
    return models.build(config).cache_spec


def kv_sizes(config: TablesConfig) -> dict:
    """A1, A2, A7: bytes of one sequence by model; packed as deployed, and in bfloat16."""
    found = {}
    for name in ("v3_2", "v4_pro", "v4_flash", "gqa8"):
        spec = spec_of(gqa8() if name == "gqa8" else geometries.RELEASED[name]())
        row = {"bf16": counting.cache_bytes(spec, config.context)}
        row["bf16_total"] = sum(row["bf16"].values())
        row["bf16_per_token"] = spec.history_bytes_per_token()
        if name in geometries.DEPLOYED:
            small = spec_of(geometries.deployed(name))
            row["packed"] = counting.cache_bytes(small, config.context)
            row["packed_total"] = sum(row["packed"].values())
            row["packed_per_token"] = small.history_bytes_per_token()
            row["window_bytes_per_token"] = counting.window_bytes_per_token(small)
            row["curve"] = [sum(counting.cache_bytes(small, n).values()) for n in config.contexts]
        found[name] = row
    return found


def operations(config: TablesConfig) -> dict:
    """A3: operations of a decode step, by convention, model and part."""
    made = {name: models.build(geometries.RELEASED[name]()) for name in geometries.DEPLOYED}
    return {
        key: {
            name: counting.decode_flops(model, config.context, of[name])
            for name, model in made.items()
        }
        for key, of in CONVENTIONS.items()
    }


def ratios(config: TablesConfig) -> dict:
    """A4, A5: bytes of all-full attention over those of a mix, at `ratio_context` tokens."""
    n, layers = config.ratio_context, config.ratio_layers

    def size(local: int, window: int, count: int = layers) -> int:
        spec = spec_of(interleaved(local, count, window))
        return sum(counting.cache_bytes(spec, n).values())

    full = size(0, 1)
    mixes = {
        f"{local}:1": {str(w): full / size(local, w) for w in (512, 1_024, 2_048, 4_096)}
        for local in (1, 3, 5, 7)
    }
    # MiMo-V2-Flash: 48 layers, 9 of them full, the first one among these.
    first = DecoderConfig(**{
        **vars(interleaved(0, 48, 128)),
        "layer_types": ("full", *(("local",) * 5 + ("full",)) * 7, *("local",) * 4, "full"),
    })  # fmt: skip
    mimo = sum(counting.cache_bytes(spec_of(first), n).values())
    one = full / layers  # bytes of a full layer
    return {
        "mixes": mixes,
        "mimo": {
            "whole": 48 * one / mimo,
            "first layer aside": 47 * one / (mimo - one),
        },
    }


def allocator(config: TablesConfig) -> dict:
    """A6: concurrency and waste by model and arm."""
    rng = np.random.default_rng(config.seed)
    draws = rng.lognormal(np.log(config.median), config.sigma, config.requests)
    lengths = [int(x) for x in np.clip(draws, config.shortest, config.longest)]
    flash = spec_of(geometries.deployed("v4_flash"))
    specs = {
        "all full": spec_of(interleaved(0, config.ratio_layers, 1)),
        "5:1, W = 1,024": spec_of(interleaved(5, config.ratio_layers, 1_024)),
        "V4-Flash": flash,
    }
    found: dict[str, dict] = {}
    for name, spec in specs.items():
        forms = allocation.forms_of(spec, config.block)
        # Each has the bytes that so many average requests take under the plainest arm.
        each = [allocation.Pool("uniform", forms, 0, lengths).need(n) for n in lengths]
        capacity = config.concurrent * sum(each) // len(each)
        found[name] = {
            arm: vars(allocation.simulate(arm, forms, capacity, lengths, config.seed))
            for arm in allocation.ARMS
        }
    return found


def prices(config: TablesConfig, bytes_per_token: float) -> dict:
    """A8: what reuse saves of the price of prompts, and when keeping a token pays."""
    return {
        x.name: {
            "as_of": x.as_of,
            "times": x.miss / x.hit if x.hit else float("inf"),
            "saved": saved_share(x, config.hit),
            "break_even_reuses_per_hour": rent_break_even(
                x, bytes_per_token, config.dollars_per_gb_hour
            ),
        }
        for x in config.prices
    }


def saved_share(price: Price, hit: float) -> float:
    """Share of the cost of prompts that hits save: 1 - ((1 - h) miss + h hit) / miss."""
    return hit * (price.miss - price.hit) / price.miss


def rent_break_even(price: Price, bytes_per_token: float, dollars_per_gb_hour: float) -> float:
    """Reuses an hour above which keeping a token's bytes costs less than computing it anew."""
    rent = bytes_per_token / 1e9 * dollars_per_gb_hour
    return rent / ((price.miss - price.hit) / 1e6)
