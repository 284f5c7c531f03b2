"""Pages in place of rows: the same bits, one program, and refusals that touch nobody else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv import validate
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages.layout import Paging
from hetero_kv.params import Params
from hetero_kv.prefix import Identity, PrefixStore
from hetero_kv.prefix.transfer import transfer_for
from hetero_kv.state import Cache
from models.decoder import Decoder
from tests import variants
from tests.hetero_kv import validators
from tests.hetero_kv.pages import convert
from tests.hetero_kv.pages.convert import owner, reserve
from tests.models import families, tiny

PLAIN = "plain"  # sliding, sparse and heavy layers with little else; blocks of 16 tokens
SPANS: dict[str, Any] = {
    PLAIN: {"csa entries": 32},
    "full_mixed": None,  # blocks of 21: pages that do not align with tiles
    "scanned": {"csa index keys": 4, "hca entries": 512},
}


@functools.cache
def model(name: str) -> tuple[Decoder, Params]:
    if name != PLAIN:
        return tiny.model(name)
    made = models.build(tiny.BASE)
    return made, tiny.random_params(made, seed=2)


@functools.cache
def paging(name: str = PLAIN) -> Paging:
    """Two spare pages in each pool."""
    spec = model(name)[0].cache_spec
    need = Paging.of(spec, tiny.ROWS, tiny.CAPACITY, span=SPANS[name])
    count = {x.component: x.count + 2 for x in need.pages}
    return Paging.of(spec, tiny.ROWS, tiny.CAPACITY, span=SPANS[name], count=count)


def empty(name: str = PLAIN, reserved: tuple[int, ...] = (1, 0)) -> Cache:
    """A poisoned cache whose rows got their pages in this order, in turns and not in sequence."""
    cache = model(name)[0].init_paged_cache(tiny.ROWS, tiny.CAPACITY, paging(name), poison=True)
    for tokens in (20, tiny.CAPACITY):
        for row in reserved:
            cache, flags = reserve(cache, row, tokens, owner(row + 1))
            assert int(flags) == 0
    return cache


@functools.cache
def seal():
    return jax.jit(functools.partial(paged.seal, model(PLAIN)[0].cache_spec))


def assert_same(made: Decoder, cache: Cache, contiguous: Cache) -> None:
    tiny.assert_same_state(made, convert.contiguous(made.cache_spec, cache), contiguous)


def assert_untouched(one: Cache, two: Cache) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.array(a).view(np.uint8), np.array(b).view(np.uint8))


@functools.cache
def _run(length: int, other: int) -> Cache:
    """Both rows prefilled; row 0 is sealed."""
    made, params = model(PLAIN)
    valid = np.array([length, other])
    _, cache = made.prefill(params, tiny.tokens()[:, : valid.max()], empty(), valid)
    cache, flags = seal()(cache, 0)
    assert int(flags) == 0
    return cache


def run(length: int, other: int) -> Cache:
    return tiny.copy(_run(length, other))


@pytest.mark.parametrize("name", variants.some((PLAIN, "full_mixed", "scanned"), (PLAIN,)))
def test_pages_have_the_bits_of_a_contiguous_cache(name: str) -> None:
    made, params = model(name)
    rows, pages, tokens = tiny.empty(made), empty(name), tiny.tokens()
    for part, valid in ((tokens[:, :20], (20, 13)), (tokens[:, 20:41], (21, 3))):
        want, rows = made.prefill(params, part, rows, np.array(valid))
        have, pages = made.prefill(params, part, pages, np.array(valid))
        np.testing.assert_array_equal(want, have)
    for step, active in enumerate(((True, True), (True, False), (True, True), (False, True)) * 3):
        on = np.array(active)
        want, rows = made.decode_step(params, tokens[:, step], rows, on)
        have, pages = made.decode_step(params, tokens[:, step], pages, on)
        np.testing.assert_array_equal(want[on], have[on])
    assert_same(made, pages, rows)
    assert all(bool(x.exact) for x in validators.ledgers(pages).values())
    verdict = validators.check(made.cache_spec, pages, finite=True)
    assert verdict.ok.all(), [validate.describe(made.cache_spec, verdict, r) for r in (0, 1)]


@pytest.mark.parametrize(
    ("name", "entries", "keys", "more"),
    variants.some(
        (
            ("no_overlap", "csa entries", "csa index keys", 1),
            ("no_overlap", "csa entries", "csa index keys", -1),
            ("deepseek_v32", "mla latent", "mla index keys", 1),
            ("deepseek_v32", "mla latent", "mla index keys", -1),
        ),
        (("no_overlap", "csa entries", "csa index keys", 1),),
    ),
)
def test_index_keys_in_pages_of_another_span(name: str, entries: str, keys: str, more: int) -> None:
    """A row then has room for more keys than entries, or for fewer."""
    made, params = tiny.model(name) if name in tiny.CHANGES else families.model(name)
    spec, block = made.cache_spec, made.cache_spec.block
    unit = 128 if "mla" in keys else block  # of a span that this capacity has
    capacity = max(1, 64 // (2 * unit)) * 2 * unit + block  # not whole pages of two units
    span = {entries: unit, keys: 2 * unit} if more > 0 else {entries: 2 * unit, keys: unit}
    paging = Paging.of(spec, tiny.ROWS, capacity, span)
    sizes = {x.component: x.columns * x.span for x in paging.pages}
    assert (sizes[keys] - sizes[entries]) * more > 0
    rows = made.init_cache(tiny.ROWS, capacity, poison=True)
    pages = made.init_paged_cache(tiny.ROWS, capacity, paging, poison=True)
    for row in range(tiny.ROWS):
        pages, flags = reserve(pages, row, capacity, owner(row + 1))
        assert int(flags) == 0
    tokens = np.random.default_rng(3).integers(0, made.config.vocab_size, (tiny.ROWS, capacity))
    valid = np.array([capacity - 1, capacity // 2])
    want, rows = made.prefill(params, tokens[:, :-1], rows, valid)
    have, pages = made.prefill(params, tokens[:, :-1], pages, valid)
    np.testing.assert_array_equal(want, have)
    if more < 0:  # decoding gathers what it picks: one of the cases is enough
        want, rows = made.decode_step(params, tokens[:, -1], rows)
        have, pages = made.decode_step(params, tokens[:, -1], pages)
        np.testing.assert_array_equal(want, have)


@pytest.mark.full
def test_decode_many_and_replay() -> None:
    made, params = model(PLAIN)
    tokens, results = tiny.tokens(), []
    for cache in (tiny.empty(made), empty()):
        _, cache = made.prefill(params, tokens[:, :32], cache)
        if cache.pages is not None:
            cache, _ = seal()(cache, 0)  # a replay only reads
            with pytest.raises(ValueError, match=r"rows \[0, 1\] do not hold .* of 48 tokens"):
                wrong = cache.pages.tables["csa entries"]
                wrong = wrong._replace(table=wrong.table.at[:, 1].set(wrong.size))
                tables = cache.pages.tables | {"csa entries": wrong}
                lacking = cache.replace(pages=cache.pages.replace(tables=tables))
                made.replay(params, tokens, lacking, 0, 48)
        cache = made.replay(params, tokens, cache, 0, 32)
        out, cache = made.decode_many(params, tokens[:, 32], cache, 6)
        results.append((out, cache))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert_same(made, results[1][1], results[0][1])


@pytest.mark.full
@pytest.mark.parametrize("release_first", [False, True])
def test_a_prefix_is_shared_without_copying(release_first: bool) -> None:
    made, params = model(PLAIN)
    spec, tokens = made.cache_spec, tiny.tokens()
    transfer = transfer_for(spec)
    _, cold = made.prefill(params, np.stack([tokens[0, :32]] * 2), tiny.empty(made))
    cache = empty(reserved=(0,))
    _, cache = made.prefill(params, tokens[:, :32], cache, np.array([32, 0]))
    cache, _ = seal()(cache, 0)
    checkpoint = transfer._read_checkpoint(cache, 0)
    before = {name: int(x.free) for name, x in validators.ledgers(cache).items()}
    cache, flags = paged.share_prefix(
        spec, cache, *(np.int32(x) for x in (0, 1, 32, tiny.CAPACITY)), owner(2)
    )
    assert int(flags) == 0
    after = {name: int(x.free) for name, x in validators.ledgers(cache).items()}
    for page in paging().pages:
        new = page.pages_for(tiny.CAPACITY) - 32 // page.span
        assert before[page.component] - after[page.component] == new
    assert validate.describe(spec, validators.check(spec, cache), 1)  # no windows and tails yet
    cache, _ = transfer.write(cache, np.int32(1), np.int32(32), np.int32(32), {}, checkpoint)
    expected = validators.expect(cache)
    assert validators.check(spec, cache, expected, 1).ok.all()
    if release_first:
        cache, flags = paged.release(spec, cache, 0, poison=True)
        assert int(flags) == 0
    active = np.array([not release_first, True])
    for step in range(2 * 8 + 1):
        token = np.array([tokens[0, 32 + step], tokens[1, 32 + step]])
        want, cold = made.decode_step(params, token, cold, active)
        have, cache, verdict = made.checked_step(params, token, cache, expected, active)
        assert verdict.ok.all()
        np.testing.assert_array_equal(want[active], have[active])
    assert all(bool(x.exact) for x in validators.ledgers(cache).values())


def test_through_a_store_and_back() -> None:
    made, params = model(PLAIN)
    identity = Identity.of(made.cache_spec, params, made.config, batch=tiny.ROWS)
    tokens = tiny.tokens()
    prompt = tokens[1, :50]
    _, cold = made.prefill(params, np.stack([tokens[0, :50], prompt]), tiny.empty(made))
    store = PrefixStore(made.cache_spec, identity, host_bytes=1 << 22)
    _, cache = made.prefill(params, tokens[:, :48], empty())
    published = store.publish(prompt, cache, row=1, points=(48,))
    assert published.length == 48 and not published.reasons
    with store.lookup(prompt) as lease:
        assert lease.resumable_length == 48
        other = store.restore(lease, empty(reserved=(0,)), row=0)
        plain = store.restore(lease, tiny.empty(made), row=0)
        none = store.restore(lease, empty(reserved=(1,)), row=0)
    store.close()
    assert int(none.length[0]) == 0  # without pages it starts over, and says so
    assert validators.check(made.cache_spec, none).ok.all()
    assert list(other.length) == [48, 0]
    assert validators.check(made.cache_spec, other, validators.expect(other), 2, finite=True).ok[0]
    assert_same(made, other, plain)
    part, valid = np.stack([prompt[48:], prompt[48:]]), np.array([2, 0])
    _, other = made.prefill(params, part, other, valid)
    cold_logits, _ = made.decode_step(params, tokens[:, 50], cold)
    token = np.array([tokens[1, 50], 0])
    logits, _ = made.decode_step(params, token, other, np.array([True, False]))
    np.testing.assert_array_equal(cold_logits[1], logits[0])


def faulty(cache: Cache, fault: str, row: int) -> Cache:
    """One page that the row reads, or its evidence, is not what was leased."""
    name = "csa index keys"
    pages = cache.pages.tables[name]
    first = int(pages.table[row, 0])
    if fault == "length":
        return cache.replace(length=cache.length.at[row].add(-4))
    changes = {
        "generation": dict(generation=pages.generation.at[first].add(1)),
        "owner": dict(owner=pages.owner.at[first].set(99)),
        "form": dict(form=pages.form.at[first].set(table.CORRUPT)),
        "count": dict(count=pages.count.at[first].add(-1)),
        "foreign": dict(table=pages.table.at[row, 0].set(pages.table[1 - row, 0])),
        "sentinel": dict(table=pages.table.at[row, 0].set(pages.size)),
        "negative": dict(table=pages.table.at[row, 0].set(-1)),
        "writes": dict(table=pages.table.at[row, 2].set(pages.size)),
    }[fault]
    tables = cache.pages.tables | {name: pages._replace(**changes)}
    return cache.replace(pages=cache.pages.replace(tables=tables))


FAULTS = {
    "length": "csa index keys: count",
    "generation": "csa index keys: generation",
    "owner": "csa index keys: owner",
    "form": "csa index keys: missing",
    "count": "csa index keys: valid",
    "foreign": "csa index keys: owner",
    "sentinel": "csa index keys: missing",
    "negative": "csa index keys: missing",
    "writes": "csa index keys: write",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_row_writes_nothing_and_nobody_else_notices(fault: str) -> None:
    made, params = model(PLAIN)
    base = run(35, 35)  # the next token closes an entry
    expected, token = validators.expect(base), tiny.tokens()[:, 35]
    wrong = faulty(base, fault, row=1)
    want, rest, _ = made.checked_step(
        params, token, tiny.copy(wrong), expected, np.array([True, False])
    )
    have, after, verdict = made.checked_step(params, token, tiny.copy(wrong), expected, on())
    assert verdict.ok.tolist() == [True, False]
    assert FAULTS[fault] in validate.describe(made.cache_spec, verdict, 1)
    assert np.isnan(have[1]).all() and np.isfinite(have[0]).all()
    np.testing.assert_array_equal(want[0], have[0])
    assert_untouched(after, rest)
    assert int(after.length[1]) == int(wrong.length[1])
    clean, _, verdict = made.checked_step(params, token, base, expected, on())
    assert verdict.ok.all()
    np.testing.assert_array_equal(clean[0], have[0])


def on() -> np.ndarray:
    return np.ones(tiny.ROWS, bool)


def test_a_prefill_stays_refused() -> None:
    made, params = model(PLAIN)
    base, tokens = run(16, 16), tiny.tokens()[:, 16:56]
    expected = validators.expect(base)
    want, _, verdict = made.checked_prefill(params, tokens, tiny.copy(base), expected)
    assert verdict.ok.all() and np.isfinite(want).all()
    wrong = faulty(base, "generation", row=1)
    have, after, verdict = made.checked_prefill(params, tokens, tiny.copy(wrong), expected)
    assert verdict.ok.tolist() == [True, False] and list(after.length) == [56, 16]
    assert "csa index keys: generation" in validate.describe(made.cache_spec, verdict, 1)
    np.testing.assert_array_equal(want[0], have[0])
    assert np.isnan(have[1]).all()
    one = np.array([40, 0])
    _, rest, verdict = made.checked_prefill(params, tokens, tiny.copy(wrong), expected, one)
    assert verdict.ok.all()
    assert_untouched(after, rest)
    # Nothing to run: nothing to check.
    _, same, verdict = made.checked_prefill(params, tokens, tiny.copy(wrong), expected, one * 0)
    assert verdict.ok.all()
    assert_untouched(same, wrong)
    with pytest.raises(ValueError, match="do not trace"):
        jax.eval_shape(functools.partial(made.checked_prefill, params), tokens, base)


def test_a_full_row_is_refused_by_its_length() -> None:
    made, params = model(PLAIN)
    cache = run(tiny.CAPACITY, 5)
    logits, after, verdict = made.checked_step(params, tiny.tokens()[:, 0], cache, None, on())
    assert validate.describe(made.cache_spec, verdict, 0) == ["lengths: length"]
    assert np.isnan(logits[0]).all() and list(after.length) == [tiny.CAPACITY, 6]


def test_too_few_pages() -> None:
    made, params = model(PLAIN)
    cache, tokens = empty(reserved=(1,)), tiny.tokens()
    with pytest.raises(ValueError, match=r"rows \[0\] have too few writable pages for \[5\]"):
        made.prefill(params, tokens[:, :5], cache)
    cache, _ = reserve(cache, 0, 16, owner(1))
    _, cache = made.prefill(params, tokens[:, :16], cache)
    with pytest.raises(ValueError, match="too few writable pages"):
        made.decode_many(params, tokens[:, 16], cache, 4)
    for step in range(3):  # no entry closes: there is nothing to write
        logits, cache = made.decode_step(params, tokens[:, 16 + step], cache, on())
        assert np.isfinite(logits).all()
    before = tiny.copy(cache)
    logits, cache = made.decode_step(params, tokens[:, 19], cache, on())
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert list(cache.length) == [19, 20]
    _, alone = made.decode_step(params, tokens[:, 19], before, ~(on() & [True, False]))
    assert_untouched(cache, alone)
    # The same inside a trace, where nothing can be raised: the row does not move.
    traced = jax.jit(functools.partial(made.prefill, logits="none"))
    _, cache = traced(params, tokens[:, 20:23], cache)
    assert list(cache.length) == [19, 23]


def test_one_program_for_every_mix_of_forms_tables_and_lengths(compiled: list[str]) -> None:
    made = models.build(tiny.config("all_entries", chunk=32))
    params, spec = tiny.model("all_entries")[1], made.cache_spec
    cache = made.init_paged_cache(tiny.ROWS, tiny.CAPACITY, poison=True)
    token = jnp.zeros(tiny.ROWS, jnp.int32)
    active, expected = jnp.ones(tiny.ROWS, bool), validators.expect(cache)
    for row, tokens in ((0, 40), (1, 5), (1, tiny.CAPACITY)):
        cache, _ = reserve(cache, row, tokens, owner(row + 1))
        _, cache, _ = made.checked_step(params, token, cache, validators.expect(cache), active)
        _, cache = made.decode_step(params, token, cache, active)
    name = "csa entries"
    pages = jax.tree.map(np.asarray, tiny.copy(cache.pages.tables[name]))
    for form in range(5):
        changed = jax.tree.map(jnp.array, pages)
        changed = changed._replace(form=changed.form.at[form % 3].set(form))
        cache = cache.replace(pages=cache.pages.replace(tables={name: changed}))
        for lengths in ((0, 0), (5, 63), (64, 64), (70, -3)):
            cache = cache.replace(length=jnp.array(lengths, jnp.int32))
            _, cache, verdict = made.checked_step(params, token, cache, expected, active)
            assert not verdict.ok.all()
            _, cache = made.decode_step(params, token, cache, active)
    step = made._step.lower(params, token, cache, active).compile()
    checked = made._checked.step.lower(params, token, cache, expected, active).compile()
    need = sum(x.nbytes for x in jax.tree.leaves(cache))
    for program in (step, checked):
        assert program.memory_analysis().alias_size_in_bytes >= need
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    old = cache
    _, cache, _ = made.checked_step(params, token, cache, expected, active)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    assert sorted(before) == sorted(after)  # updated in place
    assert made._step._cache_size() == made._checked.step._cache_size() == 1
    assert [x for x in compiled if x == "jit(step)"][2:] == []
    assert spec == made.cache_spec
