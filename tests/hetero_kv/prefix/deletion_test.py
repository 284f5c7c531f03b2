"""Deletion and clearing: on every tier, for good, whatever goes on meanwhile."""

import shutil
import threading

import numpy as np
import pytest

from hetero_kv.prefix.disk.files import Files
from hetero_kv.prefix.index import HISTORY
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.stores import (
    PLENTY,
    SPEC,
    healthy,
    plain_metrics,
    prompt,
    serve,
)

ROOM = 1 << 20


def make(directory=None, **options):
    if directory is not None:
        options |= {"disk_dir": directory, "disk_bytes": ROOM}
    return stores.make(**options)


def resumable(store, tokens, **who):
    return store.explain(tokens, **who).plan.resumable_length


def fill(store, cache, seeds, **who):
    for seed in seeds:
        cache, _ = serve(store, cache, 0, prompt(seed, shared=24), **who)
    return cache


def needles(store):
    """Bytes of payloads and tokens of everything stored, to be looked for in files."""
    found = []
    for group in store.catalog.groups():
        fetched, _ = store._fetcher.read_group(group)
        found.append(fetched.payload.buffer.tobytes())
        if group.kind == HISTORY:
            found.append(group.node.content)
    return [x for x in found if any(x)]


def in_files(directory, needle):
    return [x.name for x in directory.iterdir() if x.is_file() and needle in x.read_bytes()]


@pytest.mark.parametrize("disk", [False, True])
def test_a_tenants_data_is_deleted_on_every_tier(tmp_path, disk):
    directory = tmp_path / "a" if disk else None
    store, cache = make(directory), synthetic.empty(SPEC)
    cache = fill(store, cache, (1, 2), tenant="a")
    cache = fill(store, cache, (1,), tenant="a", extra={"adapter": "a" * 64})
    cache = fill(store, cache, (1, 2), tenant="b")
    count = len(store.catalog.groups())
    nbytes = sum(x.nbytes for x in store.catalog.groups())
    store.flush()
    removed = store.delete(tenant="a")
    healthy(store)
    assert removed.durable != disk and not removed.failure
    left = store.catalog.groups()
    assert removed.groups == count - len(left)
    assert removed.nbytes == nbytes - sum(x.nbytes for x in left)
    for seed in (1, 2):
        assert resumable(store, prompt(seed, shared=24), tenant="a") == 0
        assert resumable(store, prompt(seed, shared=24), tenant="b") == 48
    assert resumable(store, prompt(1, shared=24), tenant="a", extra={"adapter": "a" * 64}) == 0
    metrics = plain_metrics(store)
    labels = 'kind="history",reason="deleted"'
    assert metrics[f"invalidated_groups_total{{{labels}}}"] == 3 + 3 + 3 + 6
    assert store.delete(tenant="a").groups == store.delete(tenant="").groups == 0
    if not disk:
        return
    assert store.flush().ok
    # Without a close, with the index and by a scan of the segments.
    for name, drop_index in (("b", False), ("c", True)):
        shutil.copytree(directory, tmp_path / name)
        if drop_index:
            dropped = [x.unlink() for x in (tmp_path / name).glob("index.sqlite*")]
            assert dropped
        again = make(tmp_path / name)
        assert resumable(again, prompt(1, shared=24), tenant="a") == 0
        assert resumable(again, prompt(1, shared=24), tenant="b") == 48
        assert len(again.catalog.groups()) == len(left)
        healthy(again)
        again.close()


def test_erasing_takes_the_bytes_out_of_the_files(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    cache = fill(store, cache, (1, 2, 3), tenant="a")
    gone = needles(store)
    for seed in (4, 5):  # no bytes in common
        cache, _ = serve(store, cache, 0, prompt(seed), tenant="b")
    assert store.flush().ok
    assert all(in_files(tmp_path, x) for x in gone)  # positive control
    removed = store.delete(tenant="a")
    assert store.flush().ok and not removed.durable
    assert any(in_files(tmp_path, x) for x in gone)  # dead bytes, as the docstring says
    kept = needles(store)
    assert not set(gone) & set(kept)
    removed = store.delete(tenant="a", erase=True)
    assert removed.durable and not removed.failure and not removed.groups
    assert not [x for x in gone if in_files(tmp_path, x)]
    assert all(in_files(tmp_path, x) for x in kept)
    ledger = store.disk.ledger()
    assert ledger.exact and ledger.dead == 0
    healthy(store)
    store.close()
    store = make(tmp_path)
    assert resumable(store, prompt(4), tenant="b") == 48
    assert not [x for x in gone if in_files(tmp_path, x)]
    removed = store.delete(tenant="b", erase=True)
    assert removed.durable and removed.groups and not store.disk.stored()
    assert not [x for x in kept if in_files(tmp_path, x)]


def test_a_request_takes_what_it_alone_holds():
    store, cache = make(), synthetic.empty(SPEC)
    a, b = prompt(1, shared=24), prompt(2, shared=24)  # 3 blocks in common
    cache = fill(store, cache, (1, 2))
    longer = np.concatenate([b[:48], prompt(3)[:12]])
    removed = store.delete(tenant="", tokens=a)
    assert removed.groups == 3 + 2  # blocks 3 .. 5, checkpoints at 32 and 48
    healthy(store)
    assert resumable(store, a) == 16 and resumable(store, b) == 48
    assert store.delete(tenant="", tokens=a).groups == 0
    assert store.delete(tenant="other", tokens=b).groups == 0
    assert store.delete(tenant="", tokens=b, extra={"odd": 1}).groups == 0
    # Another sequence goes on from there.
    assert store.delete(tenant="", tokens=b[:40]).groups == 0
    removed = store.delete(tenant="", tokens=longer)  # the same blocks as those of b
    assert removed.groups == 6 + 3 and not store.catalog.groups()
    healthy(store)


def test_a_request_with_what_it_shares():
    store, cache = make(), synthetic.empty(SPEC)
    cache = fill(store, cache, (1, 2))
    cache = fill(store, cache, (1,), tenant="b")
    assert store.delete(tenant="", tokens=prompt(1, shared=24), shared=True).groups == 9 + 5
    assert resumable(store, prompt(2, shared=24)) == 0
    assert resumable(store, prompt(1, shared=24), tenant="b") == 48
    healthy(store)


def test_colliding_keys_are_not_deleted_for_another():
    store = make(digest=lambda message: bytes([sum(message) % 16]))
    serve(store, synthetic.empty(SPEC), 0, prompt(1))
    count = len(store.catalog.groups())
    assert store.delete(tenant="", tokens=prompt(5)).groups == 0
    assert len(store.catalog.groups()) == count


@pytest.mark.parametrize("how", ["tenant", "tokens", "clear"])
@pytest.mark.parametrize("disk", [False, True])
def test_open_leases_restore_less_and_never_wrong(tmp_path, disk, how):
    store, cache = make(tmp_path if disk else None), synthetic.empty(SPEC)
    a, b = prompt(1, shared=24), prompt(2, shared=24)
    cache = fill(store, cache, (1, 2))
    with store.lookup(a) as lease, store.lookup(b) as other:
        assert lease.resumable_length == other.resumable_length == 48
        if how == "tenant":
            store.delete(tenant="", erase=disk)
        elif how == "tokens":
            store.delete(tenant="", tokens=a)
        else:
            store.clear()
        healthy(store)
        cache = store.restore(lease, cache, 0)
        cache = store.restore(other, cache, 1)
        left = (16, 48) if how == "tokens" else (0, 0)
        assert (lease.resumable_length, other.resumable_length) == left
        assert tuple(int(x) for x in cache.length) == left
        # What was deleted may be stored anew, while the leases are open.
        cache = synthetic.advance(SPEC, cache, 0, a, 48)
        found = store.publish(a, cache, 0)
        assert found.checkpoint and found.blocks == 6
    for row, tokens in enumerate((a, b)):
        assert not synthetic.wrong_rows(SPEC, cache, row, tokens)
    healthy(store)
    assert resumable(store, a) == 48
    assert not any(x.pins for x in store.catalog.groups())


@pytest.mark.parametrize("where", ["before history", "before checkpoint", "after"])
def test_clearing_during_a_publish(tmp_path, where):
    store, cache, tokens = make(tmp_path), synthetic.empty(SPEC), prompt(1, shared=24)
    cache = fill(store, cache, (2,))  # 3 blocks are known
    cache, _ = serve(store, cache, 0, tokens, publish=False)
    catalog = store.catalog
    add_history, add_checkpoint, let_go = (
        catalog.add_history,
        catalog.add_checkpoint,
        catalog.let_go,
    )

    def clear_before(call):
        def wrapped(*args):
            thread = threading.Thread(target=store.clear)  # by another thread
            thread.start()
            thread.join()
            return call(*args)

        return wrapped

    if where == "before history":
        catalog.add_history = clear_before(add_history)
    elif where == "before checkpoint":
        catalog.add_checkpoint = clear_before(add_checkpoint)
    else:
        catalog.let_go = clear_before(let_go)
    cold = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, tokens, 48)
    found = store.publish(tokens, cold)
    assert (found.reasons == ("gone",)) == (where != "after")
    for name in ("add_history", "add_checkpoint", "let_go"):
        delattr(catalog, name) if name in vars(catalog) else None
    healthy(store)
    assert not store.catalog.groups() and not store.disk.stored()
    assert plain_metrics(store)["host_free_bytes"] == PLENTY
    assert store.publish(tokens, cold).checkpoint  # all is well afterwards
    healthy(store)


def test_clearing_with_writers_queued(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    with store.disk._io:  # the thread that writes waits
        cache = fill(store, cache, (1, 2, 3))
        assert plain_metrics(store)["disk_queue_depth"] > 0
        removed = store.clear()
        assert removed.durable and removed.groups
    healthy(store)
    assert not store.catalog.groups() and not store.disk.stored()
    assert store.flush().ok
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert not make(tmp_path / "copy").catalog.groups()
    cache, _ = serve(store, cache, 0, prompt(1))
    assert resumable(store, prompt(1)) == 48


class Failing(Files):
    """Fails to write while told so."""

    failing = False

    def write(self, fd, parts, offset):
        if self.failing:
            raise OSError(5, "Input/output error")
        return super().write(fd, parts, offset)


def test_clearing_a_disk_that_fails_says_so(tmp_path):
    store, cache = make(tmp_path), synthetic.empty(SPEC)
    files = Failing()
    cache = fill(store, cache, (1,))
    store.flush()
    for part in (store.disk._writer, *store.disk._books.segments.values()):
        setattr(part, "files" if hasattr(part, "files") else "_files", files)
    files.failing = True
    removed = store.clear()
    assert removed.groups and not removed.durable and removed.failure == "kill"
    assert not store.catalog.groups() and resumable(store, prompt(1, shared=24)) == 0
    assert plain_metrics(store)["host_free_bytes"] == PLENTY
    files.failing = False
    assert store.flush().ok  # tried again
    healthy(store)
    store.close()
    assert not make(tmp_path).catalog.groups()


def test_a_directory_that_could_not_be_used_keeps_what_it_has(tmp_path):
    (tmp_path / "file").write_text("")
    store = make(tmp_path / "file")
    assert str(tmp_path / "file") in store.disk_failure
    assert "File exists" in store.disk_failure and "EEXIST" in store.disk_failure
    serve(store, synthetic.empty(SPEC), 0, prompt(1), tenant="a")
    for removed in (store.delete(tenant="a"), store.clear()):
        assert not removed.durable and removed.failure == store.disk_failure
    assert not store.catalog.groups()
