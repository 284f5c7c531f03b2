"""Orders of eviction against libcachesim on flat keys: every item is a leaf of its own.

Only where `libcachesim` is installed; it knows no prefixes, so trees are left to other tests.
"""

import numpy as np
import pytest

from hetero_kv.prefix.policy import eviction

lib = pytest.importorskip("libcachesim")

NAMES = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "gdsf": "GDSF", "sieve": "Sieve",
         "s3fifo": "S3FIFO", "wtinylfu": "WTinyLFU"}  # fmt: skip
EXACT = ("lru", "fifo", "lfu", "sieve")  # the others leave ties, ghosts or sketches open


def ours(name: str, keys: list[int], capacity: int) -> float:
    """Share of hits."""
    order, held, hits = eviction(name)(), set(), 0
    for key in keys:
        if key in held:
            hits += 1
            order.touch(key)
            continue
        while len(held) >= capacity:
            gone = order.victim(lambda item: True)
            order.remove(gone, evicted=True)
            held.remove(gone)
        order.add(key)
        held.add(key)
    return hits / len(keys)


def theirs(name: str, keys: list[int], capacity: int) -> float:
    """The same by libcachesim, with objects of one byte."""
    cache = getattr(lib, NAMES[name])(cache_size=capacity)
    hits = 0
    for time, key in enumerate(keys):
        request = lib.Request()
        request.obj_id, request.obj_size, request.clock_time = key, 1, time
        hits += bool(cache.get(request))
    return hits / len(keys)


@pytest.mark.parametrize("capacity", [250, 500])  # its W-TinyLFU needs a window of an object
@pytest.mark.parametrize("name", NAMES)
def test_hits_are_theirs(name: str, capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    keys = [int(x) for x in rng.zipf(1.2, 20_000) % 2_000]
    have, want = ours(name, keys, capacity), theirs(name, keys, capacity)
    assert have == pytest.approx(want, abs=1e-9 if name in EXACT else 0.01)
