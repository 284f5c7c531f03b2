"""The table of `explain`: per component what is stored, how far it reaches alone, and why."""

import dataclasses

import numpy as np

from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.quotas import Quota, Quotas
from tests.hetero_kv import synthetic
from tests.hetero_kv.prefix import stores
from tests.hetero_kv.prefix.stores import SPEC, make, prompt, serve, stored


def rows(found):
    return {x.component: x for x in found.components}


def without_epoch(found):
    """The text without the digest, which differs between machines."""
    lines = str(found).splitlines()
    return "\n".join(x for x in lines if not x.startswith("  epoch:"))


def test_a_full_hit():
    store, cache = make(), synthetic.empty(SPEC)
    serve(store, cache, 0, prompt(1))
    found = rows(store.explain(prompt(1)))
    assert {x.alone for x in found.values()} == {x.joint for x in found.values()} == {48}
    assert {x.why for x in found.values()} == {()}
    assert found["csa entries"].stored == "6 blocks: 6 host"
    assert found["windows"].stored == "at 16 host, 32 host, 48 host"


def test_nothing_is_stored():
    text = without_epoch(make().explain(prompt(1)))
    assert (
        text
        == """\
prompt 60  candidate 0  resumable 0  best possible 48  (multiples of 16, shortest 16)
  component        contract            stored  route  alone  joint  why
  csa entries      History(4)          none    none       0      0  no_match
  csa index keys   History(4)          none    none       0      0  no_match
  nsa entries      History(4, span 8)  none    none       0      0  no_match
  full kv          History(1)          none    none       0      0  no_match
  windows          Window(8)           none    none       0      0  no_match
  tails            Point               none    none       0      0  no_match
  recurrent state  Point               none    none       0      0  no_match
  prompt: 48 -> 0 (no_match) keys match for 0 tokens"""
    )


def test_the_weakest_component_decides():
    store, cache = make(), synthetic.empty(SPEC)
    serve(store, cache, 0, prompt(1))
    for blocks in (4, 6):
        store.catalog.discard(stored(store, CHECKPOINT, blocks))
    found = store.explain(prompt(1))
    assert (
        without_epoch(found)
        == """\
prompt 60  candidate 48  resumable 16  best possible 48  (multiples of 16, shortest 16)
  component        contract            stored            route  alone  joint  why
  csa entries      History(4)          6 blocks: 6 host  host      48     16  -
  csa index keys   History(4)          6 blocks: 6 host  host      48     16  -
  nsa entries      History(4, span 8)  6 blocks: 6 host  host      48     16  -
  full kv          History(1)          6 blocks: 6 host  host      48     16  -
  windows          Window(8)           at 16 host        host      16     16  no_checkpoint
  tails            Point               at 16 host        host      16     16  no_checkpoint
  recurrent state  Point               at 16 host        host      16     16  no_checkpoint
  windows: 48 -> 16 (no_checkpoint) no checkpoint at 48, the newest before it is at 16
  tails: 48 -> 16 (no_checkpoint) no checkpoint at 48, the newest before it is at 16
  recurrent state: 48 -> 16 (no_checkpoint) no checkpoint at 48, the newest before it is at 16"""
    )


def test_tiers_are_told_apart(tmp_path):
    block, state = stores.sizes()
    store = make(disk_dir=tmp_path, disk_bytes=1 << 20, host_bytes=7 * block + 2 * state)
    cache = synthetic.empty(SPEC)
    for seed in range(4):
        cache, _ = serve(store, cache, 0, prompt(seed))
    store.flush()
    store.close()
    store = make(disk_dir=tmp_path, disk_bytes=1 << 20)
    cache, _ = serve(store, cache, 0, prompt(1)[:40], publish=False)
    found = rows(store.explain(prompt(1)))
    assert found["full kv"].stored == "6 blocks: 4 host, 2 disk"
    assert found["full kv"].route == "disk"
    assert found["windows"].stored == "at 16 disk, 32 host, 48 disk"


def test_replay_stands_in_for_checkpoints():
    spec = synthetic.only(synthetic.COMPRESSED, chunk=8, block=8)
    store, tokens = make(spec, policy="zero"), prompt(1)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, tokens, 56)
    store.publish(tokens, cache)
    found = store.explain(tokens)
    assert "\nreplay of tokens 48 .. 55\n" in str(found)
    row = rows(found)["windows"]
    assert (row.stored, row.route, row.alone, row.joint) == ("none", "replay", 56, 56)
    assert "replayed" in str(found)


def test_what_is_not_cacheable():
    found = make().explain(prompt(1), extra={"lora": "x"})
    assert all(x.why == ("not_cacheable",) and not x.joint for x in found.components)
    assert "extra has unknown fields ['lora']" in str(found)
    assert make().explain(np.zeros((2, 2))).prompt_length == 0


def test_facts_of_tenant_quota_epoch_and_disk(tmp_path):
    (tmp_path / "file").write_text("")
    quotas = Quotas(tenants={"a": Quota(host_bytes=9000, history_groups=50)})
    store = make(disk_dir=tmp_path / "file", disk_bytes=1 << 20, quotas=quotas)
    serve(store, synthetic.empty(SPEC), 0, prompt(1), tenant="a")
    store.advance_epoch(dataclasses.replace(store.identity, weight_epoch=7))
    facts = dict(store.explain(prompt(1), tenant="a").facts)
    held = sum(x.nbytes for x in store.catalog.groups())
    assert facts["tenant"] == "'a'"
    assert facts["quota"] == f"{held} of 9000 host bytes, 6 of 50 history groups"
    assert facts["epoch"] == f"7 ({store.epoch.hex()[:12]}), 1 earlier retained"
    assert facts["no disk"] == store.disk_failure
    text = str(store.explain(prompt(1), tenant="b"))
    assert "\n  tenant: 'b'\n" in text and "\n  quota: no limits\n" in text
    assert set(dict(make().explain(prompt(1)).facts)) == {"epoch"}
    assert {x.kind for x in store.catalog.groups()} == {HISTORY, CHECKPOINT}
