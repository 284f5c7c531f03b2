"""Random histories of a store: no hit that was not published, no wrong byte, exact ledgers."""

import numpy as np
import pytest

from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.histories import BLOCK, STATE, run
from tests.hetero_kv.prefix.world import PROMPTS, SPEC, WHO

COMMON = {"published": 100, "shortened": 20, "hit": 15, "restored later": 1, "cancelled": 1}
IN_MEMORY = {**COMMON, "evicted": 20, "dropped": 1, "damage: host": 1, "damage: swap": 1, "cut": 1}
ON_DISK = {
    **COMMON,
    **{"found again": 20, "demoted": 10, "promoted": 1, "disk bytes": 1000},
    **{"disk_evicted": 10, "dropped": 1, "healed": 1, "damage: disk": 1},
}
RARE = ("failed: read", "failed: write", "failed: sync", "acknowledged")


@pytest.mark.parametrize("length", [1, 4, 8, 11, 24, 33, 40])
def test_a_wrong_byte_in_any_leaf_is_recognised(length):
    who, tokens = WHO[1], PROMPTS[0]
    cache, found = world.cold(who, tokens, length), 0
    for slot in SPEC.slots():
        leaf = np.array(cache.leaf(slot))
        for at in range(0, leaf.size, max(1, leaf.size // 7)):
            changed = leaf.copy()
            changed.reshape(-1)[at] += 1
            other = cache.with_leaves({slot: changed})
            seen = synthetic.wrong_rows(SPEC, other, 0, world.contents(who, tokens))
            assert bool(world.wrong(other, 0, who, tokens)) == bool(seen)
            found += bool(seen)
    assert found > 20
    assert world.wrong(cache, 0, WHO[0], tokens) and not world.wrong(cache, 0, who, tokens)
    for other in (world.cold(WHO[0], tokens, length), world.cold(who, tokens + 1, length)):
        assert world.wrong(other, 0, who, tokens)


@pytest.mark.parametrize("histories", [240, pytest.param(2000, marks=pytest.mark.full)])
def test_histories_in_memory(histories):
    assert world.sizes() == (BLOCK, STATE)
    seen = run(histories, 16, disk=False)
    assert not {x: seen[x] for x, least in IN_MEMORY.items() if seen[x] < least}, seen


@pytest.mark.parametrize("histories", [120, pytest.param(1400, marks=pytest.mark.full)])
def test_histories_over_a_disk(tmp_path, histories):
    seen = run(histories, 16, disk=True, root=tmp_path)
    least = {x: n for x, n in ON_DISK.items() if n > 1 or histories > 1000}
    assert not {x: seen[x] for x, n in least.items() if seen[x] < n}, seen
    rare = [seen[x] for x in RARE]
    assert all(rare) if histories > 1000 else any(rare), seen
