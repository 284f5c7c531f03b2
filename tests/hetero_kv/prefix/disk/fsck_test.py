"""fsck: finds every flipped bit, and leaves a directory that is healthy again."""

import pytest

from experiments import fsck as command
from hetero_kv.prefix.disk import fsck
from tests.hetero_kv.prefix.disk import objects
from tests.hetero_kv.prefix.disk.damage_test import flip


def run(directory, action="verify", nbytes=0):
    lines = []
    return command.run(directory, action, nbytes, lines.append), lines


@pytest.fixture
def directory(tmp_path):
    objects.sample(tmp_path / "disk")
    return tmp_path / "disk"


WANT = {i for i in range(14) if i % 5}


def test_a_healthy_directory(directory):
    before = {x: x.read_bytes() for x in directory.iterdir()}
    code, lines = run(directory)
    assert (code, len(WANT)) == (0, fsck.check(directory).counts()["whole"][0])
    assert "index: agrees with the segments" in lines
    code, listed = run(directory, "list")
    assert code == 0 and len([x for x in listed if ": whole" in x]) == len(WANT)
    assert {x: x.read_bytes() for x in directory.iterdir()} == before


def test_every_flipped_bit_of_a_living_record_is_found(directory):
    path = objects.segments(directory)[1]
    data = path.read_bytes()
    record = next(
        x for x in fsck.check(directory).items if x.path == path and x.state == fsck.WHOLE
    )
    size = record.place.header_bytes + record.place.payload_bytes
    for offset in range(record.place.offset, record.place.offset + size, 101):
        flip(path, offset, offset % 8)
        report = fsck.check(directory)
        assert len(report.damaged) == 1 and not report.is_healthy, offset
        path.write_bytes(data)
    assert run(directory)[0] == 0


@pytest.mark.parametrize("where", ["payload", "header", "file", "index"])
def test_quarantine_and_rebuild_make_it_healthy(directory, where):
    report = fsck.check(directory)
    record = next(x for x in report.items if x.state == fsck.WHOLE)
    other = len([x for x in report.items if x.state == fsck.WHOLE and x.path == record.path])
    if where == "payload":
        flip(record.path, record.place.offset + record.place.header_bytes, 0)
    elif where == "header":
        flip(record.path, record.place.offset + 20, 0)
    elif where == "file":
        flip(record.path, 40, 0)
    else:
        (directory / "index.sqlite").write_bytes(b"SQLite format 3\0")
    assert run(directory)[0] == 1
    assert run(directory, "quarantine" if where != "index" else "rebuild")[0] == 0
    assert run(directory)[0] == 0
    tier = objects.make(directory)
    objects.healthy(tier)
    lost = {"payload": 1, "header": 1, "file": other, "index": 0}[where]
    good = objects.good(tier, WANT)
    assert good == objects.held(tier) and len(good) == len(WANT) - lost
    assert len(list((directory / "quarantine").glob("*"))) == (where == "file")


def test_prune(directory):
    assert run(directory, "prune", 80_000) == (0, ["prune: done"])
    assert objects.usage(directory) <= 80_000
    assert run(directory)[0] == 0
    tier = objects.make(directory)
    assert 0 < len(objects.held(tier)) < len(WANT)
    assert objects.good(tier, WANT) == objects.held(tier)


def test_what_is_not_possible(directory, tmp_path):
    assert run(tmp_path / "nowhere")[0] == 2
    assert run(directory, "prune", 10)[0] == 2
    tier = objects.make(directory)
    objects.fill(tier, [99])
    for action in ("prune", "rebuild", "quarantine"):
        code, lines = run(directory, action, 1 << 20)
        assert code == 2 and "writer" in lines[0]
    assert objects.good(tier, WANT | {99}) == WANT | {99}
    tier.close()
    assert run(directory)[0] == 0  # nobody took the index from under its writer
