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
from hetero_kv.pages import table
from hetero_kv.pages.layout import Paging
from hetero_kv.params import Params
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.requests import FINISHED
from hetero_kv.rows import Rows
from models import Decoder
from tests.models import tiny

SLOTS, CAPACITY, BURST, DRAFT = 3, 64, 4, 5
VOCAB = tiny.BASE.vocab_size
PLENTY = 1 << 24
KNOWN = 16  # requests whose answers `guess` knows
OPTIONS = Options(
    burst=BURST,
    keep_logits=True,
    debug_poison=True,
    strict=True,
    flight_timeout=1e9,
    audit_share=0.0,
    draft_tokens=DRAFT,
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
def paging(name: str = "small", slots: int = SLOTS, share: float = 0.7) -> Paging:
    """Pages of two sizes, too few (but for one row) by `share` of what all rows could need."""
    spec = model(name)[0].cache_spec
    names = [x.component for x in Paging.of(spec, slots, CAPACITY).pages]
    span = {x: spec.block * (1 + i % 2) for i, x in enumerate(names)}
    need = Paging.of(spec, slots, CAPACITY, span)
    count = {x.component: max(int(x.count * share), x.count // slots) for x in need.pages}
    return Paging.of(spec, slots, CAPACITY, span, count)


@functools.cache
def rows(name: str, slots: int, check: bool, poison: bool, paging: Paging | None = None) -> Rows:
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
        paging=paging,
        draft_tokens=DRAFT,
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
    paged: bool = False,
    **options,
) -> Engine:
    """An engine; `options` as in Options."""
    made, params = model(name)
    check = reuse != "hash_only" and options.get("validate", True)
    if paged:
        options = {"paging": paging(name, slots)} | options
    options = dataclasses.replace(OPTIONS, **options)
    return Engine(
        made,
        params,
        store=store,
        slots=slots,
        capacity=CAPACITY,
        reuse=reuse,
        options=options,
        rows=rows(name, slots, check, options.debug_poison, options.paging),
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
def alone(number: int, name: str = "small", slots: int = SLOTS, drafts: bool = False) -> Result:
    """What a request gets that is served alone, in slot 0, without reuse."""
    drafter = guess if drafts else None
    (result,) = engine("off", name, slots, drafter=drafter).generate([request(number)])
    assert result.status == FINISHED
    return result


@functools.cache
def _known() -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts, each with the answer that the small model gives."""
    return [(request(x).tokens, alone(x).tokens) for x in range(KNOWN)]


def guess(tokens: np.ndarray) -> np.ndarray:
    """A drafter that is right about known requests, or for a while, or wrong at once; or silent."""
    rng = np.random.default_rng([7, len(tokens), int(tokens.sum())])
    size, wrong = rng.integers(DRAFT + 1), rng.integers(2 * DRAFT)
    drafted = rng.integers(0, VOCAB, size).astype(np.int32)
    for prompt, answer in _known():
        whole = np.concatenate([prompt, answer])
        if len(whole) > len(tokens) and np.array_equal(whole[: len(tokens)], tokens):
            right = whole[len(tokens) :][: min(size, wrong)]
            drafted[: len(right)] = right
    return drafted


def same_answer(
    result: Result, number: int, name: str = "small", slots: int = SLOTS, drafts: bool = False
) -> None:
    """Bit for bit what the request gets alone."""
    want = alone(number, name, slots, drafts)
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
    """Nothing is held any more, by nobody; what was kept beyond its last row can go."""
    assert made.problems() == []
    if made.options.keep_pages:
        made.cache = made.pages.drop_kept(made.cache)
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
            elif slot.leaf.poison is not None:
                assert jnp.isnan(slot.leaf.numbers(leaf)).all(), slot.path
    if made.pages.paged:
        for page in made.cache.pages.paging.pages:
            assert not np.asarray(made.cache.pages.tables[page.component].form).any()


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


def damage_page(made: Engine, slot: int, component: str, field: str, column: int = 0) -> bool:
    """Changes what the page table says of one page of a row; False: it has none there.

    field: "generation", "owner", "count", "form", "table" (another row's page, or none), an id that
    is no page ("sentinel", "negative", "far"), or "bytes".
    """
    pages = made.cache.pages.tables[component]
    i = int(pages.table[slot, column])
    if i == pages.size:
        return False
    if field == "bytes":
        cache = made.cache
        for leaf in rows_spec(made).slots():
            if leaf.leaf.component == component and leaf.leaf.dtype != "int32":
                pool = np.array(cache.leaf(leaf))
                pool[:, i, 0] += 1
                cache = cache.with_leaves({leaf: jnp.array(pool)})
        made.cache = cache
        return True
    others = np.delete(np.asarray(pages.table), slot, axis=0)
    others = others[(others != pages.size) & (others != i)]

    def to(page: int) -> dict:
        return dict(table=pages.table.at[slot, column].set(page))

    changes = {
        "generation": lambda: dict(generation=pages.generation.at[i].add(1)),
        "owner": lambda: dict(owner=pages.owner.at[i].add(1)),
        "count": lambda: dict(count=pages.count.at[i].add(-1)),
        "form": lambda: dict(form=pages.form.at[i].set(table.CORRUPT)),
        "table": lambda: to(int(others[0]) if len(others) else pages.size),
        "sentinel": lambda: to(pages.size),
        "negative": lambda: to(-1),
        "far": lambda: to(2**31 - 1),
    }[field]()
    tables = made.cache.pages.tables | {component: pages._replace(**changes)}
    made.cache = made.cache.replace(pages=made.cache.pages.replace(tables=tables))
    return True


def rows_spec(made: Engine):
    """The spec of its cache."""
    return made.rows.spec
