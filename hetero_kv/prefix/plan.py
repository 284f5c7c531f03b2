"""The plan: from what is stored of a prefix to the length that all components can resume.

Pure functions over sizes and flags; no arrays, no index, no clock. All lengths are in tokens.
"""

import dataclasses
import math
from collections.abc import Callable

from hetero_kv.contract import CacheSpec, History, Point, Window

HOST, DISK, REPLAY, NONE = "host", "disk", "replay", "none"  # routes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a plan needs to know of a CacheSpec."""

    block: int  # B
    granularity: int  # G
    replay_length: float  # tokens of exact replay at a multiple of G; inf: impossible
    history: tuple[str, ...]  # components whose contract is History
    checkpoint: tuple[str, ...]  # components whose contract is Window or Point

    @classmethod
    def of(cls, spec: CacheSpec) -> "Geometry":
        """The geometry of a model's cache."""
        slots = list(spec.slots())

        def components(*kinds: type) -> tuple[str, ...]:
            found = (x.leaf.component for x in slots if isinstance(x.leaf.contract, kinds))
            return tuple(dict.fromkeys(found))

        # A component may mix kinds (a full layer's KV next to a window of the same name); then
        # both groups are needed for it, and it is named in both.
        history, checkpoint = components(History), components(Window, Point)
        return cls(spec.block, spec.granularity, spec.replay_length, history, checkpoint)

    def largest_boundary(self, length: int) -> int:
        """The largest multiple of G that a prompt of `length` tokens can resume at."""
        return max(0, length - 1) // self.granularity * self.granularity


@dataclasses.dataclass(frozen=True)
class Presence:
    """What is stored of one prompt's prefix.

    history: per block whose key matches, in order, whether its history group is complete.
    checkpoints: lengths within those blocks at which a checkpoint group is complete.
    disk_history: blocks of them that are only on disk. disk_checkpoints: lengths, likewise.
    """

    history: tuple[bool, ...] = ()
    checkpoints: frozenset[int] = frozenset()
    disk_history: frozenset[int] = frozenset()
    disk_checkpoints: frozenset[int] = frozenset()

    def first(self, blocks: int) -> "Presence":
        """As if only so many blocks had matched."""
        return dataclasses.replace(self, history=self.history[:blocks])


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a length was cut from `before` to `after` tokens.

    component: the component at fault; "" where the cut is about the whole prompt.
    code: stable, for counters: no_match, short_prompt, granularity, history_missing,
        no_checkpoint, replay_not_shorter, not_cacheable, capacity, stale, corrupt, evidence.
    """

    component: str
    code: str
    before: int
    after: int
    detail: str = ""

    def __str__(self) -> str:
        name = self.component or "prompt"
        return f"{name}: {self.before} -> {self.after} ({self.code}) {self.detail}".rstrip()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How far a prompt can be resumed, by which routes, and why not further."""

    candidate_length: int = 0  # how far keys match; a multiple of B, at most prompt - 1
    resumable_length: int = 0  # how far every component can be resumed
    routes: dict[str, str] = dataclasses.field(default_factory=dict)  # component -> route
    reasons: tuple[Reason, ...] = ()
    replay: tuple[int, int] | None = None  # tokens [start, stop) to replay after the restore


Planner = Callable[[Geometry, int, Presence], Plan]


def plan(
    geometry: Geometry,
    prompt_length: int,
    presence: Presence,
    *,
    replay: bool = False,
    limit: int | None = None,
) -> Plan:
    """The joint plan (DESIGN rule 2).

    The resumable length is the largest multiple of G, at most `prompt_length - 1` (and `limit`),
    where all history blocks are present and a checkpoint was taken at exactly that length. With
    `replay`, windows and tails may instead be rebuilt by running the last `replay_length` tokens;
    that route is taken only where it runs fewer tokens than resuming at the best checkpoint.
    """
    candidate, reasons = _candidate(geometry, prompt_length, presence)
    have = min(_leading(presence.history) * geometry.block, candidate)
    if have < candidate:
        detail = f"block {have // geometry.block} is missing"
        names = geometry.history or ("",)
        reasons += [Reason(x, "history_missing", candidate, have, detail) for x in names]
    if limit is not None and limit < have:
        reasons.append(Reason("", "capacity", have, limit, f"at most {limit} tokens fit"))
        have = limit
    top = have // geometry.granularity * geometry.granularity
    if top < have:
        detail = f"resumable lengths are multiples of {geometry.granularity}"
        reasons.append(Reason("", "granularity", have, top, detail))

    length, span = top, None
    if geometry.checkpoint and top:
        length = _newest(geometry, presence, top)
        rebuilt = top - geometry.replay_length  # tokens the replay route does not run
        if replay and rebuilt > length:
            length, span = top, (int(rebuilt), top)
        elif length < top:
            reasons += _no_checkpoint(geometry, top, length, replay)
    routes = _routes(geometry, length, span, presence)
    return Plan(candidate, length, routes, tuple(reasons), span)


def plan_hash_only(geometry: Geometry, prompt_length: int, presence: Presence) -> Plan:
    """The classical rule: whatever matches is resumed. Wrong on hybrids; the ablation baseline."""
    candidate, reasons = _candidate(geometry, prompt_length, presence)
    have = min(_leading(presence.history) * geometry.block, candidate)
    routes = {x: NONE for x in geometry.checkpoint}
    routes |= {x: _history_route(geometry, have, presence) for x in geometry.history}
    return Plan(have, have, routes, tuple(reasons))


def _candidate(
    geometry: Geometry, prompt_length: int, presence: Presence
) -> tuple[int, list[Reason]]:
    block = geometry.block
    matched = len(presence.history) * block
    # The last token is always computed, so it cannot be part of what is resumed.
    candidate = min(matched, max(0, prompt_length - 1) // block * block)
    best = geometry.largest_boundary(prompt_length)
    if not best:
        detail = f"the shortest prompt that can be resumed has {geometry.granularity + 1} tokens"
        return candidate, [Reason("", "short_prompt", prompt_length, 0, detail)]
    if candidate < best:
        detail = f"keys match for {candidate} tokens"
        return candidate, [Reason("", "no_match", best, candidate, detail)]
    return candidate, []


def _leading(flags: tuple[bool, ...]) -> int:
    return flags.index(False) if False in flags else len(flags)


def _newest(geometry: Geometry, presence: Presence, top: int) -> int:
    usable = (x for x in presence.checkpoints if x <= top and x % geometry.granularity == 0)
    return max(usable, default=0)


def _no_checkpoint(geometry: Geometry, top: int, length: int, replay: bool) -> list[Reason]:
    detail = f"no checkpoint at {top}, the newest before it is at {length}"
    reasons = [Reason(x, "no_checkpoint", top, length, detail) for x in geometry.checkpoint]
    if replay:
        need = geometry.replay_length
        cost = "all tokens" if math.isinf(need) else f"{int(need)} tokens"
        detail = f"replay to {top} would run {cost}, no fewer than resuming at {length}"
        reasons.append(Reason("", "replay_not_shorter", top, length, detail))
    return reasons


def _routes(
    geometry: Geometry, length: int, span: tuple[int, int] | None, presence: Presence
) -> dict[str, str]:
    history = _history_route(geometry, length, presence)
    state = HOST if length else NONE
    if span:
        state = REPLAY
    elif length in presence.disk_checkpoints:
        state = DISK
    return dict.fromkeys(geometry.history, history) | dict.fromkeys(geometry.checkpoint, state)


def _history_route(geometry: Geometry, length: int, presence: Presence) -> str:
    """DISK if any of the blocks comes from there."""
    if not length:
        return NONE
    first = min(presence.disk_history, default=math.inf)
    return DISK if first * geometry.block < length else HOST
