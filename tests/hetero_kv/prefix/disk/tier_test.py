"""The disk tier in fair weather: what is put comes back, also in another life, within limits."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from hetero_kv.prefix.disk import record
from hetero_kv.prefix.disk.lock import LockedError
from hetero_kv.prefix.disk.tier import SMALLEST
from hetero_kv.prefix.host import CORRUPT, STALE, Ticket
from tests.hetero_kv.prefix.disk import objects


@pytest.mark.parametrize("background", [False, True])
def test_what_is_put_comes_back_before_and_after_it_is_written(tmp_path, background):
    tier = objects.make(tmp_path, background=background)
    tickets = {i: objects.put(tier, i) for i in range(40)}
    for when in ("waiting", "written", "durable"):
        for i, ticket in tickets.items():
            fetched = tier.read(ticket, objects.name(i))
            assert objects.right(i, fetched) is True, when
            fetched.payload.buffer[:] = 0  # the reader's own (DESIGN rule 15)
        if when == "waiting":
            tier.write_back()
        assert tier.flush().ok if when == "written" else True
    objects.healthy(tier)
    assert tier.ledger().queued == 0
    tier.close()


def test_a_group_is_stored_once(tmp_path):
    tier = objects.make(tmp_path)
    first = objects.put(tier, 1)
    assert objects.put(tier, 1) == first
    tier.flush()
    before = tier.ledger()
    assert objects.put(tier, 1) == first
    tier.flush()
    assert tier.ledger() == before


def test_tickets_of_deleted_objects_are_stale_for_ever(tmp_path):
    tier = objects.make(tmp_path)
    old = objects.put(tier, 1)
    assert tier.drop(old) and not tier.drop(old)
    new = objects.put(tier, 1)
    tier.flush()
    assert old != new
    assert tier.read(old, objects.name(1)).failure == STALE
    assert not tier.drop(old) and not tier.is_current(old)  # deletes the ticket's object only
    assert tier.read(Ticket(new.slot + 1, new.generation), objects.name(1)).failure == STALE
    assert objects.read(tier, 1) is True
    assert tier.read(new, objects.name(2)).failure == CORRUPT  # not the group that was asked for
    objects.healthy(tier)


def test_a_start_finds_everything_with_usage_as_before(tmp_path):
    tier = objects.make(tmp_path)
    objects.fill(tier, range(30))
    for i in range(0, 30, 4):
        tier.drop(tier.find(objects.kind_of(i), objects.key(i)))
    tier.flush()
    stored, ledger = tier.stored(), tier.ledger()
    assert all(x.meta == b"meta %d" % objects.number(x) for x in stored)
    tier.close()
    assert tier.put("history", b"x", 1, objects.payload(1)) is None  # closed: refused, not raised
    again = objects.make(tmp_path)
    assert again.stored() == stored
    assert again.ledger() == ledger
    assert objects.good(again, range(30)) == {i for i in range(30) if i % 4}
    assert not again.counters.snapshot().keys() & {"disk_rescanned_total", "disk_torn_bytes_total"}
    assert objects.put(again, 0).generation > max(x.ticket.generation for x in stored)
    objects.healthy(again)


@pytest.mark.parametrize("part", [0.9, 0.6, 0.4])
def test_a_start_keeps_to_a_smaller_limit(tmp_path, part):
    tier = objects.make(tmp_path)
    objects.fill(tier, range(80))
    tier.close()
    smaller = max(SMALLEST + 20000, int(part * objects.usage(tmp_path)) + 40000)
    again = objects.make(tmp_path, capacity=smaller, segment_bytes=4096)
    objects.healthy(again)
    kept = objects.held(again)
    assert 0 < len(kept) < 80
    assert objects.good(again, range(80)) == kept
    depths = [i % 7 for i in range(80)]
    assert max(depths[i] for i in kept) <= min(depths[i] for i in set(range(80)) - kept)
    again.close()
    assert objects.held(objects.make(tmp_path, capacity=smaller, segment_bytes=4096)) == kept


def test_dead_bytes_are_given_back_by_compaction(tmp_path):
    tier = objects.make(tmp_path)
    i, alive, random = 0, [], np.random.default_rng(0)
    while objects.put(tier, i) is not None:
        alive.append(i)
        i += 1
    for victim in [alive.pop(random.integers(len(alive))) for _ in range(8)]:
        assert tier.drop(tier.find(objects.kind_of(victim), objects.key(victim)))
    for i in range(1000, 1300):
        victim = alive.pop(random.integers(len(alive)))
        assert tier.drop(tier.find(objects.kind_of(victim), objects.key(victim)))
        assert objects.put(tier, i) is not None, tier.ledger()
        alive.append(i)
        if i % 20 == 0:
            assert tier.flush().ok
            objects.healthy(tier)
    assert tier.flush().ok
    assert objects.good(tier, alive) == set(alive) == objects.held(tier)
    assert tier.counters.get("disk_compacted_segments_total") > 10
    tier.close()
    assert objects.held(objects.make(tmp_path)) == set(alive)


def test_a_full_tier_refuses_and_goes_on(tmp_path):
    tier = objects.make(tmp_path)
    i = 0
    while objects.put(tier, i) is not None:
        i += 1
    flushed = tier.flush()
    assert flushed.ok, flushed
    objects.healthy(tier)
    assert tier.counters.get("disk_refused_total", kind=objects.kind_of(i), reason="no_room") == 1
    for j in range(10):
        tier.drop(tier.find(objects.kind_of(j), objects.key(j)))
    assert objects.put(tier, i) is not None
    assert tier.flush().ok
    assert objects.good(tier, range(i + 1)) == set(range(10, i + 1))
    assert tier.clear().ok
    assert tier.ledger().live == tier.ledger().dead == 0
    assert objects.segments(tmp_path) == []
    objects.healthy(tier)


def test_a_full_queue_refuses_in_the_background_and_writes_in_line(tmp_path):
    tier = objects.make(tmp_path / "a", queue_bytes=4096)
    for i in range(20):
        assert objects.put(tier, i) is not None
        assert tier.ledger().queued <= 4096
    other = objects.make(tmp_path / "b", queue_bytes=4096, background=True)
    with other._io:  # the thread cannot write
        answers = [objects.put(other, i) for i in range(20)]
    accepted = {i for i in range(20) if answers[i] is not None}
    assert 0 < len(accepted) < 20
    assert other.flush().ok
    assert objects.good(other, range(20)) == accepted
    other.close()


def test_one_writer_many_readers(tmp_path):
    tier = objects.make(tmp_path)
    objects.fill(tier, range(10))
    with pytest.raises(LockedError, match=str(os.getpid())):
        objects.make(tmp_path)
    readers = [objects.reader(tmp_path) for _ in range(3)]
    for other in readers:
        for i in range(10):
            assert objects.right(i, _ask(other, i)) is True
    objects.fill(tier, range(10, 20))
    tier.drop(tier.find(objects.kind_of(3), objects.key(3)))
    for other in readers:
        assert objects.right(15, _ask(other, 15)) is True  # put since
        assert _ask(other, 3).failure == "absent"  # deleted since
        assert _ask(other, 77).failure == "absent"
        assert not list(tmp_path.glob("*-shm"))
    tier.close()
    code = (
        "import pathlib, sys\n"
        "from hetero_kv.prefix.disk import lock\n"
        "lock.DirectoryLock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = pathlib.Path(__file__).resolve().parents[4]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=str(process.pid)):
            objects.make(tmp_path)
        process.kill()
    assert len(objects.held(objects.make(tmp_path))) == 19


def test_readers_follow_compaction_and_clearing(tmp_path):
    tier = objects.make(tmp_path)
    objects.fill(tier, range(30))
    other = objects.reader(tmp_path)
    alive = set(range(0, 30, 3))
    for i in set(range(30)) - alive:
        tier.drop(tier.find(objects.kind_of(i), objects.key(i)))
    while tier._writer.reclaim():
        pass
    assert {i for i in range(30) if objects.right(i, _ask(other, i)) is True} == alive
    tier.clear()
    assert all(_ask(other, i).failure == "absent" for i in range(30))
    objects.fill(tier, [5])
    assert objects.right(5, _ask(other, 5)) is True
    other.close()


def test_nothing_is_mapped(tmp_path):
    tier = objects.make(tmp_path)
    objects.fill(tier, range(10))
    assert str(tmp_path) not in pathlib.Path("/proc/self/maps").read_text()
    assert not list(tmp_path.glob("*-shm"))


def test_threads_share_a_tier(tmp_path):
    tier = objects.make(tmp_path, background=True)
    errors = []

    def work(seed):
        try:
            for step in range(60):
                i = (seed * 31 + step * 17) % 90
                if step % 3 == 0:
                    objects.put(tier, i)
                elif step % 7 == 0:
                    ticket = tier.find(objects.kind_of(i), objects.key(i))
                    if ticket is not None:
                        tier.drop(ticket)
                elif step % 29 == 0:
                    tier.flush()
                else:
                    assert objects.read(tier, i) in (True, "absent", STALE)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(x.is_alive() for x in threads)
    tier.flush()
    objects.healthy(tier)
    held = objects.held(tier)
    assert objects.good(tier, held) == held
    assert not [x for x in tier.counters.snapshot() if "corrupt" in x]
    tier.close()


def test_records_are_stored_in_the_form_that_version_1_has():
    """A change of these bytes needs another VERSION."""
    segment = record.SegmentHeader(3, b"salt" * 4, objects.IDENTITY)
    parts = (record.Component("a", 32, 7), record.Component("é", 16, 2**64 - 1))
    header = record.Header("history", b"key", 5, 11, parts, b"meta")
    packed = record.pack(header, segment, 1024)
    assert record.parse(packed, segment, 1024) == header
    assert len(packed) == header.header_bytes and header.record_bytes == 512
    assert record.parse_segment(segment.pack(), 3, objects.IDENTITY) == segment
    assert packed.hex() == GOLDEN
    for i in range(8 * record.STATE, 8 * len(packed)):
        flipped = bytearray(packed)
        flipped[i // 8] ^= 1 << i % 8
        assert record.parse(bytes(flipped), segment, 1024) is None
    assert record.parse(packed, segment, 1536) is None
    for wrong in ({"number": 4}, {"salt": b"tlas" * 4}, {"identity": bytes(32)}):
        other = record.SegmentHeader(**{**_fields(segment), **wrong})
        assert record.parse(packed, other, 1024) is None


def _fields(segment):
    return {x: getattr(segment, x) for x in segment.__slots__}


def _ask(other, i):
    return other.read(objects.kind_of(i), objects.key(i), i % 7 + 1)


GOLDEN = (
    "484b562b4c49564501009d0000000700030002000400000003000000000000000004000000000000"
    "0b0000000000000005000000000000003000000000000000000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f686973746f72796b65796d65746101002000000000000000"
    "07000000000000006102001000000000000000ffffffffffffffffc3a9f8c3c20616eec96e"
)


def test_the_index_is_committed_now_and_then(tmp_path):
    tier = objects.make(tmp_path, index_rows=10)
    commits = []
    commit = tier._db.commit
    tier._db.commit = lambda *args: commits.append(1) or commit(*args)
    for i in range(30):
        objects.fill(tier, [i])  # a flush each
    assert len(commits) == 3
    copy = objects.copy(tmp_path, tmp_path.with_name("crashed"))
    objects.fill(tier, range(30, 34))
    behind = objects.copy(tmp_path, tmp_path.with_name("behind"))
    for directory, count in ((copy, 30), (behind, 34)):
        found = objects.make(directory)
        assert objects.good(found, range(40)) == set(range(count))
        objects.healthy(found)


def test_many_crashes_do_not_grow_the_index(tmp_path):
    directory = tmp_path / "0"
    tier = objects.make(directory)
    objects.fill(tier, range(3))
    for i in range(1, 25):
        directory = objects.copy(directory, tmp_path / str(i))
        tier.close()
        tier = objects.make(directory, capacity=objects.CAPACITY)
        assert tier.flush().ok
        assert objects.usage(directory) <= tier.ledger().overhead + tier.ledger().live
