"""Stores over the synthetic cache, and what tests do with them."""

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.index import CHECKPOINT, HISTORY
from hetero_kv.prefix.observe import NAMESPACE
from hetero_kv.prefix.store import PrefixStore
from tests.hetero_kv import synthetic, validators

SPEC = synthetic.everything()  # B = 8, G = 16
G = SPEC.granularity
PLENTY = 1 << 20
CAPACITY = 64


def identity(spec=SPEC, **fields):
    return Identity.of(spec, {"w": jnp.arange(3.0)}, {"name": "synthetic"}, batch=2, **fields)


def make(spec=SPEC, host_bytes=PLENTY, **options):
    return PrefixStore(spec, identity(spec), host_bytes=host_bytes, **options)


def prompt(seed, n=60, shared=0):
    """i32[n]; the first `shared` tokens are the same for every seed."""
    head = np.random.default_rng(999).integers(0, 1000, shared)
    return np.concatenate([head, np.random.default_rng(seed).integers(0, 1000, n - shared)])


def plain_metrics(store):
    """By names without the namespace."""
    found = store.metrics()
    assert all(x.startswith(NAMESPACE) for x in found)
    return {x.removeprefix(NAMESPACE): n for x, n in found.items()}


def healthy(store):
    assert store.verify() == []
    metrics = plain_metrics(store)
    used = sum(metrics[f'host_used_bytes{{kind="{x}"}}'] for x in (HISTORY, CHECKPOINT))
    assert metrics["host_free_bytes"] + used == metrics["host_capacity_bytes"]


def serve(store, cache, row, tokens, spec=SPEC, publish=True, **who):
    """One request as an engine would run it. Returns (cache, restored length)."""
    with store.lookup(tokens, **who) as lease:
        cache = store.restore(lease, cache, row)
        length = int(cache.length[row])
        assert length == lease.resumable_length
        assert not synthetic.wrong_rows(spec, cache, row, tokens)
        for stop in (*lease.checkpoint_points, len(tokens)):
            if stop > int(cache.length[row]):
                cache = synthetic.advance(spec, cache, row, tokens, stop)
            if publish:
                store.publish(tokens, cache, row, points=lease.checkpoint_points, **who)
    assert not synthetic.wrong_rows(spec, cache, row, tokens)
    assert validators.evidence(spec, cache).ok.all()
    healthy(store)
    assert plain_metrics(store)["leases_open"] == 0
    return cache, length


def sizes(spec=SPEC):
    store = make(spec)
    block = store.transfer.history_layout(1).nbytes
    return block, store.transfer.checkpoint_layout.nbytes


def publish_beside(store, cache, tokens):
    """Publishes a cold prompt from row 1 while leases are open."""
    cache = jax.jit(lambda c: state.reset_row(SPEC, c, 1))(cache)
    cache = synthetic.advance(SPEC, cache, 1, tokens, 48)
    return cache, store.publish(tokens, cache, 1)


def stored(store, kind, blocks):
    return next(x for x in store.catalog.groups() if x.kind == kind and x.node.depth == blocks)


def raw(store, group):
    return store.catalog.tier._payloads[group.ticket.slot].buffer
