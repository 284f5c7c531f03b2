"""Requests that begin like an earlier one, on the real engine: what `ttft` and `levels` time.

Both have a cell for each model and prompt length, measured once (`fill_cells`).
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

import models
from experiments import config_checks, progress, run_record
from experiments.bench import bench_config
from experiments.bench.disk_bench import let_go
from hetero_kv import Engine, Options, PrefixStore, Request
from hetero_kv.contract import CacheSpec
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.plan import DISK, Geometry
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.transfer import transfer_for
from hetero_kv.requests import Result
from hetero_kv.rows import Rows
from models.config import DecoderConfig

OFF = "off"  # an arm without a store
TIERS = ("host", "disk")
GRID = 128  # tokens of a call and of a block


def hybrid() -> DecoderConfig:
    """5.5M parameters: windows, CSA and HCA."""
    return bench_config.medium().model.replace(chunk=GRID, block=GRID, scan_layers=False)


def full() -> DecoderConfig:
    """The same widths with full attention in every layer, two heads of keys and values."""
    layers = len(hybrid().layer_types)
    return hybrid().replace(layer_types=("full",) * layers, n_kv_heads=2)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A window policy and the tier that prefixes come from, written `policy/tier`."""

    policy: str
    tier: str

    @classmethod
    def of(cls, text: str) -> "Arm":
        """Raises ValueError where there is no such policy or tier."""
        policy, _, tier = text.partition("/")
        if tier not in TIERS:
            raise ValueError(f"an arm is policy/tier with a tier of {TIERS}, got {text!r}")
        Policy.named(policy)
        return cls(policy, tier)


class Bench:
    """A model with random weights, and the engines of one size that its arms share.

    capacity: tokens of a slot.
    """

    def __init__(self, config: DecoderConfig, capacity: int, seed: int):
        self.config, self.capacity, self.seed = config, capacity, seed
        self.model = models.build(config)
        made = jax.jit(self.model.init)(jax.random.key(seed))
        self.params: Params = self.model.prepare(made)
        self.spec = self.model.cache_spec
        self.identity = Identity.of(self.spec, self.params, config, batch=1)
        self.rows: Rows | None = None  # compiled by the first engine, used by all

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    def arms(self, texts: tuple[str, ...]) -> list[str]:
        """Those that differ: without windows and tails one a tier, whatever the policy."""
        if Geometry.of(self.spec).checkpoint:
            return list(dict.fromkeys(texts))
        first = {Arm.of(text).tier: text for text in reversed(texts)}
        return [text for text in texts if first[Arm.of(text).tier] == text]

    def shared_lengths(self, prompt: int, hits: tuple[float, ...]) -> dict[float, int]:
        """By share of a prompt of so many tokens, the resumable length at or below it."""
        step, most = self.spec.granularity, self.spec.largest_boundary(prompt)
        return {hit: min(int(hit * prompt) // step * step, most) for hit in hits}

    def bytes_of(self, length: int, policy: str) -> int:
        """Of what is read to resume at a length: history, and a checkpoint unless replayed."""
        if not length:
            return 0
        replays = Policy.named(policy).checkpoints.replay
        history = self.spec.blocks_in(length) * self.spec.block_bytes()
        return history + (0 if replays else self.spec.checkpoint_bytes())

    @contextlib.contextmanager
    def served(self, arm: str, *, directory: str = "", room: float = 2.0) -> Iterator["Served"]:
        """An engine under an arm, or `OFF`.

        directory: on the disk in question; "": temporary. room: prompts' worth that is published
        until a prefix is asked for again, which must not be evicted meanwhile.
        """
        with contextlib.ExitStack() as stack:
            store = place = None
            if arm != OFF:
                made = stack.enter_context(tempfile.TemporaryDirectory(dir=directory or None))
                place = pathlib.Path(made)
                store = self._store(Arm.of(arm), place, room)
                stack.callback(store.close)
            yield Served(self, arm, store, place)

    def _store(self, arm: Arm, place: pathlib.Path, prompts: float) -> PrefixStore:
        spec = self.spec
        step = spec.checkpoint_bytes() + spec.granularity // spec.block * spec.block_bytes()
        # One more for the document; and half of all is for either kind of group.
        room = int(2 * (prompts + 1) * self.capacity / spec.granularity * step) + (1 << 20)
        sizes: dict = {"host_bytes": room}
        if arm.tier == DISK:
            # Host memory holds the least that a store insists on.
            transfer, blocks = transfer_for(spec), spec.blocks_in(spec.minimum_resumable)
            least = sum(transfer.history_layout(x).nbytes for x in range(blocks))
            sizes["host_bytes"] = transfer.checkpoint_layout.nbytes + least
            sizes |= {"disk_dir": place, "disk_bytes": 2 * room + (16 << 20)}
        return PrefixStore(spec, self.identity, policy=arm.policy, **sizes)


class Served:
    """One engine with one slot, and prompts whose first tokens are those of one document."""

    def __init__(
        self, bench: Bench, arm: str, store: PrefixStore | None, place: pathlib.Path | None
    ):
        self.bench, self.arm, self.store, self.place = bench, arm, store, place
        self.engine = self.engine_of(store)
        vocab, seed = bench.config.vocab_size, bench.seed
        self._document = np.random.default_rng(seed).integers(0, vocab, bench.capacity)
        self._fresh = np.random.default_rng((seed, 1))

    def engine_of(self, store: PrefixStore | None, **options: object) -> Engine:
        """An engine of the bench's sizes over a store (or what stands for one)."""
        bench = self.bench
        engine = Engine(
            bench.model,
            bench.params,
            store=store,
            slots=1,
            capacity=bench.capacity,
            reuse="validated" if store is not None else "off",
            options=Options(**options),
            rows=bench.rows,
        )
        bench.rows = engine.rows
        return engine

    def prompt(self, length: int, shared: int) -> np.ndarray:
        """i32[length]: the document's first `shared` tokens, then tokens never seen before."""
        fresh = self._fresh.integers(0, self.bench.config.vocab_size, length - shared)
        return np.concatenate([self._document[:shared], fresh]).astype(np.int32)

    def publish(self, length: int) -> None:
        """Serves a request of the document's first tokens alone: it ends there."""
        self.finished(self.prompt(length, length))

    def settle(self) -> None:
        """Before a request from disk: what was written is there, and in no memory any more."""
        if self.store is None or self.store.disk is None:
            return
        # A short new prompt takes the room in host memory; then the system's is let go of.
        self.finished(self.prompt(self.bench.spec.granularity + 1, 0))
        flushed = self.store.flush()
        if not flushed.ok:
            raise RuntimeError(f"the prefixes are not on disk: {flushed.failure}")
        for path in self.place.rglob("*.seg"):
            let_go(path)

    def ask(self, length: int, shared: int, answer: int = 1) -> Result:
        """Serves a new request that shares so many tokens; the disk is settled before it.

        Raises RuntimeError where another length was resumed, or from another tier, than meant.
        """
        self.settle()
        result = self.finished(self.prompt(length, shared), answer)
        replays = self.arm != OFF and Policy.named(Arm.of(self.arm).policy).checkpoints.replay
        wanted = 0 if self.store is None else shared
        if result.resumable_length != wanted and not replays:
            why = "; ".join(map(str, result.reasons))
            raise RuntimeError(f"{self.arm}: {result.resumable_length} of {wanted} tokens: {why}")
        if self.arm.endswith(DISK) and wanted and DISK not in result.routes.values():
            raise RuntimeError(f"{self.arm}: not from disk: {result.routes}")
        return result

    def finished(self, prompt: np.ndarray, answer: int = 1) -> Result:
        """Serves one request alone."""
        (result,) = self.engine.generate([Request(prompt, answer)])
        if result.status != "finished":
            raise RuntimeError(f"{self.arm}: {result.status}: {result.why}")
        return result


class Config(Protocol):
    """What both need of a configuration; it has the model of each kind by its name."""

    kinds: tuple[str, ...]
    prompts: tuple[int, ...]
    repeats: int
    seconds: float
    seed: int
    workdir: str


KINDS = ("hybrid", "full")


def check(config: Config) -> dict[str, CacheSpec]:
    """The cache of each kind's model; ValueError where a field that both have makes no sense."""
    config_checks.check_types(config)
    if not config.kinds or set(config.kinds) - set(KINDS):
        raise ValueError(f"kinds={config.kinds} must be of {KINDS}")
    config_checks.not_empty(config, "prompts")
    config_checks.at_least(config, 2, "prompts")
    config_checks.at_least(config, 1, "repeats")
    config_checks.at_least(config, 0, "seed", "seconds")
    config_checks.check_workdir(config)
    found = {}
    for kind in config.kinds:
        try:
            found[kind] = models.build(getattr(config, kind)).cache_spec
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
    return found


def fill_cells(
    config: Config,
    results: dict,
    fields: Sequence[str],
    capacity: int,
    measure: Callable[[Bench, str, int, progress.Progress], dict],
    whole: Callable[[str, int], bool] = lambda kind, prompt: True,
) -> None:
    """Fills `results["cells"]` with those of `results.json`, and what it lacks; writes after each.

    Args:
        results: with "config", the configuration's values, and an empty "cells".
        fields: of the configuration, those that decide a cell, beside the model.
        capacity: tokens of a slot.
        measure: of a kind's bench and a prompt length, a cell's own fields.
        whole: of a kind and a prompt length, whether nothing is missing but the cell.
    """
    workdir, values = pathlib.Path(config.workdir), results["config"]
    old = (run_record.read_json(workdir / "results.json") or {}).get("cells", {})
    wanted = [(kind, prompt) for kind in config.kinds for prompt in sorted(config.prompts)]
    bench: Bench | None = None
    for number, (kind, prompt) in enumerate(wanted, 1):
        name = f"{kind}/{prompt}"
        asked = {
            "cell": name,
            "capacity": capacity,
            "model": values[kind],
            "versions": run_record.versions(),
            **{field: values[field] for field in fields},
        }
        digest = run_record.digest(asked)
        cell = old.get(name, {})
        if cell.get("digest") != digest or not whole(kind, prompt):
            if bench is None or bench.config != getattr(config, kind):
                bench = Bench(getattr(config, kind), capacity, config.seed)
            title = f"[{number}/{len(wanted)}] {name}"
            with progress.Progress(config.repeats, title=title) as bar:
                cell = measure(bench, kind, prompt, bar)
            cell |= {"kind": kind, "digest": digest, "parameters": bench.parameters}
        results["cells"][name] = cell
        run_record.write_results(workdir, results)
