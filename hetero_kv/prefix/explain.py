"""Why a prompt would be resumed where it would be: one row per component, as data and as text."""

import dataclasses
from collections.abc import Iterable, Sequence

from hetero_kv.contract import CacheSpec, Contract, History, Point, Window
from hetero_kv.prefix.plan import NONE, REPLAY, Geometry, Plan, Presence


@dataclasses.dataclass(frozen=True)
class ComponentRow:
    """What holds for one component. Lengths are in tokens.

    contract: of its leaves. stored: where its history or checkpoints stand, within the candidate
    length. route: how it would come back. alone: how far it could be resumed if it were the only
    component. joint: how far all can be. why: codes of what shortened it, in order.
    """

    component: str
    contract: str
    stored: str
    route: str
    alone: int
    joint: int
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
    """Why a prompt would be resumed where it would be; `str()` is a table.

    facts: (name, value) of what else matters: whose prompt it is, the tenant's quota, the epoch.
    """

    prompt_length: int
    plan: Plan
    granularity: int
    minimum_resumable: int
    largest_boundary: int
    components: tuple[ComponentRow, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"prompt {self.prompt_length}  candidate {self.plan.candidate_length}  "
            f"resumable {self.plan.resumable_length}  best possible {self.largest_boundary}  "
            f"(multiples of {self.granularity}, shortest {self.minimum_resumable})",
        ]
        if self.plan.replay:
            start, stop = self.plan.replay
            kind = "approximate " if self.plan.approximate else ""
            lines.append(f"{kind}replay of tokens {start} .. {stop - 1}")
        heads = ("component", "contract", "stored", "route", "alone", "joint", "why")
        rows = [
            (x.component, x.contract, x.stored, x.route, str(x.alone), str(x.joint), _codes(x))
            for x in self.components
        ]
        lines += _table([heads, *rows], right=(4, 5))
        lines += [f"  {name}: {value}" for name, value in self.facts]
        return "\n".join(lines + [f"  {reason}" for reason in self.plan.reasons])


def component_rows(
    spec: CacheSpec, geometry: Geometry, plan: Plan, presence: Presence, replay_tokens: float
) -> tuple[ComponentRow, ...]:
    """One row per component that has a route. replay_tokens: as by `Policy.replay_tokens`."""
    contracts: dict[str, list[str]] = {}
    for slot in spec.slots():
        text = _contract(slot.leaf.contract)
        seen = contracts.setdefault(slot.leaf.component, [])
        if text and text not in seen:
            seen.append(text)
    step, block = geometry.granularity, geometry.block
    blocks = min(len(presence.history), plan.candidate_length // block)
    flags = presence.history[:blocks]
    leading = flags.index(False) if False in flags else blocks
    history = leading * block // step * step
    points = sorted(x for x in presence.checkpoints if x <= leading * block and x % step == 0)
    newest = max(points, default=0)
    if history - replay_tokens > newest:
        newest = history  # by replay
    rows = []
    for name, route in plan.routes.items():
        stored, alone = [], plan.candidate_length // step * step
        if name in geometry.history:
            stored.append(_blocks(leading, presence))
            alone = min(alone, history)
        if name in geometry.checkpoint:
            stored.append(_points(points, presence))
            alone = min(alone, newest)
        why = [x.code for x in plan.reasons if x.component in ("", name)]
        rows.append(
            ComponentRow(
                name,
                ", ".join(contracts.get(name, ())),
                "; ".join(stored),
                route,
                alone,
                plan.resumable_length,
                tuple(dict.fromkeys(why)),
            )
        )
    return tuple(rows)


def _contract(contract: Contract) -> str:
    if isinstance(contract, History):
        span = f", span {contract.span}" if contract.span not in (0, contract.stride) else ""
        return f"History({contract.stride}{span})"
    if isinstance(contract, Window):
        return f"Window({contract.width})"
    return "Point" if isinstance(contract, Point) else ""


def _blocks(count: int, presence: Presence) -> str:
    if not count:
        return NONE
    slow = sum(x < count for x in presence.disk_history)
    where = {"host": count - slow, "disk": slow}
    return f"{count} blocks: " + ", ".join(f"{n} {tier}" for tier, n in where.items() if n)


def _points(points: Sequence[int], presence: Presence) -> str:
    if not points:
        return NONE
    shown = (f"{x} {'disk' if x in presence.disk_checkpoints else 'host'}" for x in points[-3:])
    return "at " + ("… " if len(points) > 3 else "") + ", ".join(shown)


def _codes(row: ComponentRow) -> str:
    return ", ".join(row.why) or ("replayed" if row.route == REPLAY else "-")


def _table(rows: Sequence[Sequence[str]], right: Iterable[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    sides = [">" if i in right else "<" for i in range(len(widths))]
    return [
        "  " + "  ".join(f"{x:{s}{w}}" for x, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
