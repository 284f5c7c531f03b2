"""Small engines over real models, the requests they serve, and what each request must get.

Compiled functions are shared by all engines of a process, in strict mode with poison: every test
is also a test that no shape leaks and that no dead row matters.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import models
from hetero_kv import Engine, Options, PrefixStore, Request, Result, Sampling
from hetero_kv.contract import Point
from hetero_kv.params import Params
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.requests import FINISHED
from hetero_kv.rows import Rows
from models import Decoder
from tests.models import tiny

SLOTS, CAPACITY, BURST = 3, 64, 4
VOCAB = tiny.BASE.vocab_size
PLENTY = 1 << 24
OPTIONS = Options(
    burst=BURST,
    keep_logits=True,
    debug_poison=True,
    strict=True,
    flight_timeout=1e9,
    audit_share=0.0,
)


@functools.cache
def model(name: str = "small") -> tuple[Decoder, Params]:
    """A model and its weights: of `tiny`, or one that compiles fast, with G = 8."""
    if name != "small":
        return tiny.model(name)
    config = tiny.BASE.replace(
        layer_types=("csa", "swa"), mlp_types=("dense", "dense"), chunk=8, block=8
    )
    made = models.build(config)
    return made, tiny.random_params(made, seed=2)


@functools.cache
def rows(name: str, slots: int, check: bool, poison: bool) -> Rows:
    """Compiled functions, for OPTIONS."""
    return Rows(
        model(name)[0],
        slots=slots,
        capacity=CAPACITY,
        burst=BURST,
        keep_logits=True,
        poison=poison,
        check=check,
        strict=True,
    )


@functools.cache
def identity(name: str = "small") -> Identity:
    """For calls of batch 1."""
    made, params = model(name)
    return Identity.of(made.cache_spec, params, made.config, batch=1)


def store(name: str = "small", **options) -> PrefixStore:
    """An empty store."""
    options = {"host_bytes": PLENTY} | options
    return PrefixStore(model(name)[0].cache_spec, identity(name), **options)


def hash_only_store(name: str = "small", **options) -> HashOnlyStore:
    """The classical rule."""
    options = {"host_bytes": PLENTY} | options
    return HashOnlyStore(model(name)[0].cache_spec, identity(name), **options)


def engine(
    reuse: str = "off",
    name: str = "small",
    slots: int = SLOTS,
    store: PrefixStore | None = None,
    **options,
) -> Engine:
    """An engine; `options` as in Options."""
    made, params = model(name)
    options = dataclasses.replace(OPTIONS, **options)
    return Engine(
        made,
        params,
        store=store,
        slots=slots,
        capacity=CAPACITY,
        reuse=reuse,
        options=options,
        rows=rows(name, slots, reuse != "hash_only", options.debug_poison),
    )


@functools.cache
def document(number: int) -> np.ndarray:
    """i32[40], shared by several requests."""
    return np.random.default_rng([1, number]).integers(0, VOCAB, 40).astype(np.int32)


@functools.cache
def request(number: int) -> Request:
    """One of many: documents, lengths, sampling and stops vary."""
    rng = np.random.default_rng([2, number])
    shared = int(rng.choice([0, 8, 16, 24, 32, 33, 40]))
    own = rng.integers(0, VOCAB, int(rng.integers(1, 12)))
    return Request(
        tokens=np.concatenate([document(number % 2)[:shared], own]).astype(np.int32),
        max_new_tokens=int(rng.integers(1, 11)),
        stop=tuple(rng.integers(0, VOCAB, 2).tolist()) if number % 3 == 0 else (),
        sampling=Sampling(
            temperature=float(number % 2), top_k=int(number % 5) * 4, top_p=0.95, seed=number
        ),
    )


@functools.cache
def alone(number: int, name: str = "small", slots: int = SLOTS) -> Result:
    """What a request gets that is served alone, in slot 0, without reuse."""
    (result,) = engine("off", name, slots).generate([request(number)])
    assert result.status == FINISHED
    return result


def same_answer(result: Result, number: int, name: str = "small", slots: int = SLOTS) -> None:
    """Bit for bit what the request gets alone."""
    want = alone(number, name, slots)
    assert result.status == FINISHED, result.why
    assert result.tokens.tolist() == want.tokens.tolist()
    assert result.logits.tobytes() == want.logits.tobytes()
    size = len(request(number).tokens)
    assert result.reused_length + result.replayed_length + result.computed_length == size


def drain(made: Engine) -> None:
    """Steps until nothing is left to do; the books are right after each."""
    for _ in range(10_000):
        if not made.busy:
            return
        made.step()
        assert made.problems() == []
    raise AssertionError("the engine never ends")


def settled(made: Engine) -> None:
    """Nothing is held any more, by nobody."""
    assert made.problems() == []
    assert made.scheduler.slots.count(None) == len(made.scheduler.slots)
    assert not made.scheduler.waiting and not made.reuser.audits
    if made.store is not None:
        assert made.store.catalog.leases == 0
        assert made.store.verify() == []
    if made.options.debug_poison:
        for slot in made.rows.spec.slots():
            leaf, contract = made.cache.leaf(slot), slot.leaf.contract
            if isinstance(contract, Point) and not contract.group:  # as at length 0
                assert not leaf.any(), slot.path
            elif jnp.issubdtype(leaf.dtype, jnp.floating):
                assert jnp.isnan(leaf).all(), slot.path


def count(made: Engine, name: str, **labels: str) -> int:
    """A counter of the engine."""
    return made.counters.get(name, **labels)


def damage(made: Engine, row: int, component: str, evidence: bool = False) -> bool:
    """Changes what a row holds of a component; False: it holds nothing of it.

    evidence: the counters or positions instead of the values.
    """
    cache, done = made.cache, False
    length = int(cache.length[row])
    for slot in rows_spec(made).slots():
        if slot.leaf.component != component or (slot.leaf.dtype == "int32") != evidence:
            continue
        value = np.array(cache.leaf(slot))
        if slot.leaf.row_count(CAPACITY) and not evidence:
            live = np.flatnonzero(slot.leaf.live_rows(length, CAPACITY))
            if not len(live):
                continue
            value[:, row, live[0]] += 1
        else:
            value[:, row] += 1
        cache, done = cache.with_leaves({slot: jnp.array(value)}), True
    made.cache = cache
    return done


def rows_spec(made: Engine):
    """The spec of its cache."""
    return made.rows.spec
