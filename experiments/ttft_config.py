"""What `ttft` times: models, prompts, hits, window policies and tiers."""

import dataclasses

from experiments import config_checks, shared_prefix
from models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True)
class TtftConfig:
    """One run: a cell per model and prompt length.

    kinds: which of the two models. prompts: tokens. hits: shares of a prompt that an earlier
    request had; rounded down to a resumable length. arms: `policy/tier`: where windows and tails
    are kept (`full`, `end`, `periodic:4`, `zero`, …) and where prefixes come from (`host`, `disk`);
    one without a store is always timed beside them.
    repeats: turns of a cell, of which at least three are run, and no further one is begun after
    `seconds`. directory: on the disk in question; "": that of temporary files.
    """

    hybrid: DecoderConfig = dataclasses.field(default_factory=shared_prefix.hybrid)
    full: DecoderConfig = dataclasses.field(default_factory=shared_prefix.full)
    kinds: tuple[str, ...] = shared_prefix.KINDS
    prompts: tuple[int, ...] = (512, 1_024, 2_048, 4_096)
    hits: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
    arms: tuple[str, ...] = ("full/host", "end/host", "zero/host", "full/disk")
    repeats: int = 7
    seconds: float = 60.0
    directory: str = ""
    seed: int = 0
    workdir: str = "runs/ttft"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        specs = shared_prefix.check(self)
        if not self.arms:
            raise ValueError("arms is empty: which policies and tiers are timed?")
        for arm in self.arms:
            shared_prefix.Arm.of(arm)
        longest = max(self.prompts)
        for kind, spec in specs.items():
            if longest < 2 * spec.granularity:
                raise ValueError(
                    f"prompts={self.prompts}: half of the longest is resumed for the timelines, "
                    f"and {kind} resumes multiples of {spec.granularity} tokens; give one of "
                    f"{2 * spec.granularity} tokens or more"
                )
        if 0.0 not in self.hits or not all(0 <= x < 1 for x in self.hits):
            raise ValueError(f"hits={self.hits} are shares from 0 on, below 1, and 0 among them")
        config_checks.check_directory(self)
