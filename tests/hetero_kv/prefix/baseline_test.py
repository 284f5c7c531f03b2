"""The hash-only baseline does exactly the classical thing."""

import jax
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.contract import History
from hetero_kv.prefix.baseline import KINDS, HashOnlyStore
from hetero_kv.prefix.index import HISTORY
from hetero_kv.prefix.policy import Never
from tests.hetero_kv import synthetic, validators
from tests.hetero_kv.prefix.stores import PLENTY, SPEC, healthy, identity, prompt, raw, stored


def after_another(store_type, **options):
    """A hit at 56 of prompt 1 in a slot that prompt 2 has used."""
    store = store_type(SPEC, identity(), host_bytes=PLENTY, **options)
    cache = synthetic.empty(SPEC)
    cache = synthetic.advance(SPEC, cache, 0, prompt(1), 60)
    cache = cache.replace(grid_length=cache.length)  # all 7 blocks
    store.publish(prompt(1), cache)
    cache = synthetic.advance(SPEC, synthetic.empty(SPEC), 0, prompt(2), 41)
    old = jax.tree.map(np.array, cache)
    with store.lookup(prompt(1)) as lease:
        assert lease.candidate_length == lease.resumable_length == 56
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == int(cache.grid_length[0]) == 56
    return store, old, cache


@pytest.mark.parametrize("kind", ["stale", "zeroed"])
def test_hash_only_restores_the_kv_and_nothing_else(kind):
    _, old, cache = after_another(HashOnlyStore, kind=kind)
    wrong = {x.split("[")[0] for x in synthetic.wrong_rows(SPEC, cache, 0, prompt(1))}
    names = {x.path: x.name for x in SPEC.slots()}
    assert {names[x] for x in wrong} == {
        "keys",
        "window",
        "window_pos",
        "tail",
        "tail_pos",
        "state",
        "conv",
    }
    for slot in SPEC.slots():
        have, before = np.asarray(cache.leaf(slot)), np.asarray(old.leaf(slot))
        np.testing.assert_array_equal(have[:, 1], before[:, 1])  # the neighbour
        if slot.name in ("keys", "window", "tail", "state", "conv"):
            want = before[:, 0] if kind == "stale" else np.zeros_like(before[:, 0])
            np.testing.assert_array_equal(have[:, 0], want)
    # The counters say that all is well, the positions do not.
    found = validate.describe(SPEC, validators.evidence(SPEC, cache), 0)
    assert found == ["windows: positions", "tails: positions"]


def test_hash_only_is_right_where_kv_is_all_there_is():
    spec = synthetic.only(synthetic.FULL)
    store = HashOnlyStore(spec, identity(spec), host_bytes=PLENTY)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(1), 48)
    store.publish(prompt(1), cache)
    cache = synthetic.advance(spec, synthetic.empty(spec), 0, prompt(2), 41)
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 48
    assert not synthetic.wrong_rows(spec, cache, 0, prompt(1))
    with store.lookup(prompt(3)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 0


def test_hash_only_chosen_components():
    _, _, cache = after_another(HashOnlyStore, components=("csa entries", "csa index keys"))
    wrong = {x.split("[")[0] for x in synthetic.wrong_rows(SPEC, cache, 0, prompt(1))}
    names = {x.path: x.name for x in SPEC.slots()}
    assert {"kv", "nsa"} <= {names[x] for x in wrong}
    assert not {"entries", "keys"} & {names[x] for x in wrong}
    for bad in (dict(components=("windows",)), dict(kind="shiny")):
        with pytest.raises(ValueError):
            HashOnlyStore(SPEC, identity(), host_bytes=PLENTY, **bad)


def test_hash_only_survives_damage():
    store, _, cache = after_another(HashOnlyStore)
    raw(store, stored(store, HISTORY, 3))[0] ^= 1
    with store.lookup(prompt(1)) as lease:
        cache = store.restore(lease, cache, 0)
    assert int(cache.length[0]) == 16
    healthy(store)


def test_hash_only_needs_no_checkpoints():
    store, _, _ = after_another(HashOnlyStore)
    assert {x.kind for x in store.catalog.groups()} == {HISTORY}
    assert isinstance(store.policy.checkpoints, Never)
    assert {x.leaf.component for x in SPEC.slots() if isinstance(x.leaf.contract, History)} - set(
        store.components
    ) == {"csa index keys"}


def test_no_other_store_finds_what_it_publishes():
    found = {HashOnlyStore(SPEC, identity(), host_bytes=PLENTY, kind=x).identity for x in KINDS}
    assert len({identity().digest, *(x.digest for x in found)}) == 3
