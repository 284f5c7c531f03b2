"""Damaged files: never a wrong byte, never an exception, and no more is lost than was damaged."""

import numpy as np
import pytest

from hetero_kv.prefix.disk import record
from hetero_kv.prefix.disk.segment import Segment
from hetero_kv.prefix.host import CORRUPT
from tests.hetero_kv.prefix.disk import objects


@pytest.fixture(scope="module")
def stored(memory_directory):
    """(directory, the objects in it)."""
    directory = memory_directory / "whole"
    return directory, objects.sample(directory)


def check(directory, want):
    """Opens a damaged directory. Returns the objects of `want` that are still served."""
    tier = objects.make(directory)
    assert not tier.failure
    objects.healthy(tier)
    good = objects.good(tier, want)
    assert objects.held(tier) == good  # what turned out damaged was dropped
    assert objects.held(tier) <= want  # what was deleted stays deleted
    objects.healthy(tier)
    for i in sorted(want - good)[:2] + [500]:
        assert objects.put(tier, i) is not None  # and it goes on
    assert tier.flush().ok
    assert objects.read(tier, 500) is True
    objects.healthy(tier)
    tier.close()
    return good


def owners(directory):
    """Per segment file the objects in it."""
    tier = objects.make(directory)
    found = {}
    for entry in tier._books.entries.values():
        found.setdefault(entry.segment.path.name, set()).add(objects.number(entry))
    tier.close()
    return found


def regions(path):
    """Offsets that matter in a segment: of its header, of every record's header and payload."""
    segment = Segment.open(objects.Files(), path, objects.IDENTITY, write=False)
    found, end = segment.scan()
    segment.close()
    offsets = [0, 9, 13, 25, 50, 70, record.SEGMENT_HEADER - 1]
    for one in found:
        start, header, payload = one.place
        offsets += [start, start + 7, start + 8, start + 10, start + 20, start + record.PEEK]
        offsets += [start + header - 1, start + header, start + header + payload - 1]
        offsets += [start + header + payload // 2]
    return sorted({x for x in offsets if x < end})


def flip(path, offset, bit):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def flipped(stored, tmp_path, path, offset, bit):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    flip(copy / path.name, offset, bit)
    lost = want - check(copy, want)
    return lost


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_flipped_bit_in_a_segment_costs_one_object_at_most(stored, tmp_path, index):
    directory, want = stored
    of = owners(directory)
    random = np.random.default_rng(0)
    base = objects.copy(directory, tmp_path / "base")
    if index == "lost":
        for path in base.glob("index*"):
            path.unlink()
    for path in objects.segments(base):
        offsets = regions(path)
        for offset in offsets[:7] + sorted(random.choice(offsets[7:], 12, replace=False)):
            bit = int(random.integers(8))
            lost = flipped((base, want), tmp_path, path, int(offset), bit)
            if offset < record.SEGMENT_HEADER:
                assert lost in (set(), of[path.name])
            else:
                assert len(lost) <= 1 and lost <= of[path.name], (path.name, offset, bit)


def test_a_flipped_bit_in_index_or_lock_costs_nothing(stored, tmp_path):
    directory, want = stored
    random = np.random.default_rng(1)
    for path in [*directory.glob("index*"), directory / "lock"]:
        size = path.stat().st_size
        for offset in {0, 17, 18, 24, 44, 100, 105, *random.integers(0, size, 25).tolist()}:
            if offset < size:
                assert flipped((directory, want), tmp_path, path, offset, offset % 8) == set()


@pytest.mark.full
def test_flipped_bits_everywhere(stored, tmp_path):
    directory, want = stored
    random = np.random.default_rng(2)
    for path in [*objects.segments(directory), *directory.glob("index*"), directory / "lock"]:
        for offset in range(0, path.stat().st_size, 11):
            lost = flipped((directory, want), tmp_path, path, offset, int(random.integers(8)))
            most = 99 if offset < record.SEGMENT_HEADER else 1
            assert len(lost) <= (most if path.suffix == ".seg" else 0), (path.name, offset)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.full)])
def test_files_may_be_truncated_anywhere(stored, tmp_path, step):
    directory, want = stored
    of = owners(directory)
    for path in [*objects.segments(directory), *directory.glob("index*"), directory / "lock"]:
        cuts = [0, 1, 511] if path.suffix != ".seg" else regions(path)[::step]
        for cut in [*cuts, max(0, path.stat().st_size - 1), path.stat().st_size // 2]:
            copy = objects.copy(directory, tmp_path / "copy")
            (copy / path.name).write_bytes(path.read_bytes()[:cut])
            lost = want - check(copy, want)
            assert lost <= of.get(path.name, set()), (path.name, cut)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_garbage_at_the_end_of_a_segment_is_cut_off(stored, tmp_path, index):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    for path in objects.segments(copy):
        tail = path.read_bytes()[512:1300]  # a record in the wrong place, torn
        path.write_bytes(path.read_bytes() + tail)
    if index == "lost":
        (copy / "index.sqlite").write_bytes(b"")
    assert check(copy, want) == want


def test_swapped_payloads_and_files_are_noticed(stored, tmp_path):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    tier = objects.make(copy)
    a, b = (
        next(x for x in tier._books.entries.values() if x.key == objects.key(i)) for i in (1, 2)
    )
    assert a.place.payload_bytes == b.place.payload_bytes
    payloads = [x.segment.read(x.place).payload for x in (a, b)]
    for entry, payload in zip((a, b), payloads[::-1], strict=True):
        with open(entry.segment.path, "r+b") as file:
            file.seek(entry.place.offset + entry.place.header_bytes)
            file.write(payload)
    assert [objects.read(tier, i) for i in (1, 2)] == [CORRUPT, CORRUPT]
    assert objects.good(tier, want) == want - {1, 2}
    objects.healthy(tier)
    tier.close()

    copy = objects.copy(directory, tmp_path / "copy")  # whole records, header and all
    tier = objects.make(copy)
    a, b = (
        next(x for x in tier._books.entries.values() if x.key == objects.key(i)) for i in (1, 2)
    )
    whole = []
    for entry in (a, b):
        data = entry.segment.path.read_bytes()
        whole.append(data[entry.place.offset : entry.place.offset + entry.record_bytes])
    for entry, data in zip((a, b), whole[::-1], strict=True):
        with open(entry.segment.path, "r+b") as file:
            file.seek(entry.place.offset)
            file.write(data)
    assert [objects.read(tier, i) for i in (1, 2)] == [CORRUPT, CORRUPT]
    tier.close()

    copy = objects.copy(directory, tmp_path / "copy")
    first, second = objects.segments(copy)[:2]
    first.rename(copy / "x")
    second.rename(first)
    (copy / "x").rename(second)
    of = owners(directory)
    assert want - check(copy, want) <= of[first.name] | of[second.name]


@pytest.mark.parametrize("how", ["deleted", "emptied", "garbage", "directory", "old", "foreign"])
def test_an_index_that_cannot_be_used_is_made_anew(stored, tmp_path, how):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    path = copy / "index.sqlite"
    if how in ("old", "foreign"):
        tier = objects.make(copy)
        field, value = ("schema", 0) if how == "old" else ("identity", bytes(32))
        with tier._db._db as db:
            db.execute("UPDATE about SET value = ? WHERE name = ?", (value, field))
        tier.close()
    else:
        for one in copy.glob("index*"):
            one.unlink()
    if how == "emptied":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(np.random.default_rng(0).bytes(20000))
    elif how == "directory":
        path.mkdir()
    tier = objects.make(copy)
    assert sum(y for x, y in tier.counters.snapshot().items() if "index_ignored" in x) == 1
    tier.close()
    assert check(copy, want) == want
    if how == "directory":
        return  # there is nowhere to write one
    again = objects.make(copy)
    assert not [x for x in again.counters.snapshot() if "index_ignored" in x]


def test_an_index_that_is_wrong_but_well_formed_is_not_believed(stored, tmp_path):
    directory, want = stored
    for change in (
        "UPDATE records SET start = start + 512 WHERE generation % 3 = 0",
        "UPDATE records SET key = (SELECT key FROM records LIMIT 1)",
        "DELETE FROM records WHERE generation % 2",
        "UPDATE segments SET stop = stop + 5120",
        "UPDATE segments SET number = number + 100",
        "DELETE FROM segments",
        "UPDATE records SET kind = x'00', meta = 'text'",
        "UPDATE records SET start = 'text'",
        "UPDATE segments SET sums = 7",
        "UPDATE about SET value = NULL WHERE name = 'last'",
    ):
        copy = objects.copy(directory, tmp_path / "copy")
        tier = objects.make(copy)
        with tier._db._db as db:
            db.execute(change.replace("UPDATE", "UPDATE OR IGNORE"))
        tier.close()
        assert check(copy, want) == want, change


def test_files_of_another_identity_or_format_are_left_unread_and_reclaimed(stored, tmp_path):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    for path in objects.segments(copy)[:1]:
        flip(path, 8, 1)  # the version
    lost = owners(directory)[objects.segments(copy)[0].name]
    tier = objects.make(copy)
    assert tier.counters.get("disk_ignored_files_total", reason="other_format") == 1
    objects.healthy(tier)
    assert objects.good(tier, want) == want - lost
    tier.close()

    tier = objects.make(copy, identity=bytes(32))
    assert objects.held(tier) == set()
    assert tier.counters.get("disk_ignored_files_total", reason="other_identity") > 0
    assert tier.ledger().dead > 0
    objects.healthy(tier)
    i = 0
    while objects.put(tier, i) is not None:
        i += 1
    assert tier.flush().ok
    objects.healthy(tier)
    assert objects.good(tier, range(i)) == set(range(i)) and i > 50
    tier.close()


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("x" * 1000)
    (tmp_path / "1.seg").write_text("not our name")
    tier = objects.make(tmp_path)
    objects.fill(tier, range(5))
    tier.clear()
    tier.close()
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "1.seg").exists()


def test_an_unreadable_file_is_a_miss(stored, tmp_path):
    directory, want = stored
    copy = objects.copy(directory, tmp_path / "copy")
    path = objects.segments(copy)[1]
    path.unlink()
    path.mkdir()
    of = owners(directory)
    assert check(copy, want) == want - of[path.name]


def test_a_damaged_object_is_dropped_once_and_may_be_stored_again(stored, tmp_path):
    directory, _ = stored
    copy = objects.copy(directory, tmp_path / "copy")
    tier = objects.make(copy)
    entry = next(x for x in tier._books.entries.values() if x.key == objects.key(1))
    flip(entry.segment.path, entry.place.offset + entry.place.header_bytes + 500, 3)
    old = entry.ticket
    fetched = tier.read(old, objects.name(1))
    assert (fetched.failure, fetched.component) == (CORRUPT, "index keys")
    assert not tier.is_current(old)
    new = objects.put(tier, 1)
    assert new is not None and new != old
    assert not tier.drop(old)  # a late clean-up of the failed read must not hit the new object
    assert tier.flush().ok
    assert objects.read(tier, 1) is True
    objects.healthy(tier)
