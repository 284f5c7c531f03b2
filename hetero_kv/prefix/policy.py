"""Policies: where checkpoints are taken, what is evicted first, how the budget is shared."""

import dataclasses
import functools
import math
from collections.abc import Callable

from hetero_kv.prefix.eviction import Eviction, Fifo, FlopAware, Gdsf, Lfu, Lru
from hetero_kv.prefix.placement import (
    Bounded,
    CheckpointPolicy,
    End,
    Fork,
    Full,
    HasGranularity,
    Never,
    Periodic,
    placement,
)
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.queues import S3Fifo, Sieve, WTinyLfu

__all__ = [
    "EVICTIONS",
    "Bounded",
    "CheckpointPolicy",
    "End",
    "Eviction",
    "Flops",
    "Fork",
    "Full",
    "HasGranularity",
    "Lru",
    "Never",
    "Periodic",
    "Policy",
    "eviction",
]

EVICTIONS: dict[str, Callable[[], Eviction]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "wtinylfu": WTinyLfu,
    "flop": FlopAware,
}


def eviction(name: str) -> Callable[[], Eviction]:
    """What makes an order of eviction, from a name of EVICTIONS; flop:<alpha> sets its weight."""
    kind, _, number = name.partition(":")
    if kind == "flop" and number.replace(".", "", 1).isdigit():
        return functools.partial(FlopAware, float(number))
    if kind not in EVICTIONS or number:
        raise ValueError(f"unknown order of eviction {name!r}; known: {', '.join(EVICTIONS)}")
    return EVICTIONS[kind]


@dataclasses.dataclass(frozen=True)
class Flops:
    """What it costs to compute tokens: `per_token` each, and `per_pair` per earlier token."""

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, start: int, stop: int) -> float:
        """Cost of the tokens [start, stop) of a prompt."""
        pairs = (stop - start) * (start + stop) / 2
        return (stop - start) * self.per_token + pairs * self.per_pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """All choices of a store.

    eviction: makes the order of eviction, anew for each kind of group.
    checkpoint_share: part of the byte budget that checkpoint groups are entitled to; history
    groups have the rest. Either kind may use what the other leaves free.
    cost: what the orders are told of a group: for a block the cost of its tokens, for a checkpoint
    that of its whole prefix. None: all cost the same.
    """

    checkpoints: CheckpointPolicy = dataclasses.field(default_factory=Full)
    eviction: Callable[[], Eviction] = Lru
    checkpoint_share: float = 0.5
    cost: Callable[[int, int], float] | None = None

    def __post_init__(self):
        if not 0.0 <= self.checkpoint_share <= 1.0:
            raise ValueError(f"checkpoint_share is within 0 .. 1, got {self.checkpoint_share}")

    @classmethod
    def named(cls, name: str, **fields) -> "Policy":
        """From "<checkpoints>" or "<checkpoints>/<eviction>", as in "fork/s3fifo".

        Names are those of `placement.placement` and `eviction`. The FLOP-aware order counts tokens
        as equal unless `cost` says more.
        """
        first, slash, order = name.partition("/")
        if slash:
            fields = {"eviction": eviction(order), **fields}
            if order.startswith("flop"):
                fields = {"cost": Flops(), **fields}
        return cls(checkpoints=placement(first), **fields)

    def replay_tokens(self, geometry: Geometry) -> float:
        """Tokens that a replay runs under this policy; inf: it replays nothing."""
        if not self.checkpoints.replay:
            return math.inf
        return geometry.replay_tokens(self.checkpoints.bound)
