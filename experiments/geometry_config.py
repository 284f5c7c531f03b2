"""What `geometry` counts: a released model, a policy, a length."""

import dataclasses

from experiments import config_checks
from hetero_kv.prefix.policy import Policy
from models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True)
class GeometryConfig:
    """policy: of checkpoints, as `PrefixStore(policy=…)` takes it. context: tokens."""

    name: str
    model: DecoderConfig
    policy: str = "full"
    context: int = 1 << 20

    def check(self) -> None:
        """Raises ValueError where a field makes no sense, or no model can be built."""
        config_checks.check_types(self)
        config_checks.at_least(self, 1, "context")
        Policy.named(self.policy)
        config_checks.built(self.model, "model")
