"""Small groups with known bytes, and tiers over them."""

import os
import pathlib
import shutil

import numpy as np

from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.reading import DiskReader
from hetero_kv.prefix.disk.tier import DiskTier
from hetero_kv.prefix.payload import ArrayPayload, GroupLayout, label

IDENTITY = bytes(range(32))
CAPACITY = 1 << 18
KINDS = ("history", "checkpoint")
LAYOUTS = {
    "history": GroupLayout((), (("entries", 0, 432), ("index keys", 432, 656)), 656),
    "checkpoint": GroupLayout((), (("windows", 0, 1600), ("tails", 1600, 1616)), 1616),
}


def layout_of(kind, depth):
    del depth
    return LAYOUTS[kind]


def kind_of(i):
    return KINDS[i % 3 == 0]


def key(i):
    return b"key %d" % i


def name(i):
    """label of object i."""
    return label(kind_of(i), key(i), i % 7 + 1)


def payload(i):
    layout = LAYOUTS[kind_of(i)]
    data = np.random.default_rng(i).integers(0, 256, layout.nbytes, dtype=np.uint8)
    return ArrayPayload.seal(layout, name(i), data)


def make(directory, capacity=CAPACITY, segment_bytes=8192, background=False, **options):
    return DiskTier(
        directory,
        capacity,
        options.pop("identity", IDENTITY),
        layout_of,
        segment_bytes=segment_bytes,
        background=background,
        **options,
    )


def reader(directory, **options):
    return DiskReader(directory, IDENTITY, layout_of, **options)


def put(tier, i):
    return tier.put(kind_of(i), key(i), i % 7 + 1, payload(i), b"meta %d" % i)


def fill(tier, numbers):
    """Puts objects and makes them durable."""
    for i in numbers:
        assert put(tier, i) is not None, i
    assert tier.flush().ok


def number(stored):
    return int(stored.key.split()[1])


def held(tier):
    """Numbers of the objects that the tier says it has."""
    return {number(x) for x in tier.stored()}


def read(tier, i):
    """True if object i came back right, else the failure; a wrong byte fails the test."""
    ticket = tier.find(kind_of(i), key(i))
    if ticket is None:
        return "absent"
    return right(i, tier.read(ticket, name(i)))


def right(i, fetched):
    if fetched.payload is None:
        return fetched.failure
    assert fetched.payload.buffer.tobytes() == payload(i).buffer.tobytes()
    assert fetched.payload.damaged(name(i)) == ""
    return True


def good(tier, numbers):
    """The objects that come back right."""
    return {i for i in numbers if read(tier, i) is True}


def usage(directory):
    """Bytes of all files but the lock."""
    paths = (x for x in pathlib.Path(directory).rglob("*") if x.is_file() and x.name != "lock")
    return sum(x.stat().st_size for x in paths)


def healthy(tier):
    assert tier.problems() == []
    assert tier.ledger().exact
    assert usage(tier.directory) <= tier.capacity


def segments(directory):
    return sorted(pathlib.Path(directory).glob("*.seg"))


def sample(directory, count=14):
    """A closed directory with objects 0 .. count - 1 but every fifth; returns their numbers."""
    tier = make(directory)
    fill(tier, range(count))
    for i in range(0, count, 5):
        tier.drop(tier.find(kind_of(i), key(i)))
    tier.close()
    return {i for i in range(count) if i % 5}


def copy(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


class FaultyFiles(Files):
    """Fails the operations that `should_fail(operation, count)` picks."""

    def __init__(self, should_fail, error):
        self.count = 0
        self.armed = True
        self._should_fail = should_fail
        self._error = error

    def _step(self, operation):
        if not self.armed:
            return
        self.count += 1
        if self._should_fail(operation, self.count):
            raise OSError(self._error, os.strerror(self._error))

    def create(self, path):
        self._step("create")
        return super().create(path)

    def open(self, path, write):
        self._step("open")
        return super().open(path, write)

    def read(self, fd, nbytes, offset):
        self._step("read")
        return super().read(fd, nbytes, offset)

    def read_into(self, fd, buffers, offset):
        self._step("read")
        return super().read_into(fd, buffers, offset)

    def write(self, fd, parts, offset):
        try:
            self._step("write")
        except OSError:
            data = b"".join(bytes(memoryview(x)) for x in parts)
            super().write(fd, [data[: len(data) // 2]], offset)  # a full disk takes a part
            raise
        super().write(fd, parts, offset)

    def sync(self, fd):
        self._step("sync")
        super().sync(fd)

    def truncate(self, fd, size):
        self._step("truncate")
        super().truncate(fd, size)

    def remove(self, path):
        self._step("remove")
        super().remove(path)

    def sync_directory(self, path):
        self._step("sync")
        super().sync_directory(path)
