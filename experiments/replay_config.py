"""What `replay` runs: a trace, and which policies at which capacities."""

import dataclasses

from experiments import config_checks, replay_lib, traces
from experiments.replay_lib import Cell

PAPER_LRU = (5_859, 97_656)  # blocks: 3M and 50M tokens
# The fields that name what a part runs.
LISTS = {
    "ideal": ("lru_blocks",),
    "eviction": ("evictions", "capacities"),
    "placement": ("placements",),
    "budget": ("budgets", "budget_placements", "budget_evictions"),
}
PARTS = tuple(LISTS)


@dataclasses.dataclass(kw_only=True)
class ReplayConfig:
    """One run: a cell per policy and capacity.

    Parts: "ideal" (unlimited, and LRU at `lru_blocks`) and "eviction" count blocks and the last
    part of a block, as published figures do; "placement" (unlimited) and "budget" (all bytes of
    both kinds within a share of what the whole history takes) see prompts as the store does.
    """

    trace: str = ""  # a file of Mooncake's format; "": the generator
    limit: int = 0  # requests, 0: all
    generator: traces.GeneratorConfig = dataclasses.field(default_factory=traces.GeneratorConfig)
    parts: tuple[str, ...] = PARTS
    lru_blocks: tuple[int, ...] = (PAPER_LRU[0], 10_000, PAPER_LRU[1])
    evictions: tuple[str, ...] = (
        "lru",
        "fifo",
        "lfu",
        "gdsf",
        "gdsf+depth",
        "s3fifo",
        "sieve",
        "wtinylfu",
        "flop+flops",
    )
    capacities: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)  # share of the distinct blocks
    placements: tuple[str, ...] = (
        "full",
        "every:4",
        "every:8",
        "every:16",
        "every:32",
        "zero",
        "end",
        "fork",
        "periodic:4",
    )
    budgets: tuple[float, ...] = (0.1,)  # share of the bytes of all history
    budget_placements: tuple[str, ...] = ("full", "every:4", "zero", "end", "fork")
    budget_evictions: tuple[str, ...] = ("lru", "gdsf")
    workdir: str = "runs/replay"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        unknown = set(self.parts) - set(PARTS)
        if unknown or not self.parts:
            raise ValueError(f"parts={self.parts} must be one or more of {PARTS}")
        for part in self.parts:
            config_checks.not_empty(self, *LISTS[part])
        for share in (*self.capacities, *self.budgets):
            if share <= 0:
                raise ValueError(f"capacities and budgets are shares > 0, got {share}")
        for name in (*self.evictions, *self.budget_evictions):
            replay_lib.policy_of(Cell("stateless", name))
        for name in (*self.placements, *self.budget_placements):
            replay_lib.policy_of(Cell(name))
        config_checks.at_least(self, 1, "lru_blocks")  # a cell of 0 bytes has no limit
        self._source.check()
        config_checks.check_workdir(self)

    @property
    def _source(self) -> traces.TraceConfig:
        return traces.TraceConfig(path=self.trace, limit=self.limit, generator=self.generator)

    def load(self) -> traces.Trace:
        """The trace."""
        return self._source.load()

    def cells(self, unique: int, block_bytes: int) -> dict[str, tuple[str, Cell]]:
        """Part and cell by name, for a trace of so many distinct blocks."""
        found: dict[str, tuple[str, Cell]] = {}
        if "ideal" in self.parts:
            found["ideal"] = "ideal", Cell("stateless")
            for blocks in self.lru_blocks:
                cell = Cell("stateless", "lru", blocks * block_bytes)
                found[f"lru at {blocks:,} blocks"] = "ideal", cell
        if "eviction" in self.parts:
            for order in self.evictions:
                for share in self.capacities:
                    capacity = max(1, int(unique * share)) * block_bytes
                    cell = Cell("stateless", order, capacity)
                    found[f"eviction/{order}/{share:g}"] = "eviction", cell
        if "placement" in self.parts:
            for name in self.placements:
                found[f"placement/{name}"] = "placement", Cell(name, partial=False)
        if "budget" in self.parts:
            for share in self.budgets:
                for name in self.budget_placements:
                    for order in self.budget_evictions:
                        capacity = max(1, int(unique * share * block_bytes))
                        cell = Cell(name, order, capacity, partial=False)
                        found[f"budget/{share:g}/{name}/{order}"] = "budget", cell
        return found
