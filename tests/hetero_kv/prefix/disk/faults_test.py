"""Failing operations of the operating system, and readers that are slower than deletion."""

import errno
import sqlite3

import numpy as np
import pytest

from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.disk.segment import UNREADABLE
from hetero_kv.prefix.host import STALE
from tests.hetero_kv.prefix.disk import objects


def scenario(tier):
    """Puts, deletes and compacts. Returns the objects that were durable, and touched after it."""
    random = np.random.default_rng(0)
    durable, touched = set(), set()

    def flush():
        if tier.flush().ok:
            durable.clear()
            durable.update(objects.held(tier))
            touched.clear()

    for i in range(70):
        objects.put(tier, i)
        touched.add(i)
        if i % 3 == 2:
            for j in random.integers(0, i, 2).tolist():
                ticket = tier.find(objects.kind_of(j), objects.key(j))
                if ticket is not None:
                    tier.drop(ticket)
                    touched.add(j)
        if i % 10 == 9:
            flush()
            assert tier.problems() == []
        if i % 13 == 12:
            objects.good(tier, range(i + 1))  # a wrong byte would raise
    with tier._io:
        tier._writer.reclaim()
    flush()
    assert tier.problems() == []
    return set(durable), set(touched)


def run_with(directory, should_fail, error):
    """The scenario on a disk that fails, then a start on one that works."""
    files = objects.FaultyFiles(should_fail, error)
    tier = objects.make(directory, capacity=1 << 17, segment_bytes=6000, files=files)
    durable, touched = scenario(tier)
    files.armed = False
    if not tier.failure:
        objects.good(tier, range(70))
        durable &= objects.held(tier)
        assert tier.flush().failure in ("", "lost")
        objects.healthy(tier)
        held = objects.held(tier)
    else:
        held = None
    tier.close()
    again = objects.make(directory, capacity=1 << 17, segment_bytes=6000)
    objects.healthy(again)
    assert objects.good(again, range(70)) == objects.held(again)
    assert objects.held(again) >= durable - touched
    if held is not None:
        assert objects.held(again) == held
    again.close()
    return files.count


@pytest.fixture(scope="module")
def operations(memory_directory):
    return run_with(memory_directory / "counted", lambda operation, count: False, 0)


def test_the_scenario_compacts(operations, tmp_path):
    seen = []
    run_with(tmp_path, lambda operation, count: seen.append(operation), 0)
    assert operations > 100
    assert {"create", "write", "sync", "read", "remove", "truncate"} <= set(seen)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_write(operations, tmp_path, lasting):
    for n in range(1 + 8 * lasting, operations, 16):
        run_with(
            tmp_path / str(n),
            lambda operation, count, n=n: (
                operation in ("write", "create") and (count >= n if lasting else count == n)
            ),
            errno.ENOSPC,
        )


def test_any_operation_may_fail(operations, tmp_path):
    for n in range(4, operations, 16):
        run_with(tmp_path / str(n), lambda operation, count, n=n: count == n, errno.EIO)


@pytest.mark.full
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("lasting", [False, True])
def test_every_operation_fails_in_turn(operations, tmp_path, error, lasting):
    for n in range(1, operations):
        run_with(
            tmp_path / str(n),
            lambda operation, count, n=n: count >= n if lasting else count == n,
            error,
        )


@pytest.mark.parametrize("operation", ["write", "sync", "create", "remove", "truncate", "read"])
def test_operations_that_always_fail(tmp_path, operation):
    run_with(tmp_path, lambda now, count: now == operation, errno.EIO)


def test_a_full_disk_frees_what_it_could_not_write_and_counts_it(tmp_path):
    files = objects.FaultyFiles(lambda operation, count: operation == "write", errno.ENOSPC)
    files.armed = False
    tier = objects.make(tmp_path, files=files)
    objects.fill(tier, range(5))
    before = tier.ledger()
    files.armed = True
    ticket = objects.put(tier, 7)
    flushed = tier.flush()
    assert not flushed.ok and flushed.lost == (ticket,)
    assert tier.ledger() == before
    assert tier.counters.get("disk_lost_total", kind="history", reason="ENOSPC") == 1
    assert tier.read(ticket, objects.name(7)).failure == STALE
    assert objects.good(tier, range(8)) == set(range(5))  # and everybody else is served
    files.armed = False
    objects.fill(tier, [7])
    objects.healthy(tier)


def test_a_record_written_in_part_never_hides_the_next_one(tmp_path):
    """It can be neither cut nor marked; its header is whole and says how long it should be."""
    failing = ("write", "truncate")
    files = objects.FaultyFiles(lambda operation, count: operation in failing, errno.EIO)
    files.armed = False
    tier = objects.make(tmp_path / "a", segment_bytes=1 << 16, files=files)
    objects.fill(tier, range(5))
    files.armed = True
    ticket = objects.put(tier, 6)
    assert tier.flush().lost == (ticket,)
    crashed = objects.copy(tmp_path / "a", tmp_path / "b")
    files.armed = False
    objects.fill(tier, [8, 9])
    objects.healthy(tier)
    marked = objects.copy(tmp_path / "a", tmp_path / "c")
    for directory, at_least in ((crashed, range(5)), (marked, [*range(5), 8, 9])):
        for path in directory.glob("index*"):
            path.unlink()  # found by their headers
        again = objects.make(directory)
        assert objects.good(again, range(10)) == set(at_least)
        # What was not marked is found out by its checksum, not before.
        assert objects.held(again) <= {*at_least, *([6] if directory == crashed else [])}
        objects.fill(again, [6])
        assert objects.good(again, range(10)) == {*at_least, 6}
        objects.healthy(again)
        again.close()


def test_an_index_that_cannot_be_written_costs_nothing(tmp_path, monkeypatch):
    tier = objects.make(tmp_path, index_rows=1)
    objects.fill(tier, range(5))

    def full(*args):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tier._db, "_put", full)
        objects.fill(tier, range(5, 10))
        tier.drop(tier.find(objects.kind_of(2), objects.key(2)))
        assert tier.flush().ok
        assert tier.counters.get("disk_index_errors_total") == 2
        objects.healthy(tier)
        copy = objects.copy(tmp_path, tmp_path.with_name("copy"))
    again = objects.make(copy)
    assert objects.good(again, range(10)) == set(range(10)) - {2}
    objects.fill(tier, range(10, 12))  # writes it anew
    tier.close()
    healed = objects.make(tmp_path)
    assert objects.good(healed, range(12)) == set(range(12)) - {2}
    assert not [x for x in healed.counters.snapshot() if "index" in x]


def test_an_unreadable_object_fails_once(tmp_path):
    files = objects.FaultyFiles(lambda operation, count: operation == "read", errno.EACCES)
    files.armed = False
    tier = objects.make(tmp_path, files=files)
    objects.fill(tier, range(5))
    files.armed = True
    assert objects.read(tier, 1) == UNREADABLE
    assert objects.read(tier, 1) == "absent"  # the failure changed the verdict: no livelock
    files.armed = False
    assert objects.good(tier, range(5)) == {0, 2, 3, 4}
    objects.healthy(tier)


def test_a_directory_that_cannot_be_made_puts_the_tier_out_of_use(tmp_path):
    (tmp_path / "file").write_text("")
    tier = objects.make(tmp_path / "file" / "disk")
    assert tier.failure.startswith("open")
    assert objects.put(tier, 1) is None
    assert not tier.flush().ok
    assert tier.stored() == [] and tier.ledger().exact
    tier.close()
    tier.close()


class SlowFiles(Files):
    """Calls `meanwhile` in the middle of every read of an object."""

    meanwhile = None

    def read_into(self, fd, buffers, offset):
        done = super().read_into(fd, buffers[:1], offset)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return done + super().read_into(fd, buffers[1:], offset + done)


@pytest.mark.parametrize("event", ["deleted", "replaced", "cleared", "compacted", "removed"])
def test_a_reader_slower_than_the_writer(tmp_path, event):
    files = SlowFiles()
    tier = objects.make(tmp_path, files=files)
    objects.fill(tier, range(12))
    other = objects.reader(tmp_path, files=SlowFiles())
    ticket = tier.find(objects.kind_of(1), objects.key(1))
    entry = tier._books.entries[ticket.generation]

    def meanwhile():
        if event in ("deleted", "replaced", "removed"):
            tier.drop(ticket)
        if event == "replaced":
            objects.fill(tier, [1])
        if event == "cleared":
            tier.clear()
            objects.fill(tier, range(20, 30))
        if event == "removed":
            for i in range(2, 12):
                tier.drop(tier.find(objects.kind_of(i), objects.key(i)))
            tier.flush()
        if event == "compacted":
            tier.drop(tier.find(objects.kind_of(2), objects.key(2)))
            assert tier.compact(entry.segment.number)

    files.meanwhile = meanwhile
    fetched = tier.read(ticket, objects.name(1))
    if event == "compacted":
        assert objects.right(1, fetched) is True
    else:
        assert fetched.failure == STALE
    objects.healthy(tier)

    again = objects.make(tmp_path / "other", files=Files())
    objects.fill(again, range(12))
    other = objects.reader(tmp_path / "other", files=SlowFiles())
    tier, ticket = again, again.find(objects.kind_of(1), objects.key(1))
    entry = tier._books.entries[ticket.generation]
    other._files.meanwhile = meanwhile
    fetched = other.read(objects.kind_of(1), objects.key(1), 2)
    if event in ("compacted", "replaced"):
        assert objects.right(1, fetched) is True  # found at its new place
    else:
        assert fetched.failure == "absent"
