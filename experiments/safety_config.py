"""Configuration of the cost of safety: which model, how many rows, how long."""

import dataclasses

from experiments import config_checks
from experiments.bench import bench_config
from models.config import DecoderConfig

STEP, RATE, FIRST_TOKEN = "step", "rate", "first_token"
PARTS = (STEP, RATE, FIRST_TOKEN)


@dataclasses.dataclass(kw_only=True)
class SafetyConfig:
    """One run. All arms of a part are timed in turns, in one process.

    model: 5M parameters by default, one program per layer.
    rows, capacity, spans: decode calls over so many rows of `capacity` tokens, in pages of a span
        of tokens each; 0: the block of the model (2,048 / 32 = 64 pages a row).
    length: tokens that each row holds at the start. steps: per turn.
    prefix, suffix: tokens that a warm request restores, and that it computes.
    seconds: per part, after which no further turn is begun once there are three.
    """

    model: DecoderConfig = dataclasses.field(
        default_factory=lambda: bench_config.medium().in_layout("unstacked")
    )
    parts: tuple[str, ...] = PARTS
    rows: int = 8
    capacity: int = 2_048
    spans: tuple[int, ...] = (0, 256)
    length: int = 1_024
    steps: int = 16
    burst: int = 8  # of the engine: tokens per decode call
    prefix: int = 1_536
    suffix: int = 128
    repeats: int = 21
    seconds: float = 120.0
    seed: int = 0
    workdir: str = "runs/safety_cost"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        if not self.parts or set(self.parts) - set(PARTS):
            raise ValueError(f"parts={self.parts} must be of {PARTS}")
        config_checks.built(self.model, "model")
        config_checks.not_empty(self, "spans")
        counts = ("rows", "length", "steps", "burst", "suffix", "repeats")
        config_checks.at_least(self, 1, *counts)
        config_checks.at_least(self, 0, "spans", "prefix", "seed", "seconds")
        if self.length + self.steps > self.capacity or self.steps % self.burst:
            raise ValueError(
                f"need {self.length=} + {self.steps=} <= {self.capacity=}, and steps in whole "
                f"bursts of {self.burst=}"
            )
        if self.prefix + self.suffix + self.burst > self.capacity:
            raise ValueError(f"{self.prefix=} + {self.suffix=} do not fit {self.capacity=}")
        config_checks.check_workdir(self)
