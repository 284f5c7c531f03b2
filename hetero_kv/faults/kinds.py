"""The table of faults: kind × contract × moment → how it is sealed, and the check on guard.

Pure, and written against contracts only: a new attention mechanism is covered as it is.
"""

import dataclasses

from hetero_kv.contract import (
    CacheSpec,
    Contract,
    Derived,
    Evidence,
    History,
    Leaf,
    Point,
    Scratch,
    Window,
)
from hetero_kv.validate import owner

# Kinds.
DROP, ZERO, STALE = "drop", "zero", "stale_from_another_request"
SHIFT_ENTRY, SHIFT_BLOCK = "shift_by_one_entry", "shift_by_one_block"
POSITION, COUNT, GENERATION = "wrong_position", "wrong_count", "wrong_generation"
DTYPE, BIT, TORN = "wrong_dtype_view", "bit_flip", "torn_write"
EVICTED, REUSED = "evicted_between_lookup_and_use", "slot_reuse"
FOREIGN, OLD = "foreign_tenant", "old_weights"
ENTRY, RELEASED = "wrong_table_entry", "released_while_named"
KINDS = (
    DROP,
    ZERO,
    STALE,
    SHIFT_ENTRY,
    SHIFT_BLOCK,
    POSITION,
    COUNT,
    GENERATION,
    DTYPE,
    BIT,
    TORN,
    EVICTED,
    REUSED,
    FOREIGN,
    OLD,
    ENTRY,
    RELEASED,
)

# Moments: at rest in host memory or on disk; between lookup and restore; in the row, before use; in
# device pages and slots, between two calls.
HOST, DISK, FETCH, ROW, DEVICE = "host", "disk", "fetch", "row", "device"
MOMENTS = (HOST, DISK, FETCH, ROW, DEVICE)
_STORED = (HOST, DISK, FETCH)

# How bytes in a store are sealed after the fault.
NONE = ""  # no bytes are forged
KEPT = "kept"  # the checksums of before
OWN = "own"  # a whole group with its own checksums, in another group's place
REMADE = "remade"  # checksums made anew: the fault happened before sealing

# Checks, each of which can be switched off: see `checks`.
CHECKSUM = "checksum"  # bytes of a component against its checksum, after the copy
TICKET = "generation"  # of a ticket or a record, after the copy
LABEL = "label"  # key and position (depth) of a payload
LAYOUT = "layout"  # of what was delivered: every component, in the form of this process
EVIDENCE = "evidence"  # counts, ring positions and the length, in the call that reads them
POSITIONS = "checkpoint positions"  # of what a checkpoint delivered, before the restore
IDENTITY = "identity"  # weights epoch and tenant in the keys, and the lease's epoch
RESTORED = "restored sums"  # of a row against what was brought, in the first call that reads it
JOINT = "joint length"  # of all components, where one of them is missing
DELIVERED = "fetch defines the hit"
FORM = "page form"  # of pages that are read, and of those that are to be written
RECYCLED = "page generation"  # as leased
OWNER = "page owner"  # as leased: the key of the prefix that a sealed page ends
VALID = "page valid count"  # of entries, against the length
PAGE_BYTES = "page checksum"  # of pages, sealed or open, where a row goes on with them
SLOT_BYTES = "slot checksum"  # of windows, tails and state, where a row goes on with them
AUDIT = "audit"  # recompute and compare; answers come from the cold path (reuse="shadow")
CHECKS = (
    CHECKSUM,
    TICKET,
    LABEL,
    LAYOUT,
    EVIDENCE,
    POSITIONS,
    RESTORED,
    IDENTITY,
    JOINT,
    DELIVERED,
    FORM,
    RECYCLED,
    OWNER,
    VALID,
    PAGE_BYTES,
    SLOT_BYTES,
    AUDIT,
)
ON_DEVICE = (EVIDENCE, FORM, RECYCLED, OWNER, VALID, PAGE_BYTES, SLOT_BYTES)

# Codes of reasons by which each check tells what it has found, and the checks that also name the
# component. Those of an audit are its findings.
CODES = {
    CHECKSUM: ("corrupt",),
    TICKET: ("stale", "corrupt"),
    LABEL: ("corrupt",),
    LAYOUT: ("layout",),
    EVIDENCE: ("evidence",),
    POSITIONS: ("evidence",),
    RESTORED: ("checksum",),
    IDENTITY: ("no_match",),
    JOINT: ("no_checkpoint",),
    DELIVERED: ("stale",),
    FORM: ("missing", "write"),
    RECYCLED: ("generation",),
    OWNER: ("owner",),
    VALID: ("valid",),
    PAGE_BYTES: ("checksum",),
    SLOT_BYTES: ("checksum",),
    AUDIT: ("audit",),
}
NAMING = (CHECKSUM, LAYOUT, POSITIONS, RESTORED, AUDIT, *ON_DEVICE)

# Extents: how much of a History component is hit.
ALL, LAST = "all", "last"  # every block of the prefix, or the last one

# What a fault is the same for: each component, each group, the whole prefix.
_COMPONENT, _GROUP, _PREFIX = "component", "group", "prefix"

# Contracts as the table knows them.
_H, _W, _T, _S = "history", "window", "tail", "state"
_RINGS, _POINTS, _ANY = (_W, _T), (_W, _T, _S), (_H, _W, _T, _S)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of the table."""

    kind: str
    contracts: tuple[str, ...]
    moments: tuple[str, ...]
    seal: str
    guard: str  # the check that finds it, also where all others are switched off
    per: str = _COMPONENT


def _values(kind: str, contracts: tuple[str, ...] = _ANY) -> tuple[Rule, ...]:
    """Values changed, evidence right: only a checksum of before knows, or who computes again.

    Nobody but the latter where the fault came before the sealing (REMADE)."""
    return (
        Rule(kind, contracts, _STORED, KEPT, CHECKSUM),
        Rule(kind, contracts, _STORED, REMADE, AUDIT),
        Rule(kind, contracts, (ROW,), NONE, RESTORED),
        Rule(kind, (_H,), (DEVICE,), KEPT, PAGE_BYTES),
        Rule(kind, tuple(x for x in contracts if x != _H), (DEVICE,), NONE, SLOT_BYTES),
    )


def _of_others(kind: str) -> tuple[Rule, ...]:
    """State that other weights have made: kept apart by the keys."""
    return (
        Rule(kind, _ANY, (HOST, DISK), NONE, IDENTITY, _PREFIX),
        Rule(kind, _ANY, (FETCH,), OWN, LABEL, _GROUP),
        Rule(kind, _ANY, (FETCH,), REMADE, AUDIT),
        Rule(kind, _ANY, (ROW,), NONE, RESTORED),
        Rule(kind, (_H,), (DEVICE,), OWN, OWNER),
        Rule(kind, _POINTS, (DEVICE,), NONE, SLOT_BYTES),
    )


TABLE: tuple[Rule, ...] = (
    Rule(DROP, _POINTS, (HOST,), NONE, JOINT, _GROUP),
    Rule(DROP, _ANY, (DISK,), NONE, DELIVERED, _GROUP),
    Rule(DROP, _ANY, (HOST, FETCH), REMADE, LAYOUT),  # sealed without the component
    Rule(DROP, (_H, *_RINGS), (ROW,), NONE, EVIDENCE),
    Rule(DROP, _RINGS, (DEVICE,), NONE, EVIDENCE),
    Rule(DROP, (_S,), (ROW,), NONE, RESTORED),
    Rule(DROP, (_S,), (DEVICE,), NONE, SLOT_BYTES),
    *_values(ZERO),
    *_values(STALE),
    Rule(STALE, _ANY, _STORED, OWN, LABEL, _GROUP),
    *_values(SHIFT_ENTRY, (_H, *_RINGS)),
    Rule(SHIFT_BLOCK, _ANY, _STORED, OWN, LABEL, _GROUP),
    Rule(SHIFT_BLOCK, _RINGS, _STORED, REMADE, POSITIONS),
    Rule(SHIFT_BLOCK, (_H, _S), _STORED, REMADE, AUDIT),
    Rule(SHIFT_BLOCK, _RINGS, (ROW, DEVICE), NONE, EVIDENCE),
    Rule(SHIFT_BLOCK, (_H, _S), (ROW,), NONE, RESTORED),
    Rule(SHIFT_BLOCK, (_H,), (DEVICE,), NONE, OWNER),  # every column names the page before
    Rule(SHIFT_BLOCK, (_S,), (DEVICE,), NONE, SLOT_BYTES),
    Rule(POSITION, _RINGS, _STORED, KEPT, CHECKSUM),
    Rule(POSITION, _RINGS, _STORED, REMADE, POSITIONS),
    Rule(POSITION, _RINGS, (ROW, DEVICE), NONE, EVIDENCE),
    Rule(POSITION, (_H,), (ROW, DEVICE), NONE, EVIDENCE, _GROUP),  # the row claims another length
    Rule(COUNT, (_H,), (ROW,), NONE, EVIDENCE),
    Rule(COUNT, (_H,), (DEVICE,), KEPT, VALID),
    Rule(GENERATION, _ANY, (DISK, FETCH), REMADE, TICKET, _GROUP),
    Rule(GENERATION, (_H,), (DEVICE,), REMADE, RECYCLED),  # under the same key
    *_values(DTYPE),
    *_values(BIT),
    *_values(TORN),
    Rule(EVICTED, _ANY, (FETCH,), NONE, DELIVERED, _GROUP),
    Rule(REUSED, _RINGS, (ROW, DEVICE), NONE, EVIDENCE),
    Rule(REUSED, (_S,), (ROW,), NONE, RESTORED),
    Rule(REUSED, (_S,), (DEVICE,), NONE, SLOT_BYTES),
    Rule(REUSED, (_H,), (DEVICE,), OWN, RECYCLED),
    Rule(ENTRY, (_H,), (DEVICE,), NONE, OWNER),  # the pages of another row
    Rule(RELEASED, (_H,), (DEVICE,), NONE, FORM),  # and cleared
    *_of_others(FOREIGN),
    *_of_others(OLD),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault. component: the first of its group, or of all, where the fault is the same."""

    kind: str
    component: str
    moment: str
    seal: str
    guard: str
    extent: str = ALL

    def __str__(self) -> str:
        seal = f", checksum {self.seal}" if self.seal else ""
        extent = f", {self.extent} block" if self.extent != ALL else ""
        return f"{self.kind} of {self.component} ({self.moment}{seal}{extent})"


def sort_of(contract: Contract) -> str:
    """ "history", "window", "tail" (a ring), "state" (recurrent), or "" for what is not stored."""
    if isinstance(contract, History):
        return _H
    if isinstance(contract, Window):
        return _W
    if isinstance(contract, Point):
        return _T if contract.group else _S
    return ""


def rules(kind: str, contract: Contract, moment: str) -> tuple[Rule, ...]:
    """The lines of the table that apply."""
    if kind not in KINDS or moment not in MOMENTS:
        raise ValueError(f"no such fault: {kind=}, {moment=}; see KINDS and MOMENTS")
    sort = sort_of(contract)
    return tuple(x for x in TABLE if x.kind == kind and sort in x.contracts and moment in x.moments)


def applies(kind: str, contract: Contract, moment: str) -> bool:
    """Whether a component of that contract can have that fault at that moment."""
    return bool(rules(kind, contract, moment))


def live_components(spec: CacheSpec, length: int) -> dict[str, Leaf]:
    """Components that hold something at `length`, each with a leaf that does."""
    found: dict[str, Leaf] = {}
    for slot in spec.slots():
        if isinstance(slot.leaf.contract, Evidence | Scratch | Derived):
            continue
        if slot.leaf.live_rows(length, length).any():
            found.setdefault(owner(spec, slot).leaf.component, slot.leaf)
    return found


def cases(spec: CacheSpec, length: int, extents: tuple[str, ...] = (ALL,)) -> list[Case]:
    """Every fault of a model whose prefix of `length` tokens is resumed.

    length: a multiple of G, at least 2 G, so that there is a block and a checkpoint before.
    """
    if length % spec.granularity or length < 2 * spec.granularity:
        raise ValueError(f"{length=} must be a multiple of {spec.granularity=}, and at least two")
    found: dict[tuple, Case] = {}
    for kind in KINDS:
        for component, leaf in live_components(spec, length).items():
            group = sort_of(leaf.contract) == _H
            for moment in MOMENTS:
                for rule in rules(kind, leaf.contract, moment):
                    same = {_COMPONENT: component, _GROUP: group, _PREFIX: ""}[rule.per]
                    for extent in extents if group and rule.per != _PREFIX else (ALL,):
                        case = Case(kind, component, moment, rule.seal, rule.guard, extent)
                        key = (kind, same, moment, rule.seal, rule.guard, extent)
                        found.setdefault(key, case)
    return list(found.values())


def all_but(guard: str) -> tuple[str, ...]:
    """Every check but one. What is found in a fetch also needs the rules that act on it: the fetch
    defines the hit, and what is left is planned jointly."""
    kept = {guard}
    if guard in (CHECKSUM, TICKET, LABEL, LAYOUT, POSITIONS, DELIVERED):
        kept |= {DELIVERED, JOINT}
    return tuple(x for x in CHECKS if x not in kept)


def at(moment: str) -> tuple[str, ...]:
    """The checks that can find anything at a moment."""
    if moment == DEVICE:
        return ON_DEVICE
    return tuple(x for x in CHECKS if x == EVIDENCE or x not in ON_DEVICE)


def covering(found: list[Case]) -> list[Case]:
    """A sample: every line of the table at every moment once, components in turn."""
    lines: dict[tuple, list[Case]] = {}
    for case in found:
        key = (case.kind, case.moment, case.seal, case.guard)
        lines.setdefault(key, []).append(case)
    return [some[i % len(some)] for i, some in enumerate(lines.values())]
