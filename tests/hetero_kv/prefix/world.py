"""Small prompts of several tenants whose bytes tell whose they are, and stores that can be broken.

What a leaf holds depends on the tenant, the adapter, the position and every token before it, so a
byte of another request, position or tenant is a wrong byte, whatever the keys say.
"""

import collections
import contextlib
import errno
import functools
from typing import NamedTuple
from unittest import mock

import numpy as np

from hetero_kv import state, validate
from hetero_kv.contract import Derived, Scratch
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.identity import Identity, describe_leaves
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.disk import objects

SPEC = synthetic.everything(chunk=8, block=4)
B, G, CAPACITY = SPEC.block, SPEC.granularity, 40
# By hand, so that a process may import this and fork before JAX starts its threads.
IDENTITY = Identity(
    weights="1" * 64,
    config="2" * 64,
    leaves=describe_leaves(SPEC),
    block=B,
    chunk=SPEC.chunk,
    batch=2,
    tiles=(("csa entries", 4),),
    backend="cpu",
)
PLENTY = 1 << 20
LENGTHS = (40, 33, 32, 25, 24, 17, 16, 9, 8, 7)
FORKS = (0, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33)


class Who(NamedTuple):
    """Whose prefix: what the keys must tell apart besides tokens."""

    tenant: str = ""
    adapter: str = ""

    @property
    def arguments(self) -> dict:
        """For lookup, publish and explain."""
        extra = {"adapter": self.adapter} if self.adapter else None
        return {"tenant": self.tenant, "extra": extra}


WHO = (Who("a"), Who("b"), Who("a", "0" * 64))


def _prompts() -> list[np.ndarray]:
    stem, found = np.arange(100, 100 + CAPACITY), []
    for i, fork in enumerate((CAPACITY, *FORKS)):
        tokens = np.concatenate([stem[:fork], np.arange(200, 240)[fork:] + 100 * i])
        found.append(tokens)
    ends = (LENGTHS[i % len(LENGTHS)] for i in range(len(found)))
    return [x[:n] for x, end in zip(found, ends, strict=True) for n in (CAPACITY, end)]


PROMPTS = _prompts()


def contents(who: Who, tokens: np.ndarray) -> np.ndarray:
    """What the leaves are made of: tokens of this tenant and adapter alone."""
    return tokens + 10_000 * (1 + WHO.index(who))


@functools.lru_cache(maxsize=4096)
def _cold(who: Who, tokens: bytes, length: int, decoded: int):
    cache = state.init(SPEC, 1, CAPACITY)
    told = contents(who, np.frombuffer(tokens, np.int64))
    if length:
        cache = synthetic.advance(SPEC, cache, 0, told, length)
    if decoded:
        cache = synthetic.advance(SPEC, cache, 0, told, length + decoded, on_grid=False)
    return cache


def cold(who: Who, tokens: np.ndarray, length: int, decoded: int = 0):
    """A cache (never donate it) whose row 0 has prefilled `length` tokens, and decoded more."""
    return _cold(who, np.asarray(tokens, np.int64).tobytes(), length, decoded)


def stands(cache, row: int) -> int:
    """The length of a row."""
    return int(np.asarray(cache.length)[row])


def wrong(cache, row: int, who: Who, tokens: np.ndarray) -> list[str]:
    """What a row holds that a cold run would not."""
    length = stands(cache, row)
    for slot, live, want in _live(who, np.asarray(tokens, np.int64).tobytes(), length):
        have = np.ascontiguousarray(np.asarray(cache.leaf(slot))[:, row])
        if ((have.view(want.dtype) != want) & live).any():
            break
    else:
        return []
    told = synthetic.wrong_rows(SPEC, cache, row, contents(who, tokens))
    return told or [f"{slot.path}: not as in a cold run"]


@functools.lru_cache(maxsize=4096)
def _live(who: Who, tokens: bytes, length: int) -> list[tuple]:
    """(leaf, mask, value) of all rows that matter at a length."""
    cache, found = _cold(who, tokens, length, 0), []
    assert not synthetic.wrong_rows(SPEC, cache, 0, contents(who, np.frombuffer(tokens, np.int64)))
    for slot in SPEC.slots():
        about = validate.owner(SPEC, slot).leaf
        if isinstance(slot.leaf.contract, Derived | Scratch):
            continue
        value = np.array(cache.leaf(slot))[:, 0]
        rows = slot.leaf.row_count(CAPACITY)
        live = about.live_rows(length, CAPACITY) if rows else np.ones(1, bool)
        live = np.asarray(live).reshape(1, -1, *[1] * max(0, value.ndim - 2))
        found.append((slot, live, value.view(f"u{value.itemsize}")))
    return found


def published(store: PrefixStore, who: Who, tokens: np.ndarray, stop: int | None = None):
    """Publishes as a cold prefill would that ends a chunk at every multiple of G."""
    stop = len(tokens) if stop is None else stop
    told = None
    for length in range(G, stop + 1, G):
        told = store.publish(tokens, cold(who, tokens, length), **who.arguments)
    return told


def resumable(store: PrefixStore, who: Who, tokens: np.ndarray) -> int:
    """As `explain` has it."""
    return store.explain(tokens, **who.arguments).plan.resumable_length


def restored(store: PrefixStore, who: Who, tokens: np.ndarray, cache=None, row: int = 0):
    """(cache, length, lease) of one restore, checked byte by byte."""
    cache = state.init(SPEC, 2, CAPACITY) if cache is None else cache
    with store.lookup(tokens, **who.arguments) as lease:
        cache = store.restore(lease, cache, row)
        length = stands(cache, row)
        assert length == lease.resumable_length <= lease.candidate_length < max(len(tokens), 1)
        assert wrong(cache, row, who, tokens) == []
    return cache, length, lease


class Files(objects.FaultyFiles):
    """Operations in `failing` fail while they are in it. `seen`, `failed`: how often, by name."""

    def __init__(self):
        self.failing: set[str] = set()
        self.failed: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        super().__init__(self._fails, errno.EIO)

    def _fails(self, operation: str, count: int) -> bool:
        self.seen[operation] = self.seen.get(operation, 0) + 1
        if operation in self.failing:
            self.failed[operation] = self.failed.get(operation, 0) + 1
        return operation in self.failing


def opened(directory=None, files=None, host_bytes=PLENTY, disk_bytes=PLENTY, **options):
    """A store; with a directory, one with a disk that uses `files`, in this thread alone."""
    if directory is None:
        return PrefixStore(SPEC, IDENTITY, host_bytes=host_bytes, **options)
    files = files or Files()
    tier = functools.partial(DiskTier, files=files, background=False)
    with mock.patch("hetero_kv.prefix.upkeep.DiskTier", tier):
        store = PrefixStore(
            SPEC,
            IDENTITY,
            host_bytes=host_bytes,
            disk_dir=directory,
            disk_bytes=disk_bytes,
            **options,
        )
    assert store.disk is None or store.disk._writer.files is files
    return store


def healthy(store: PrefixStore) -> None:
    """Both ledgers, whatever is damaged meanwhile."""
    problems = store.catalog.problems()
    assert not problems, problems
    metrics = stores.plain_metrics(store)
    used = sum(n for x, n in metrics.items() if x.startswith("host_used_bytes"))
    assert metrics["host_free_bytes"] + used == metrics["host_capacity_bytes"]
    assert metrics["host_free_bytes"] >= 0
    if store.disk is not None and not store.disk.failure:
        problems = store.disk.problems()
        assert not problems, problems
        assert store.disk.ledger().exact
        assert objects.usage(store.disk.directory) <= store.disk.capacity


def total(store: PrefixStore, name: str) -> int:
    """A counter summed over its labels."""
    return totals(store)[name]


def totals(store: PrefixStore) -> collections.Counter:
    """All metrics, summed over their labels."""
    found = collections.Counter()
    for name, value in stores.plain_metrics(store).items():
        found[name.partition("{")[0]] += value
    return found


def flip(store: PrefixStore, group, at: int) -> bool:
    """Damages a byte of a group in host memory; False: there are none."""
    buffer = stores.raw(store, group) if group.on_host else ()
    if not len(buffer):
        return False
    buffer[at % len(buffer)] ^= 1 << at % 8
    return True


def flip_on_disk(store: PrefixStore, group, at: int) -> bool:
    """Damages a byte of a group's payload in its segment; False: it has none there."""
    entry = group.disk and store.disk._books.entries.get(group.disk.generation)
    if not entry or entry.segment is None or not entry.place.payload_bytes:
        return False
    offset = entry.place.offset + entry.place.header_bytes + at % entry.place.payload_bytes
    with open(entry.segment.path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1 << at % 8]))
    return True


@contextlib.contextmanager
def failing(files: Files, *operations: str):
    """These operations fail inside."""
    files.failing |= set(operations)
    try:
        yield
    finally:
        files.failing -= set(operations)


def sizes() -> tuple[int, int]:
    """Bytes of a middle block's history group, and of a checkpoint."""
    return stores.sizes(SPEC)
