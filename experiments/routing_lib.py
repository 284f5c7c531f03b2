"""Requests over several instances, each with a store of its own; sizes only."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.replay_lib import FLASH_FLOPS, Cell, policy_of
from experiments.traces import Trace
from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.sized import SizedStore


class Instance:
    """A store, the seconds until which it is busy, and the keys that the router sent here.

    The router does not hear of evictions: what it takes for a match may be gone.
    """

    def __init__(self, spec: CacheSpec, cell: Cell):
        self.store = SizedStore(
            Geometry.of(spec),
            spec.block_bytes(),
            spec.checkpoint_bytes(),
            capacity=cell.capacity,
            policy=policy_of(cell),
        )
        self.busy_until = 0.0
        self.computed = 0
        self.seen: set[bytes] = set()

    def matched(self, keys: Keys) -> int:
        """Blocks of the prompt that were sent here before."""
        for count, key in enumerate(keys.keys):
            if key not in self.seen:
                return count
        return len(keys.keys)


@dataclasses.dataclass(frozen=True)
class Routed:
    """What came of it. Shares are of prompt tokens, times in seconds.

    balance: tokens that the busiest instance computed over their mean.
    """

    hash_hit: float
    effective: float
    balance: float
    first_token_median: float
    first_token_p95: float

    def values(self) -> dict:
        """As JSON."""
        return dataclasses.asdict(self)


def route(
    trace: Trace,
    keys: Sequence[Keys],
    spec: CacheSpec,
    cell: Cell,
    count: int,
    way: str,
    utilisation: float,
) -> Routed:
    """Sends every request to one of `count` instances that share `cell.capacity` bytes evenly.

    An instance computes one prompt at a time, in order of arrival; decoding is left out. Ways:
    round_robin; least_loaded: the shortest queue; prefix: the longest match, of equals the
    shortest queue; load_aware: where the first token is expected first, queue and match considered.
    """
    own = dataclasses.replace(cell, capacity=cell.capacity // count)
    instances = [Instance(spec, own) for _ in range(count)]
    requests, size = trace.requests, spec.block
    span = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    work = sum(FLASH_FLOPS(0, x.n_in) for x in requests)
    speed = work / (span * count * utilisation)  # operations a second of one instance
    hash_hit = effective = total = 0
    times = []
    for number, (request, names) in enumerate(zip(requests, keys, strict=True)):
        now, n = request.arrival_s, request.n_in
        if way == "round_robin":
            chosen = instances[number % count]
        elif way == "least_loaded":
            chosen = min(instances, key=lambda x: x.busy_until)
        elif way == "prefix":
            chosen = min(instances, key=lambda x: (-x.matched(names), x.busy_until))
        elif way == "load_aware":

            def expected(x: Instance, now=now, n=n, names=names) -> float:
                known = min(x.matched(names) * size, n - 1)
                return max(now, x.busy_until) + FLASH_FLOPS(known, n) / speed

            chosen = min(instances, key=expected)
        else:
            raise ValueError(f"unknown way {way!r}")
        with chosen.store.lookup(names) as lease:
            plan = lease.plan
            chosen.store.publish(names, len(names.keys), lease.checkpoint_points)
        first, last = plan.replay or (0, 0)
        begun = plan.resumable_length - (last - first)
        chosen.busy_until = max(now, chosen.busy_until) + FLASH_FLOPS(begun, n) / speed
        chosen.computed += n - begun
        chosen.seen.update(names.keys)
        times.append(chosen.busy_until - now)
        total += n
        hash_hit += plan.candidate_length
        effective += begun
    computed = [x.computed for x in instances]
    return Routed(
        hash_hit / total,
        effective / total,
        max(computed) * count / max(sum(computed), 1),
        float(np.median(times)),
        float(np.quantile(times, 0.95)),
    )
