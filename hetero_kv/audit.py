"""Audits: recompute a reused prefix and compare; and the breaker that failed ones trip.

Two rows are compared on their live rows at the resumed length: the one that was restored, and one
that was computed cold. After that, one of them goes on to the end of the prompt, and the last
logits are compared with those of the answer. In an audit of `validated` reuse the cold row is the
one that is made for it; in `shadow` it is the restored one.
"""

import dataclasses

import jax
import numpy as np

from hetero_kv.params import Params
from hetero_kv.requests import Handle
from hetero_kv.rows import Rows, position_of
from hetero_kv.state import Cache

LOGITS = "logits"  # the component that stands for the last logits of the prompt


@dataclasses.dataclass(frozen=True)
class Differing:
    """One leaf that differs on a live row by more than the noise floor.

    path: LeafSlot.path. layer: of those stacked in the leaf. block, position (tokens): of its first
    such row. error: the largest of the leaf.
    """

    component: str
    path: str
    layer: int
    block: int
    position: int
    error: float


@dataclasses.dataclass(frozen=True)
class Finding:
    """What an audit found.

    ok: nothing differs by more than the noise floor. Otherwise component, leaf, block and position
    (tokens) tell what differs first in the sequence, `error` the largest error of that leaf, and
    `others` all components that differ, `leaves` all leaves.
    """

    handle: Handle
    length: int  # tokens resumed
    ok: bool
    component: str = ""
    leaf: str = ""
    block: int = -1
    position: int = -1
    error: float = 0.0
    others: tuple[str, ...] = ()
    leaves: tuple[Differing, ...] = ()
    floor: float = 0.0

    def __str__(self) -> str:
        if self.ok:
            return f"{self.length} tokens resumed as computed"
        return (
            f"{self.component} ({self.leaf}) differs first at position {self.position}, block "
            f"{self.block}, by {self.error:.3g}, of {self.length} tokens resumed; "
            f"differing: {', '.join(self.others)}"
        )


def compare(rows: Rows, handle: Handle, held: Cache, cold: Cache, floor: float) -> Finding:
    """The live rows of two caches of batch 1 at one length."""
    length, other = int(held.length[0]), int(cold.length[0])
    if length != other:
        error = abs(length - other)
        return Finding(handle, length, False, "lengths", "length", error=error, floor=floor)
    block = rows.spec.block
    first, leaves = None, []
    for slot, one in zip(rows.compared, rows.differ(held, cold, floor), strict=True):
        if one.row < 0:
            continue
        position = position_of(rows.spec, slot, int(one.row), length)
        about = slot.leaf.component, slot.path, int(one.repeat), position // block, position
        leaves.append(Differing(*about, float(one.error)))
        leaf = f"{slot.path}, layer {int(one.repeat)}" if slot.repeats > 1 else slot.path
        if first is None or position < first.position:
            first = Finding(
                handle,
                length,
                False,
                slot.leaf.component,
                leaf,
                position // block,
                position,
                float(one.error),
            )
    if first is None:
        return Finding(handle, length, True, floor=floor)
    others = tuple(dict.fromkeys(x.component for x in leaves))
    return dataclasses.replace(first, others=others, leaves=tuple(leaves), floor=floor)


class Audit:
    """One audit, done call by call so that requests go on beside it.

    Args:
        prompt: i32[n]. length: tokens resumed.
        held: the restored row (batch 1); for `replay` it stands at the start of it.
        shadow: the answer comes from the cold path, which hands its row over as `cold`.
        replay: [start, stop) that `held` still has to replay.
    """

    def __init__(
        self,
        rows: Rows,
        handle: Handle,
        prompt: np.ndarray,
        length: int,
        held: Cache,
        *,
        shadow: bool = False,
        replay: tuple[int, int] | None = None,
        floor: float = 0.0,
    ):
        self.handle, self.length, self.shadow = handle, length, shadow
        self.served: np.ndarray | None = None  # f32[V], the answer's logits at the last token
        self.cold: Cache | None = None
        self.finding: Finding | None = None
        self.recomputed: np.ndarray | None = None  # f32[V], what they are compared with
        self.dropped = False
        self._rows, self._prompt, self._floor = rows, prompt, floor
        self._held = held
        self._replay = replay
        self._at = replay[0] if replay else (length if shadow else 0)
        self._state: Finding | None = None
        self._logits: np.ndarray | None = None
        if not shadow:
            self.cold = rows.new(1)

    @property
    def ready(self) -> bool:
        """Whether `advance` can do something now."""
        if self.finding is not None or self.dropped:
            return False
        if self.cold is None:
            return self._replay is not None
        return self._logits is None or self.served is not None

    def advance(self, params: Params) -> int:
        """One piece of work; the prompt tokens that went through the model for it."""
        if self._replay:
            start, stop = self._replay
            return self._run_held(params, stop, first=start, replay=True)
        if self._state is None:
            if self._at < self.length:
                return self._run_cold(params, self.length)
            self._state = compare(self._rows, self.handle, self._held, self.cold, self._floor)
            return 0
        if self._at < len(self._prompt):
            run = self._run_held if self.shadow else self._run_cold
            return run(params, len(self._prompt))
        if self.served is not None:
            self._conclude()
        return 0

    # -- inside --------------------------------------------------------------------------------

    def _run_cold(self, params: Params, stop: int) -> int:
        logits, self.cold, _ = self._rows.prefill(
            params, self.cold, 0, self._prompt, self._at, stop
        )
        return self._moved(logits, stop)

    def _run_held(self, params: Params, stop: int, first: int = 0, replay: bool = False) -> int:
        logits, self._held, _ = self._rows.prefill(
            params, self._held, 0, self._prompt, self._at, stop, first=first, replay=replay
        )
        count = self._moved(logits, stop)
        if self._replay and self._at == stop:
            self._replay = None
        return count

    def _moved(self, logits: jax.Array, stop: int) -> int:
        count, _ = self._rows.piece(self._at, stop)
        self._at += count
        if self._at == len(self._prompt):
            self._logits = last_logits(logits, count)
        return count

    def _conclude(self) -> None:
        found = self._state
        error = np.abs(self.served - self._logits)
        error = float(np.max(np.where(np.isfinite(error), error, np.inf)))
        differs = error > self._floor or (
            not self._floor and self.served.tobytes() != self._logits.tobytes()
        )
        if differs:
            position = len(self._prompt) - 1
            if found.ok:
                block = position // self._rows.spec.block
                about = LOGITS, LOGITS, block, position, error
                found = Finding(self.handle, self.length, False, *about, floor=self._floor)
            found = dataclasses.replace(found, others=(*found.others, LOGITS))
        self.finding, self.recomputed = found, self._logits
        self._held = self.cold = None


class Breaker:
    """Opens, for good, after so many failed audits."""

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"a breaker opens after at least 1 failure, got {limit}")
        self.limit = limit
        self.failed: list[Finding] = []

    @property
    def open(self) -> bool:
        """Whether reuse is off."""
        return len(self.failed) >= self.limit


def last_logits(logits: jax.Array, count: int) -> np.ndarray:
    """f32[V] at the last of `count` tokens, of what `Rows.prefill` returns."""
    logits = np.asarray(logits)[0]
    return logits if logits.ndim == 1 else logits[count - 1]
