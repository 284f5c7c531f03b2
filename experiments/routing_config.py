"""What `routing` runs: a trace, numbers of instances, ways to choose one."""

import dataclasses

from experiments import config_checks, replay_lib, traces

ROUTES = ("round_robin", "least_loaded", "prefix", "load_aware")


@dataclasses.dataclass(kw_only=True)
class RoutingConfig:
    """capacity: bytes of all instances together, as a share of what the whole history takes.

    utilisation: work of the trace without any reuse over what all instances can do in its time.
    """

    trace: traces.TraceConfig = dataclasses.field(
        default_factory=lambda: traces.TraceConfig(limit=3_000)
    )
    instances: tuple[int, ...] = (1, 2, 4, 8)
    routes: tuple[str, ...] = ROUTES
    capacity: float = 0.2
    checkpoints: str = "fork"
    order: str = "lru"
    utilisation: float = 0.8
    workdir: str = "runs/routing"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        self.trace.check()
        unknown = set(self.routes) - set(ROUTES)
        if unknown or not self.routes:
            raise ValueError(f"routes={self.routes} must be one or more of {ROUTES}")
        if not self.instances or min(self.instances) < 1:
            raise ValueError(f"instances={self.instances} are counts >= 1")
        if not (self.capacity > 0 and self.utilisation > 0):
            raise ValueError(f"need {self.capacity=} > 0 and {self.utilisation=} > 0")
        replay_lib.policy_of(replay_lib.Cell(self.checkpoints, self.order))
        config_checks.check_workdir(self)
