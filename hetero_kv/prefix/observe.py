"""What a store counts and measures, and what each name means.

Names are those of the text exposition without its prefix, `NAMESPACE`. Ratios are not among them:
the hit ratio is `hit_tokens_total` over `prompt_tokens_total`, for the reader to derive. Reused,
replayed and computed tokens add up to prompt tokens (DESIGN rule 14):

    restored_tokens_total + replay_tokens_total + computed_tokens_total == prompt_tokens_total

where computed tokens are counted in the model step, by `PrefixStore.computed`.
"""

import time
from collections.abc import Callable, Iterable

from hetero_kv.metrics import (
    AGE_BOUNDS,
    LATENCY_BOUNDS,
    Counter,
    Counters,
    Histogram,
)
from hetero_kv.prefix.index import KINDS, Group
from hetero_kv.prefix.plan import DISK, HOST, NONE, REPLAY, Geometry, Plan

NAMESPACE = "hetero_kv_prefix_"
Clock = Callable[[], float]  # seconds from any moment; never goes back
CALLS = ("lookup", "restore", "publish", "flush")


def counters() -> Counters:
    """Of a store."""
    return Counters(NAMESPACE)


class Observer:
    """The counters of requests, for stores of arrays and of sizes."""

    def __init__(self, counters: Counters, geometry: Geometry, clock: Clock = time.monotonic):
        self.clock = clock
        self.latency = {x: counters.histogram(f"{x}_seconds", LATENCY_BOUNDS) for x in CALLS}
        self.computed = counters.bind("computed_tokens_total")
        self._counters = counters
        self._geometry = geometry
        self._lookups = counters.bind("lookups_total")
        self._prompt = counters.bind("prompt_tokens_total")
        self._candidate = counters.bind("candidate_tokens_total")
        self._resumable = counters.bind("resumable_tokens_total")
        self._publishes = counters.bind("publishes_total")
        self._restores = counters.bind("restores_total")
        self._restored = counters.bind("restored_tokens_total")
        self._replayed = counters.bind("replay_tokens_total")
        self._shortened: dict[tuple[str, str], Counter] = {}
        self._hits: dict[tuple[str, str], Counter] = {}
        self._whole: dict[tuple[str, ...], list[Counter]] = {}  # by the routes of a plan

    def looked_up(self, plan: Plan, prompt_length: int, started: float) -> None:
        """A lookup that began at `started` by the clock is over."""
        reasons = [self._reason(x.component, x.code) for x in plan.reasons]
        took = self.clock() - started
        with self._counters.lock:
            self._lookups.value += 1
            self._prompt.value += prompt_length
            self._candidate.value += plan.candidate_length
            self._resumable.value += plan.resumable_length
            for one in reasons:
                one.value += 1
            self.latency["lookup"].count(took)

    def hit(self, plan: Plan, disk_tokens: int = 0, state: str = HOST) -> None:
        """A plan was carried out.

        disk_tokens: of its history came so many from disk. state: where its checkpoint came from.
        """
        length = plan.resumable_length
        if not length:
            return
        routes = tuple(plan.routes.values())
        if disk_tokens or DISK in routes or state != HOST:
            self._hit_apart(plan, disk_tokens, state)
            return
        counters = self._whole.get(routes)
        if counters is None:
            found = ((x, y) for x, y in plan.routes.items() if y != NONE)
            counters = self._whole[routes] = [self._hit(x, y) for x, y in found]
        with self._counters.lock:
            for one in counters:
                one.value += length

    def _hit_apart(self, plan: Plan, disk_tokens: int, state: str) -> None:
        length = plan.resumable_length
        for component, route in plan.routes.items():
            if route == NONE:
                continue
            if component not in self._geometry.history:
                self._hit(component, route if route == REPLAY else state).add(length)
                continue
            for tier, tokens in ((DISK, disk_tokens), (HOST, length - disk_tokens)):
                if tokens:
                    self._hit(component, tier).add(tokens)

    def restored(self, plan: Plan, disk_tokens: int, started: float, state: str = HOST) -> None:
        """A restore that began at `started` is over; the rest as for `hit`."""
        start, stop = plan.replay or (0, 0)
        self._restores.add()
        self._restored.add(plan.resumable_length - (stop - start))
        self._replayed.add(stop - start)
        self.hit(plan, disk_tokens, state)
        self.latency["restore"].observe(self.clock() - started)

    def published(self, started: float, reason: str = "") -> None:
        """A publish that began at `started` is over. reason: why the rest was left out."""
        if reason:
            self._counters.add("publish_cut_total", reason=reason)
        took = self.clock() - started
        with self._counters.lock:
            self._publishes.value += 1
            self.latency["publish"].count(took)

    def _reason(self, component: str, code: str) -> Counter:
        found = self._shortened.get((component, code))
        if found is None:
            found = self._counters.bind("shortened_total", component=component, code=code)
            self._shortened[component, code] = found
        return found

    def _hit(self, component: str, tier: str) -> Counter:
        found = self._hits.get((component, tier))
        if found is None:
            found = self._counters.bind("hit_tokens_total", component=component, tier=tier)
            self._hits[component, tier] = found
        return found


class Lives:
    """How long groups live and how long until they are used again, per kind. For the catalog."""

    def __init__(self, counters: Counters, clock: Clock):
        self.clock = clock
        self._lifetime: dict[str, Histogram] = {}
        self._gap: dict[str, Histogram] = {}
        for kind in KINDS:
            self._lifetime[kind] = counters.histogram("lifetime_seconds", AGE_BOUNDS, kind=kind)
            self._gap[kind] = counters.histogram("reuse_gap_seconds", AGE_BOUNDS, kind=kind)

    def pin(self, kind: str, groups: list[Group]) -> None:
        """Groups of a kind are used, and pinned (one loop does both)."""
        now, last, begin = self.clock(), None, 0
        for group in groups:
            group.pins += 1
            if group.used is not last:  # what was used together has one and the same time
                at = groups.index(group, begin)
                if at > begin:
                    self._gap[kind].observe(now - last, at - begin)
                last, begin = group.used, at
            group.used = now
        if groups:
            self._gap[kind].observe(now - last, len(groups) - begin)

    def ended(self, kind: str, groups: Iterable[Group]) -> None:
        """Groups of a kind were evicted."""
        now, last, run = self.clock(), 0.0, 0
        for group in groups:
            if group.born != last:
                if run:
                    self._lifetime[kind].observe(now - last, run)
                last, run = group.born, 0
            run += 1
        if run:
            self._lifetime[kind].observe(now - last, run)
