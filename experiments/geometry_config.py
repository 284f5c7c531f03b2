"""What `geometry` counts: a released model, a policy, a length."""

import dataclasses

from models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True)
class GeometryConfig:
    """policy: of checkpoints, as `PrefixStore(policy=…)` takes it. context: tokens."""

    name: str
    model: DecoderConfig
    policy: str = "full"
    context: int = 1 << 20
