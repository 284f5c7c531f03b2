"""The plan: from what is stored of a prefix to the length that all components can resume.

Pure functions over sizes and flags; no arrays, no index, no clock. All lengths are in tokens.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hetero_kv.contract import CacheSpec, History, Point, Window
from hetero_kv.prefix.costs import Costs

HOST, DISK, REPLAY, NONE = "host", "disk", "replay", "none"  # routes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a plan needs to know of a CacheSpec."""

    block: int  # B
    granularity: int  # G
    replay_length: float  # tokens of exact replay at a multiple of G; inf: impossible
    history: tuple[str, ...]  # components whose contract is History
    checkpoint: tuple[str, ...]  # components whose contract is Window or Point
    chunk: int = 0  # C; 0: approximate replay goes by multiples of G
    block_bytes: int = 0  # of the history group of one block; for costs
    checkpoint_bytes: int = 0  # of one checkpoint group

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
        return cls(
            spec.block,
            spec.granularity,
            # Where nothing has to be run at all, a chunk is: a replay of no tokens is none.
            max(spec.replay_length, spec.chunk),
            history,
            checkpoint,
            spec.chunk,
            spec.block_bytes(),
            spec.checkpoint_bytes(),
        )

    def replay_tokens(self, bound: int | None = None) -> float:
        """Tokens of a replay: `bound` of them, on the chunk grid, if an exact one needs more."""
        if bound is None:
            return self.replay_length
        step = self.chunk or self.granularity
        return min(self.replay_length, -(-bound // step) * step)

    def largest_boundary(self, length: int) -> int:
        """The largest multiple of G that a prompt of `length` tokens can resume at."""
        return max(0, length - 1) // self.granularity * self.granularity


class Presence(NamedTuple):
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
        return self._replace(history=self.history[:blocks])


class Reason(NamedTuple):
    """Why a length was cut from `before` to `after` tokens.

    component: the component at fault; "" where the cut is about the whole prompt.
    code: stable, for counters: no_match, short_prompt, granularity, history_missing,
        no_checkpoint, replay_not_shorter, cheaper, not_cacheable, capacity, stale, corrupt,
        layout, evidence.
    """

    component: str
    code: str
    before: int
    after: int
    detail: str = ""

    def __str__(self) -> str:
        name = self.component or "prompt"
        return f"{name}: {self.before} -> {self.after} ({self.code}) {self.detail}".rstrip()


class Plan(NamedTuple):
    """How far a prompt can be resumed, by which routes, and why not further."""

    candidate_length: int = 0  # how far keys match; a multiple of B, at most prompt - 1
    resumable_length: int = 0  # how far every component can be resumed
    routes: Mapping[str, str] = types.MappingProxyType({})  # component -> route
    reasons: tuple[Reason, ...] = ()
    replay: tuple[int, int] | None = None  # tokens [start, stop) to replay after the restore
    approximate: bool = False  # the replay is shorter than an exact one
    seconds: float | None = None  # until the whole prompt is computed, if costs are known


Planner = Callable[[Geometry, int, Presence], Plan]


def plan(
    geometry: Geometry,
    prompt_length: int,
    presence: Presence,
    *,
    replay: bool = False,
    bound: int | None = None,
    limit: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """The joint plan (DESIGN rule 2).

    A length is resumable if it is a multiple of G, at most `prompt_length - 1` (and `limit`), all
    history blocks up to it are present, and a checkpoint was taken at exactly that length. With
    `replay`, windows and tails may instead be rebuilt by running the last `replay_length` tokens.

    The way taken is the one that runs the fewest tokens, or with `costs` the one that is estimated
    to take the fewest seconds, a cold start included; of equal ones the longest.

    bound: replay no more than so many tokens, rounded up to the chunk grid. Where that is less
    than exact replay needs, and no checkpoint is stored there, the plan is `approximate`.
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

    run = geometry.replay_tokens(bound) if replay else math.inf
    length, span, seconds = top, None, None
    if costs is not None:
        ways = list(_ways(geometry, prompt_length, presence, top, run, costs))
        longest = max(ways, key=lambda x: (x.length, -x.seconds))
        if longest.length < top:
            reasons += _no_checkpoint(geometry, top, longest.length, run if replay else None)
        length, span, seconds = min(ways, key=lambda x: (x.seconds, -x.length, x.span is not None))
        if length < longest.length:
            detail = f"estimated at {seconds:.3g} s, against {longest.seconds:.3g} s"
            reasons.append(Reason("", "cheaper", longest.length, length, detail))
    elif geometry.checkpoint and top:
        length = _newest(geometry, presence, top)
        rebuilt = top - run  # tokens that the replay does not run
        if rebuilt > length:
            length, span = top, (int(rebuilt), top)
        elif length < top:
            reasons += _no_checkpoint(geometry, top, length, run if replay else None)
    routes = _routes(geometry, length, span, presence)
    approximate = span is not None and run < geometry.replay_length
    return Plan(candidate, length, routes, tuple(reasons), span, approximate, seconds)


class _Way(NamedTuple):
    """One way to begin a prompt. span: tokens to replay, or None. seconds: of the whole prompt."""

    length: int
    span: tuple[int, int] | None
    seconds: float


def _ways(
    geometry: Geometry,
    prompt_length: int,
    presence: Presence,
    top: int,
    run: float,
    costs: Costs,
) -> Iterator[_Way]:
    """Every valid way, the cold start first. run: tokens of a replay; inf: there is none."""
    yield _Way(0, None, costs.prefill(0, prompt_length))
    step = geometry.granularity
    per_step = step // geometry.block
    slow = 0  # blocks that are only on disk
    for length in range(step, top + 1, step):
        blocks = length // geometry.block
        slow += sum(x in presence.disk_history for x in range(blocks - per_step, blocks))
        size = geometry.block_bytes
        seconds = costs.host.seconds((blocks - slow) * size, blocks - slow)
        seconds += costs.read_disk(slow * size, slow) + costs.prefill(length, prompt_length)
        stored = length in presence.checkpoints
        if not geometry.checkpoint:
            yield _Way(length, None, seconds)
            continue
        if stored:
            on_disk = length in presence.disk_checkpoints
            read = costs.read_disk if on_disk else costs.host.seconds
            yield _Way(length, None, seconds + read(geometry.checkpoint_bytes, 1))
        # What is stored exactly is not approximated.
        if run < length and not (stored and run < geometry.replay_length):
            yield _Way(length, (length - int(run), length), seconds + costs.replay(run))


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
    if top in presence.checkpoints:
        return top
    step = geometry.granularity
    return max([x for x in presence.checkpoints if x <= top and x % step == 0], default=0)


def _no_checkpoint(geometry: Geometry, top: int, length: int, run: float | None) -> list[Reason]:
    """run: tokens that a replay would run; None: the policy replays nothing."""
    detail = f"no checkpoint at {top}, the newest before it is at {length}"
    reasons = [Reason(x, "no_checkpoint", top, length, detail) for x in geometry.checkpoint]
    if run is not None:
        cost = "all tokens" if math.isinf(run) else f"{int(run)} tokens"
        detail = f"replay to {top} would run {cost}, no fewer than resuming at {length}"
        reasons.append(Reason("", "replay_not_shorter", top, length, detail))
    return reasons


def _routes(
    geometry: Geometry, length: int, span: tuple[int, int] | None, presence: Presence
) -> Mapping[str, str]:
    history = _history_route(geometry, length, presence)
    state = HOST if length else NONE
    if span:
        state = REPLAY
    elif length in presence.disk_checkpoints:
        state = DISK
    return _table(geometry.history, geometry.checkpoint, history, state)


@functools.lru_cache(maxsize=256)
def _table(
    history: tuple[str, ...], checkpoint: tuple[str, ...], route: str, state: str
) -> Mapping[str, str]:
    found = dict.fromkeys(history, route) | dict.fromkeys(checkpoint, state)
    return types.MappingProxyType(found)  # shared: nobody may change it


def _history_route(geometry: Geometry, length: int, presence: Presence) -> str:
    """DISK if any of the blocks comes from there."""
    if not length:
        return NONE
    if not presence.disk_history:
        return HOST
    first = min(presence.disk_history, default=math.inf)
    return DISK if first * geometry.block < length else HOST
