"""Real models at test sizes, and the ways to run a prompt: cold, and over a store.

Caches start poisoned, slots are used by other prompts before, and another row of the batch runs
something else meanwhile. A comparison covers the rest of the prompt, a few decode steps beyond the
next entries of every layer, and every live row.
"""

import functools

import jax
import numpy as np

import models
from hetero_kv import validate
from hetero_kv.contract import Evidence
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from models.config import DecoderConfig
from tests.hetero_kv import validators
from tests.models import tiny as tiny_models

TINY = DecoderConfig(
    vocab_size=64,
    d_model=32,
    layer_types=("swa", "csa", "hca", "csa"),
    mlp_types=("dense",) * 4,
    n_heads=2,
    head_dim=16,
    rope_dim=8,
    window=8,
    csa_ratio=4,
    hca_ratio=8,
    index_heads=8,
    index_dim=8,
    index_topk=3,
    d_ff=64,
    chunk=16,
    block=8,
    init_scale=0.5,
)
FULL = TINY.replace(layer_types=("full",) * 2, mlp_types=("dense",) * 2)
WIDE = TINY.replace(
    d_model=512,
    layer_types=("swa", "csa", "hca"),
    mlp_types=("dense",) * 3,
    n_heads=4,
    head_dim=128,
    rope_dim=32,
    window=32,
    hca_ratio=32,
    index_dim=32,
    d_ff=1024,
    chunk=64,
    block=32,
    init_scale=0.02,
)
STEPS = 17  # 2 * m' + 1
CAPACITY = 128
ROW, MATE = 1, 0


class Bench:
    """A model, its weights, and the two ways to run a prompt in row ROW."""

    def __init__(
        self,
        config: DecoderConfig,
        capacity: int = CAPACITY,
        made: tuple[models.Decoder, Params] | None = None,
    ):
        self.capacity = capacity
        self._cold: dict = {}  # by the bytes of the tokens
        self.model = made[0] if made else models.build(config)
        self.params = made[1] if made else self.model.init(jax.random.key(1))
        self.spec = self.model.cache_spec
        self.identity = Identity.of(self.spec, self.params, config, batch=2)

    def prompt(self, seed: int, n: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.model.config.vocab_size, n)

    def empty(self):
        return self.model.init_cache(batch=2, capacity=self.capacity, poison=True)

    def prefill(self, cache, tokens, mate=None):
        """Runs `tokens` in ROW and `mate` beside it. Returns (logits of ROW [n, V], cache)."""
        mate = np.zeros(0, int) if mate is None else mate
        both = np.zeros((2, max(len(tokens), len(mate))), np.int32)
        both[ROW, : len(tokens)], both[MATE, : len(mate)] = tokens, mate
        valid = np.array([len(mate), len(tokens)])
        logits, cache = self.model.prefill(self.params, both, cache, valid)
        return np.asarray(logits)[ROW, : len(tokens)], cache

    def finish(self, cache, tokens, mate=None, store=None):
        """Prefill of the rest (then published, if there is a store), and STEPS decode steps."""
        start = int(cache.length[ROW])
        logits, cache = self.prefill(cache, tokens[start:], mate)
        if store is not None:
            store.publish(tokens, cache, ROW)
        rows = [logits]
        for token in self.prompt(77, STEPS):
            step, cache = self.model.decode_step(self.params, np.full(2, token, np.int32), cache)
            rows.append(np.asarray(step)[ROW][None])
        return np.concatenate(rows), cache

    def cold(self, seed: int, n: int):
        """Logits [n + STEPS, V] and cache of a run without any store."""
        return self.cold_of(self.prompt(seed, n))

    def cold_of(self, tokens: np.ndarray):
        """As `cold`, of any tokens; kept."""
        key = tokens.tobytes()
        if key not in self._cold:
            self._cold[key] = self.finish(self.empty(), tokens, self.prompt(50, 23))
        return self._cold[key]

    def replayed(self, cache, tokens, span):
        """The replay that a lease asks for, in ROW."""
        both, rows = np.stack([tokens, tokens]), np.arange(2) == ROW
        return self.model.replay(self.params, both, cache, *span, rows=rows)

    def serve(self, store, cache, tokens, wait: float = 0.0):
        """One request in ROW over a store. Returns (logits of what was run, cache, start)."""
        with store.lookup(tokens, wait=wait) as lease:
            cache = store.restore(lease, cache, ROW)
            start = int(cache.length[ROW])
            if lease.replay:
                cache = self.replayed(cache, tokens, lease.replay)
                assert int(cache.length[ROW]) == start
            parts = []
            for stop in (x for x in lease.checkpoint_points if x < len(tokens)):
                logits, cache = self.prefill(cache, tokens[int(cache.length[ROW]) : stop])
                parts.append(logits)
                store.publish(tokens, cache, ROW, points=lease.checkpoint_points)
            logits, cache = self.finish(cache, tokens, store=store)
        return np.concatenate([*parts, logits]), cache, start

    def used(self, seed: int, n: int):
        """A cache whose rows other requests have used."""
        _, cache = self.finish(self.empty(), self.prompt(seed, n), self.prompt(seed + 1, 11))
        return cache

    def publish(self, store, seed: int, n: int):
        """A cold run that publishes at every point."""
        tokens, cache = self.prompt(seed, n), self.empty()
        with store.lookup(tokens) as lease:
            for stop in (*lease.checkpoint_points, n):
                rest = tokens[int(cache.length[ROW]) : stop]
                if len(rest):
                    _, cache = self.prefill(cache, rest)
                store.publish(tokens, cache, ROW, points=lease.checkpoint_points)

    def same_as_cold(self, seed: int, n: int, start: int, logits, cache) -> bool:
        return self.same(self.prompt(seed, n), start, logits, cache)

    def same(self, tokens: np.ndarray, start: int, logits, cache) -> bool:
        want, reference = self.cold_of(tokens)
        return np.array_equal(logits, want[start:]) and not differing(self.spec, cache, reference)


def differing(spec, cache, reference) -> list[str]:
    """Leaves whose live rows differ in ROW."""
    length = int(reference.length[ROW])
    assert int(cache.length[ROW]) == length
    found = []
    for slot in spec.slots():
        a, b = (np.asarray(x.leaf(slot))[:, ROW] for x in (cache, reference))
        if isinstance(slot.leaf.contract, Evidence):
            continue  # checked by the validator
        live = slot.leaf.live_rows(length, cache.capacity)
        if slot.leaf.row_count(cache.capacity):
            a, b = a[:, live], b[:, live]
        if a.tobytes() != b.tobytes():
            found.append(slot.path)
    for row in (cache, reference):
        assert validate.describe(spec, validators.evidence(spec, row, finite=True), ROW) == []
    return found


@functools.cache
def bench(name: str) -> Bench:
    """One of those here, or a model of `tiny`, families' too."""
    configs = {
        "tiny": (TINY, 128),
        "fine": (TINY.replace(chunk=8), 128),  # exact replay takes several chunks
        "full": (FULL, 128),
        "wide": (WIDE, 320),
    }
    if name not in configs:
        made = tiny_models.model(name)
        return Bench(made[0].config, made=made)
    return Bench(*configs[name])


def reset(b: Bench, cache, row: int):
    """An empty lease resets a row."""
    store = PrefixStore(b.spec, b.identity, host_bytes=1 << 24)
    with store.lookup(np.zeros(0, int)) as lease:
        return store.restore(lease, cache, row)
