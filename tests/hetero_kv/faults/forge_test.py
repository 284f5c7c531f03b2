"""Forged leaves: of the right form, wrong where it matters, and no more wrong than said."""

import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.contract import Evidence
from hetero_kv.faults import forge, kinds
from tests.hetero_kv.faults.world import LENGTH, injector
from tests.hetero_kv.prefix.world import SPEC

FORGED = (kinds.NONE, kinds.KEPT, kinds.REMADE)
WHOLE = (kinds.EVICTED, kinds.GENERATION)
SLOTS = ("windows", "tails", "recurrent state")  # of pages: resident_test
CASES = [
    x
    for x in kinds.cases(SPEC, LENGTH)
    if x.seal in FORGED
    and not (x.kind == kinds.DROP and x.moment != kinds.ROW)
    and x.kind not in WHOLE
    and (x.moment != kinds.DEVICE or x.component in SLOTS)
    and x.guard not in (kinds.IDENTITY, kinds.JOINT, kinds.DELIVERED)
    and not (x.kind == kinds.POSITION and x.component not in ("windows", "tails"))
]


def live(slot, value: np.ndarray) -> np.ndarray:
    about = validate.owner(SPEC, slot).leaf
    if not about.rows or value.ndim < 2:
        return value
    return value[:, about.live_rows(LENGTH)]


@pytest.mark.parametrize("kind", sorted({x.kind for x in CASES}))
def test_a_live_row_is_wrong(kind: str) -> None:
    made = injector().material
    before = {k: v.copy() for k, v in made.target.leaves.items()}
    for case in (x for x in CASES if x.kind == kind):
        found = forge.forged(SPEC, case, made)
        changed, evidence = [], 0
        for slot in SPEC.slots():
            if slot.path not in found:
                continue
            right, wrong = made.target.leaves[slot.path], found[slot.path]
            assert wrong.shape == right.shape and wrong.dtype == right.dtype
            assert np.isfinite(wrong.astype(np.float32)).all()
            assert validate.owner(SPEC, slot).leaf.component == case.component
            differs = live(slot, wrong).tobytes() != live(slot, right).tobytes()
            if isinstance(slot.leaf.contract, Evidence):
                assert differs and case.guard != kinds.AUDIT
                evidence += 1
            elif differs:
                changed.append(slot.path)
        assert changed, f"{case}: the values are as they were"
        assert evidence or case.guard not in (kinds.EVIDENCE, kinds.POSITIONS), case
    for path, value in made.target.leaves.items():
        assert value.tobytes() == before[path].tobytes(), "material was changed"


def test_one_bit_is_one_bit() -> None:
    made = injector().material
    for component in ("windows", "recurrent state"):
        case = kinds.Case(kinds.BIT, component, kinds.ROW, kinds.NONE, kinds.AUDIT)
        for path, wrong in forge.forged(SPEC, case, made).items():
            right = made.target.leaves[path]
            bits = np.unpackbits(wrong.view(np.uint8) ^ right.view(np.uint8))
            assert bits.sum() == 1


def test_half_of_a_torn_write_is_there() -> None:
    made = injector().material
    case = kinds.Case(kinds.TORN, "full kv", kinds.DISK, kinds.KEPT, kinds.CHECKSUM)
    ((path, wrong),) = forge.forged(SPEC, case, made).items()
    right = made.target.leaves[path]
    first, last = SPEC.entries_of_block(next(x.leaf for x in SPEC.slots() if x.path == path), 0)
    half = (last - first) // 2
    assert wrong[:, :half].tobytes() == right[:, :half].tobytes()
    assert not wrong[:, half:last].any() and right[:, half:last].any()
