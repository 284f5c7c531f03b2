"""What `admission` runs: sessions, a hybrid of attention and recurrent layers, capacities."""

import dataclasses

from experiments import config_checks, replay_lib, traces


def sessions() -> traces.TraceConfig:
    """Sessions of many turns: each prompt extends the one before."""
    generator = traces.GeneratorConfig(
        requests=500, follow=0.95, turns=0.9, first_median=2_000.0, first_sigma=0.6,
        more_median=700.0, more_sigma=0.8, longest=20_000,
    )  # fmt: skip
    return traces.TraceConfig(generator=generator)


@dataclasses.dataclass(kw_only=True)
class AdmissionConfig:
    """The 7B hybrid of Marconi (MLSys'25): 4 attention layers, 24 recurrent ones, d = 4,096.

    state_dims: channels of recurrent state per inner channel; 0: a model without recurrent layers.
    refine: the trace's blocks of 512 tokens are cut into so many. capacities: shares of the bytes
    that the whole trace's history takes.
    """

    trace: traces.TraceConfig = dataclasses.field(default_factory=sessions)
    refine: int = 16
    attention_layers: int = 4
    recurrent_layers: int = 24
    d_model: int = 4_096
    parameters: float = 7e9
    state_dims: tuple[int, ...] = (128, 32, 0)
    capacities: tuple[float, ...] = (0.1, 0.3, 1.0)
    placements: tuple[str, ...] = ("full", "fork")
    orders: tuple[str, ...] = ("lru", "flop+flops")
    workdir: str = "runs/admission"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        self.trace.check()
        config_checks.not_empty(self, "placements", "orders")
        config_checks.at_least(self, 1, "refine")
        config_checks.above(self, 0, "parameters")
        if min(self.attention_layers, self.d_model) < 1 or self.recurrent_layers < 0:
            raise ValueError("attention_layers and d_model are >= 1, recurrent_layers >= 0")
        if not self.state_dims or min(self.state_dims) < 0:
            raise ValueError(f"state_dims={self.state_dims} are counts >= 0")
        if not self.capacities or min(self.capacities) <= 0:
            raise ValueError(f"capacities={self.capacities} are shares > 0")
        for placement in self.placements:
            for order in self.orders:
                replay_lib.policy_of(replay_lib.Cell(placement, order))
        config_checks.check_workdir(self)
