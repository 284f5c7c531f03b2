"""Full disks, limits, flipped bits and cut files, seen from the store: a shorter hit, told why."""

import multiprocessing
import resource
import shutil

import pytest

from hetero_kv import state
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import kill_writer, world
from tests.hetero_kv.prefix.world import CAPACITY, PROMPTS, SPEC, WHO, G

USED = PROMPTS[:7]
WRITES = ("create", "write", "sync", "truncate", "remove")


class Failing(world.Files):
    """The n-th writing operation fails, and with `lasting` all after it."""

    def __init__(self, n: int, lasting: bool = False):
        super().__init__()
        self.n, self.lasting, self.writes = n, lasting, 0

    def _fails(self, operation, count):
        self.writes += operation in WRITES
        due = self.writes >= self.n > 0 if self.lasting else self.writes == self.n
        self.failing = set(WRITES) if due and operation in WRITES else set()
        return super()._fails(operation, count)


def lengths(store):
    return {(w, i): world.resumable(store, w, x) for w in WHO for i, x in enumerate(USED)}


def all_right(store) -> int:
    """Restores everything; returns how many hits there were."""
    cache, hits = state.init(SPEC, 2, CAPACITY), 0
    world.healthy(store)
    for who in WHO:
        for tokens in USED:
            cache, length, _ = world.restored(store, who, tokens, cache)
            hits += length > 0
    world.healthy(store)
    return hits


def scenario(directory, files) -> tuple[dict, int]:
    """Publishes and flushes. Returns what was acknowledged, and the failures that were told."""
    acknowledged, told = {}, 0
    store = world.opened(directory, files, host_bytes=6000)
    for who in WHO[:2]:
        for tokens in USED:
            world.published(store, who, tokens)
            if len(tokens) % G:
                flushed = store.flush()
                assert flushed.ok or flushed.failure
                told += not flushed.ok
                acknowledged = lengths(store) if flushed.ok else acknowledged
        assert all_right(store) or files.failed
    files.armed = False
    if not store.disk.failure:
        store.flush()
        world.healthy(store)
        assert all_right(store)
    store.close()
    return acknowledged, told


def writes_of_a_run(directory) -> int:
    files = Failing(0)
    acknowledged, told = scenario(directory, files)
    assert max(acknowledged.values()) == 32 and not told and not files.failed
    return files.writes


@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_write(tmp_path, lasting):
    most, hits = writes_of_a_run(tmp_path / "whole"), 0
    assert most > 15
    for n in range(1, most + 1, 1 + most // 14):
        files = Failing(n, lasting)
        acknowledged, _ = scenario(tmp_path / f"{n}", files)
        assert files.failed
        store = world.opened(tmp_path / f"{n}")
        found = lengths(store)
        if not lasting:
            assert all(found[x] >= length for x, length in acknowledged.items())
        hits += all_right(store)
        # A part of a record that could not be cut off again may look like one until it is read.
        assert not store.verify() or lasting
        assert store.verify() == []
        store.close()
        shutil.rmtree(tmp_path / f"{n}")
    assert hits


def limited(pipe, directory, limit: int) -> None:
    """A process whose files may not grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = kill_writer.make(directory, world.PLENTY)
    ok = []
    for tokens in USED:
        hashes = synthetic.prefix_hashes(world.contents(WHO[0], tokens))
        for length in range(G, len(tokens) + 1, G):
            store.publish(tokens, kill_writer.Row(hashes, length), **WHO[0].arguments)
        ok.append(store.flush().ok)
    found = store.catalog.problems()
    pipe.send((ok, kill_writer.lengths(store), found, store.disk_failure))
    store.close()
    pipe.close()


@pytest.mark.parametrize("limit", [0, 500, 5_000, 9_000, 1 << 22])
def test_files_that_may_not_grow(tmp_path, limit):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([kill_writer.__name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=limited, args=(there, tmp_path, limit), daemon=True)
    process.start()
    there.close()
    ok, held, problems, failure = here.recv()
    process.join(60)
    assert process.exitcode == 0 and problems == []
    assert all(ok) if limit == 1 << 22 or failure else not all(ok)
    store = world.opened(tmp_path)
    hits = all_right(store)
    assert store.verify() == []
    if limit == 1 << 22:
        assert kill_writer.lengths(store) == held and hits
    store.close()


@pytest.fixture(scope="module")
def written(memory_directory):
    """A closed directory, and what it holds."""
    directory = memory_directory / "written"
    store = world.opened(directory)
    for who in WHO[:2]:
        for tokens in USED:
            world.published(store, who, tokens)
    store.flush()
    held = lengths(store)
    places = [
        (x.segment.path.name, x.place.offset, x.place.header_bytes, x.place.payload_bytes)
        for x in store.disk._books.entries.values()
    ]
    store.close()
    return directory, held, places


def opened_copy(written, tmp_path, change) -> tuple[int, int]:
    """(hits, what is missing) after a change of one file."""
    directory, held, _ = written
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    change(copy)
    store = world.opened(copy)
    assert not store.disk_failure
    hits = all_right(store)
    missing = sum(held[x] - length for x, length in lengths(store).items())
    assert len(store.verify()) <= 1  # what nobody has read yet
    assert store.verify() == []
    store.close()
    shutil.rmtree(copy)
    return hits, missing


@pytest.mark.parametrize("part", range(12))
def test_a_flipped_bit_in_any_file(written, tmp_path, part):
    names = sorted(x.name for x in written[0].iterdir())
    assert any(x.endswith(".seg") for x in names) and any(x.startswith("index") for x in names)
    for name in names:

        def flip(copy, name=name):
            data = bytearray((copy / name).read_bytes())
            if data:
                data[part * (len(data) - 1) // 11] ^= 1 << part % 8
                (copy / name).write_bytes(data)

        hits, missing = opened_copy(written, tmp_path, flip)
        assert hits
        if not name.endswith(".seg"):
            assert missing == 0  # the index can be made anew; the lock says nothing


@pytest.mark.parametrize("where", ["record", "header", "payload", "end"])
def test_a_segment_cut_at_any_section(written, tmp_path, where):
    places = written[2]
    for name, offset, header, payload in places[:: len(places) // 6]:
        at = {
            "record": offset,
            "header": offset + header // 2,
            "payload": offset + header + payload // 2,
            "end": offset + header + payload - 1,
        }[where]

        def cut(copy, name=name, at=at):
            with open(copy / name, "r+b") as file:
                file.truncate(at)

        _, missing = opened_copy(written, tmp_path, cut)
        assert missing >= 0
