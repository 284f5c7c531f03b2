"""What `levels` times: models, prompt lengths, overlaps, answers."""

import dataclasses

from experiments import shared_prefix
from models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True)
class LevelsConfig:
    """One run: a cell per model and prompt length.

    prompts: tokens. overlaps: shares of a prompt that an earlier request had, rounded down to a
    resumable length. answer: tokens that a request makes. recomputed: how many of them are made
    where nothing is cached; the others are taken to cost what those did.
    arm: `policy/tier` of cross-request reuse. repeats, seconds: as in `ttft`.
    """

    hybrid: DecoderConfig = dataclasses.field(default_factory=shared_prefix.hybrid)
    full: DecoderConfig = dataclasses.field(default_factory=shared_prefix.full)
    kinds: tuple[str, ...] = shared_prefix.KINDS
    prompts: tuple[int, ...] = (256, 512, 1_024, 2_048)
    overlaps: tuple[float, ...] = (0.5, 0.9)
    answer: int = 32
    recomputed: int = 2
    arm: str = "full/host"
    repeats: int = 5
    seconds: float = 60.0
    seed: int = 0
    workdir: str = "runs/levels"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        shared_prefix.check(self)
        shared_prefix.Arm.of(self.arm)
        if not self.overlaps or not all(0 < x < 1 for x in self.overlaps):
            raise ValueError(f"overlaps={self.overlaps} are shares above 0 and below 1")
        if not 1 <= self.recomputed <= self.answer:
            raise ValueError(f"need 1 <= {self.recomputed=} <= {self.answer=}")
