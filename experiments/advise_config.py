"""What `advise` asks about: a model, a trace or its statistics, a machine."""

import dataclasses
import pathlib

from experiments import config_checks, replay_lib, traces
from models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True)
class AdviseConfig:
    """flops_per_s: what prefill reaches; bytes_per_s: of reading from host memory, and from disk.

    trace: a file, or the generator's statistics (lengths, turns, gaps). prompts: a file with
    {"tokens": [...]} a line, for the question about layout; "": not asked. layout_block: tokens of
    the shortest run that counts there.
    """

    name: str
    model: DecoderConfig
    trace: traces.TraceConfig = dataclasses.field(
        default_factory=lambda: traces.TraceConfig(limit=2_000)
    )
    prompts: str = ""
    layout_block: int = 64
    placements: tuple[str, ...] = ("full", "periodic:4", "fork", "end", "zero")
    order: str = "lru"
    host_gb: float = 16.0
    disk_gb: float = 512.0
    flops_per_s: float = 4e14
    host_bytes_per_s: float = 2e10
    disk_bytes_per_s: float = 3e9
    workdir: str = "runs/advise"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        config_checks.built(self.model, "model")
        self.trace.check()
        if self.prompts and not pathlib.Path(self.prompts).is_file():
            raise ValueError(f"prompts={self.prompts}: no such file")
        for placement in self.placements:
            replay_lib.policy_of(replay_lib.Cell(placement, self.order))
        rates = (self.flops_per_s, self.host_bytes_per_s, self.disk_bytes_per_s, self.host_gb)
        if min(rates) <= 0 or self.disk_gb < 0 or self.layout_block < 1:
            raise ValueError(f"rates and sizes are positive, got {rates}, {self.disk_gb=}, "
                             f"{self.layout_block=}")  # fmt: skip
        if not self.placements:
            raise ValueError("placements is empty: which window policies are compared?")
        config_checks.check_workdir(self)
