"""Restoring a prefix from disk beside prefilling it: what reuse buys where it comes from disk.

The store's host memory holds nothing but the minimum, so every restore reads the disk. Both arms
start from an empty cache and end when the cache is there; lookup, keys and lease are counted.
"""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

import models
from experiments import config_checks
from experiments.bench import bench_config, timing
from experiments.bench.disk_bench import let_go
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.state import Cache
from models.config import DecoderConfig

MIB = 1 << 20


def about_7m() -> DecoderConfig:
    """7M parameters: `bench_config.medium` with six experts."""
    return bench_config.medium().model.replace(n_experts=6, d_ff=176, scan_layers=False)


@dataclasses.dataclass(kw_only=True)
class RestoreConfig:
    """Models, and the prefix."""

    small: DecoderConfig = dataclasses.field(default_factory=about_7m)
    large: DecoderConfig = dataclasses.field(
        default_factory=lambda: bench_config.large().model.replace(scan_layers=False)
    )
    sizes: tuple[str, ...] = ("small", "large")
    length: int = 2_048  # tokens restored or prefilled
    prefixes: int = 4  # distinct ones, restored in turns
    block: int = 256  # tokens; one object of history each
    directory: str = ""  # on the disk in question; "": that of temporary files
    repeats: int = 7
    seconds: float = 60.0
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError where a field makes no sense, or no model can be built."""
        config_checks.check_types(self)
        config_checks.check_directory(self)
        known = tuple(GOALS)
        if not self.sizes or set(self.sizes) - set(known):
            raise ValueError(f"sizes={self.sizes} must be one or more of {known}")
        config_checks.at_least(self, 1, "length", "prefixes", "block", "repeats")
        config_checks.at_least(self, 0, "seconds", "seed")
        for name in self.sizes:
            spec = config_checks.built(self.of_size(name), name).cache_spec
            if self.length % spec.granularity or self.length < spec.minimum_resumable:
                raise ValueError(
                    f"length={self.length}: {name} resumes multiples of {spec.granularity} tokens "
                    f"from {spec.minimum_resumable} on"
                )

    def of_size(self, name: str) -> DecoderConfig:
        """The model of that name, with the block that is measured."""
        return getattr(self, name).replace(block=self.block)


GOALS = {"small": 50, "large": 120}  # prefill time over restore time


def run(config: RestoreConfig) -> list[dict]:
    """A row per model: milliseconds of both arms (medians) and the median of their ratios."""
    return [_measure(name, config) for name in config.sizes]


def _measure(name: str, config: RestoreConfig) -> dict:
    model_config = config.of_size(name)
    model = models.build(model_config)
    params = model.prepare(jax.jit(model.init)(jax.random.key(config.seed)))
    rng = np.random.default_rng(config.seed)
    shape = (config.prefixes, config.length + 1)
    prompts = rng.integers(0, model_config.vocab_size, shape).astype(np.int32)
    identity = Identity.of(model.cache_spec, params, model_config, batch=1)
    spec = model.cache_spec
    # Room for the shortest resumable prefix, which a store insists on.
    blocks = spec.minimum_resumable // spec.block
    least = spec.checkpoint_bytes() + spec.block_bytes() * blocks + 4_096  # sections are aligned
    with tempfile.TemporaryDirectory(dir=config.directory or None) as directory:
        store = PrefixStore(
            spec,
            identity,
            host_bytes=least,
            disk_dir=directory,
            disk_bytes=256 * MIB,
            policy="end",
        )
        arms = _Arms(model, params, store, prompts, pathlib.Path(directory))
        arms.publish_all()
        samples = timing.in_turns(
            {"restore": arms.restore, "prefill": arms.prefill},
            repeats=config.repeats,
            least_repeats=3,
            seconds=config.seconds,
        )
        restored = arms.bytes_restored
        store.close()
    ratio = statistics.median(
        b / a for a, b in zip(samples["restore"], samples["prefill"], strict=True)
    )
    return {
        "part": "restore",
        "model": name,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "tokens": config.length,
        "block": config.block,
        "restored_bytes": restored,
        "restore_ms": 1e3 * statistics.median(samples["restore"]),
        "prefill_ms": 1e3 * statistics.median(samples["prefill"]),
        "prefill_over_restore": ratio,
        "goal": GOALS.get(name, 0),
    }


class _Arms:
    """Both ways to a cache that stands at the prefix's end, one prefix after the other."""

    def __init__(
        self,
        model: models.Decoder,
        params: dict,
        store: PrefixStore,
        prompts: np.ndarray,
        directory: pathlib.Path,
    ):
        self._model, self._params, self._store = model, params, store
        self._prompts, self._directory = prompts, directory
        self.bytes_restored = 0

    def publish_all(self) -> None:
        """Every prefix on disk."""
        for row in self._prompts:
            _, cache = self._prefilled(row, self._empty())
            self._store.publish(row, cache)
        flushed = self._store.flush()
        if not flushed.ok:
            raise RuntimeError(f"the prefixes are not on disk: {flushed.failure}")

    def restore(self) -> float:
        """Seconds of one restore, the mean over the prefixes. The files were let go of before."""
        for path in self._directory.rglob("*.seg"):
            let_go(path)
        return self._each(self._restored)

    def prefill(self) -> float:
        """Seconds of one prefill, likewise."""
        return self._each(lambda row, empty: self._prefilled(row, empty)[1])

    def _each(self, run: Callable[[np.ndarray, Cache], Cache]) -> float:
        spent = 0.0
        for row in self._prompts:
            empty = jax.block_until_ready(self._empty())
            began = time.perf_counter()
            cache = jax.block_until_ready(run(row, empty))
            spent += time.perf_counter() - began
            if int(cache.length[0]) != len(row) - 1:
                raise RuntimeError(f"{cache.length=} is not the whole prefix")
        return spent / len(self._prompts)

    def _empty(self) -> Cache:
        return self._model.init_cache(1, self._prompts.shape[1])

    def _prefilled(self, row: np.ndarray, empty: Cache) -> tuple[jax.Array, Cache]:
        tokens = row[None, :-1]
        return self._model.prefill(self._params, tokens, empty, logits="last")

    def _restored(self, row: np.ndarray, empty: Cache) -> Cache:
        with self._store.lookup(row) as lease:
            cache = self._store.restore(lease, empty)
            if set(lease.routes.values()) != {"disk"}:
                raise RuntimeError(f"not from disk: {lease.routes}")
            found = (*lease.history, lease.checkpoint)
            self.bytes_restored = sum(x.nbytes for x in found if x is not None)
        return cache
