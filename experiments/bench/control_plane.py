"""Times the control plane with sizes only: keys, lookup and lease, publish, release; metrics on."""

import dataclasses
import gc
import itertools
import statistics
import time

import numpy as np

from experiments import config_checks
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.keys import block_keys
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.sized import SizedStore

PARTS = ("key", "lookup", "publish", "release")
GOALS = {64: 5_000, 128: 9_000}  # requests per second, everything held
GC_THRESHOLDS = (50_000, 20, 50)
HISTORY = ("csa entries", "csa index keys")
CHECKPOINT = ("windows", "tails")
BLOCK_TOKEN_BYTES, CHECKPOINT_BYTES = 3_514, 3_214_336  # of V4-Flash


@dataclasses.dataclass(kw_only=True)
class ControlPlaneConfig:
    """Prompts that share prefixes, as requests one after the other in one process.

    rooms: capacity over what all prompts take; below 1 publishing evicts.
    """

    prompts: int = 2_000
    length: int = 4_096  # tokens
    prefixes: int = 50
    shared: int = 2_048  # tokens of a prefix
    blocks: tuple[int, ...] = (64, 128)  # tokens
    rooms: tuple[float, ...] = (1.5, 0.25)
    policy: str = "fork/lru"
    repeats: int = 3  # the median is reported
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        config_checks.not_empty(self, "blocks", "rooms")
        config_checks.at_least(self, 1, "prompts", "prefixes", "repeats", "shared", "blocks")
        config_checks.above(self, 0, "rooms")
        config_checks.at_least(self, 0, "seed")
        if self.length <= self.shared:
            raise ValueError(f"shared={self.shared} must be below length={self.length}")
        if max(self.blocks) > self.length:
            raise ValueError(
                f"blocks={self.blocks}: no prompt of length={self.length} has a whole block of "
                f"{max(self.blocks)} tokens"
            )
        Policy.named(self.policy)


def run(config: ControlPlaneConfig) -> list[dict]:
    """One row per block size and room. Times are CPU time of the process, so that other load on
    the machine counts as little as can be; `wall_per_s` is what passed meanwhile."""
    prompts = _prompts(config)
    rows = []
    for block, room in itertools.product(config.blocks, config.rooms):
        whole = [_once(config, prompts, block, room, split=False) for _ in range(config.repeats)]
        split = _once(config, prompts, block, room, split=True)
        median = statistics.median(x["cpu_s"] for x in whole)
        rows.append(
            {
                "part": "control_plane",
                "block": block,
                "room": room,
                "requests_per_s": config.prompts / median,
                "wall_per_s": config.prompts / statistics.median(x["wall_s"] for x in whole),
                "microseconds": {k: split[k] / config.prompts * 1e6 for k in PARTS},
                "resumed": split["resumed"],
                "evicted_groups": split["evicted_groups"],
                "goal": GOALS.get(block) if room >= 1 else None,
                "samples_cpu_s": [x["cpu_s"] for x in whole],
            }
        )
    return rows


def _prompts(config: ControlPlaneConfig) -> list[np.ndarray]:
    rng = np.random.default_rng(config.seed)
    prefixes = rng.integers(0, 50_000, (config.prefixes, config.shared), dtype=np.int32)
    rest = config.length - config.shared
    return [
        np.concatenate([prefixes[i % len(prefixes)], rng.integers(0, 50_000, rest, dtype=np.int32)])
        for i in range(config.prompts)
    ]


def _once(
    config: ControlPlaneConfig, prompts: list[np.ndarray], block: int, room: float, split: bool
) -> dict:
    identity = Identity(
        weights="0" * 64, config="", leaves=(), block=block, chunk=block, batch=1, backend="none"
    )
    geometry = Geometry(block, block, 5_504, HISTORY, CHECKPOINT)
    block_bytes = block * BLOCK_TOKEN_BYTES
    new = config.prompts * (config.length - config.shared) + config.prefixes * config.shared
    states = 2 * config.prompts + config.prefixes
    store = SizedStore(
        geometry,
        block_bytes,
        CHECKPOINT_BYTES,
        capacity=int(room * (new // block * block_bytes + states * CHECKPOINT_BYTES)),
        policy=config.policy,
    )
    # As servers do: what is allocated at the start is not walked again, nor what lives on for long
    # every few hundred objects. The index is a tree of many small ones.
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        times = _timed(store, identity, prompts) if split else _plain(store, identity, prompts)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    problems = store.catalog.problems()
    if problems:
        raise RuntimeError(f"the ledger is off after the benchmark: {problems[:3]}")
    counters = store.counters
    resumed = counters.get("resumable_tokens_total") / counters.get("prompt_tokens_total")
    kinds = ("history", "checkpoint")
    evicted = sum(counters.get("evicted_groups_total", kind=x) for x in kinds)
    return {**times, "resumed": resumed, "evicted_groups": evicted}


def _plain(store: SizedStore, identity: Identity, prompts: list[np.ndarray]) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    for tokens in prompts:
        keys = block_keys(identity, tokens)
        with store.lookup(keys) as lease:
            store.publish(keys, len(keys.keys), lease.checkpoint_points)
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def _timed(store: SizedStore, identity: Identity, prompts: list[np.ndarray]) -> dict:
    spent, clock = dict.fromkeys(PARTS, 0.0), time.process_time
    for tokens in prompts:
        marks = [clock()]
        keys = block_keys(identity, tokens)
        marks.append(clock())
        lease = store.lookup(keys)
        marks.append(clock())
        store.publish(keys, len(keys.keys), lease.checkpoint_points)
        marks.append(clock())
        lease.release()
        marks.append(clock())
        for part, start, stop in zip(PARTS, marks, marks[1:], strict=False):
            spent[part] += stop - start
    return spent
