"""A process that publishes until it is killed, and tells what its store has promised."""

from typing import NamedTuple

import numpy as np

from hetero_kv import validate
from hetero_kv.contract import Evidence
from hetero_kv.prefix.disk.lock import LockedError
from hetero_kv.prefix.payload import Section
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.prefix.transfer import Transfer
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.world import CAPACITY, PROMPTS, SPEC, WHO, B, G

HOST_BYTES = 6000


class Row(NamedTuple):
    """Stands for a cache of one row that has prefilled `length` tokens."""

    hashes: np.ndarray
    length: int
    batch: int = 1
    capacity: int = CAPACITY


class Plain(Transfer):
    """What a transfer copies off a device, in numpy: nothing to compile, safe after a fork."""

    def check(self, cache: Row) -> None:
        """A Row has no arrays that could be another model's."""

    def inspect(self, cache: Row, row: int):
        return cache.length, cache.length // G * G, validate.Verdict(np.zeros(1), np.ones(1, bool))

    def read_history(self, cache: Row, row: int, first: int, stop: int) -> list[np.ndarray]:
        return [
            self._filled(self.history_layout(x), cache, x * B, (x + 1) * B)
            for x in range(first, stop)
        ]

    def read_checkpoint(self, cache: Row, row: int) -> np.ndarray:
        return self._filled(self.checkpoint_layout, cache, 0, cache.length)

    def _filled(self, layout, cache: Row, start: int, stop: int) -> np.ndarray:
        buffer = np.zeros(layout.nbytes, np.uint8)
        for section in layout.sections:
            view = section.view(buffer)
            for repeat in range(section.slot.repeats):
                view[repeat] = _rows(section, repeat, cache.hashes, start, stop)
        return buffer


def _rows(section: Section, repeat: int, hashes: np.ndarray, start: int, stop: int) -> np.ndarray:
    slot = section.slot
    leaf = validate.owner(SPEC, slot).leaf
    if isinstance(slot.leaf.contract, Evidence):
        return np.where(leaf.live_rows(stop), leaf.ring_positions(stop), -1)
    index, value = synthetic.rows_of(slot, repeat, hashes, start, stop)
    if not leaf.is_ring:
        return value
    rows = np.zeros(section.shape[1:], section.dtype)
    rows[index] = value
    rows[~leaf.live_rows(stop)] = 0
    return rows


def make(directory, disk_bytes: int) -> PrefixStore:
    """With a thread that writes."""
    store = PrefixStore(
        SPEC, world.IDENTITY, host_bytes=HOST_BYTES, disk_dir=directory, disk_bytes=disk_bytes
    )
    store.transfer = Plain(SPEC)
    return store


def lengths(store: PrefixStore) -> dict[tuple[int, int], int]:
    """How far each prompt of each tenant can be resumed."""
    return {
        (w, i): world.resumable(store, who, tokens)
        for w, who in enumerate(WHO)
        for i, tokens in enumerate(PROMPTS)
    }


def work(pipe, directory, disk_bytes: int, seed: int) -> None:
    """Sends ("put", …) and ("clear", None) before doing it, ("held", lengths) after a flush."""
    random = np.random.default_rng(seed)
    try:
        store = make(directory, disk_bytes)
    except LockedError as error:  # the lock must not outlive its process
        pipe.send(("failed", str(error)))
        return
    pipe.send(("open", lengths(store)))
    while True:
        w, i = int(random.integers(len(WHO))), int(random.integers(len(PROMPTS)))
        tokens, who = PROMPTS[i], WHO[w]
        stop = int(random.integers(1, len(tokens) + 1))
        hashes = synthetic.prefix_hashes(world.contents(who, tokens))
        pipe.send(("put", (w, i, stop)))
        for length in (*range(G, stop, G), stop):
            store.publish(tokens, Row(hashes, length), **who.arguments)
        if random.random() < 0.02:
            pipe.send(("clear", None))
            store.clear()
            pipe.send(("cleared", None))
        if random.random() < 0.15:
            flushed = store.flush()
            if not flushed.ok:
                pipe.send(("failed", flushed.failure))
            pipe.send(("held", lengths(store)))
