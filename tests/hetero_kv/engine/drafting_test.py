"""Drafts in the engine: right tokens, the bits of a run that never drafted wrongly, refusals."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from hetero_kv import Request, verifying
from hetero_kv.drafting import PromptLookup
from hetero_kv.requests import FINISHED
from hetero_kv.rows import Rows
from tests import variants
from tests.hetero_kv.engine import world
from tests.hetero_kv.engine.engine_test import OTHERS

NUMBERS = range(9)


def test_prompt_lookup_finds_the_latest_longest_match() -> None:
    rng = np.random.default_rng(0)
    drafter = PromptLookup(tokens=4, longest=3, shortest=1)
    sizes = set()
    for _ in range(300):
        tokens = rng.integers(0, 4, int(rng.integers(1, 14))).astype(np.int32)
        want = []
        for size in (3, 2, 1):
            ends = [
                i
                for i in range(size, len(tokens))
                if tokens[i - size : i].tolist() == tokens[len(tokens) - size :].tolist()
            ]
            if ends:
                want = tokens[ends[-1] : ends[-1] + 4].tolist()
                break
        assert drafter(tokens).tolist() == want
        sizes.add(len(want))
    assert sizes == {0, 1, 2, 3, 4}
    with pytest.raises(ValueError, match="shortest"):
        PromptLookup(longest=1, shortest=2)


@pytest.mark.full
@pytest.mark.parametrize("paged", [False, True])
def test_answers_are_those_without_drafts(paged: bool) -> None:
    """Tokens equal, greedy and drawn; logits to rounding. All bits as alone: neither mates, slots,
    pages nor a preemption change where a request is verified."""
    made = world.engine(drafter=world.guess, paged=paged)
    handles = {made.submit(world.request(x)): x for x in NUMBERS}
    for i in range(10_000):
        if not made.busy:
            break
        made.step()
        assert made.problems() == []
        if i % 3 == 2 and made.scheduler.decoding():
            made.preempt(made.scheduler.decoding()[-1].handle, save=i % 4 == 1)
    for handle, number in handles.items():
        result, plain = made.result(handle), world.alone(number)
        world.same_answer(result, number, drafts=True)
        assert result.tokens.tolist() == plain.tokens.tolist()
        np.testing.assert_allclose(result.logits, plain.logits, atol=1e-5, rtol=1e-5)
    drafted, accepted = (world.count(made, f"{x}_tokens_total") for x in ("drafted", "accepted"))
    assert drafted > accepted > 10
    assert world.count(made, "redecoded_tokens_total") > 2
    assert world.count(made, "redecode_mismatches_total") == 0
    assert world.count(made, "decode_calls_total") > 0  # where nothing was drafted
    world.settled(made)


@pytest.mark.parametrize("paged", variants.some([False, True], [False]))
def test_state_is_that_of_a_run_that_never_drafted_wrongly(paged: bool) -> None:
    """Verified in the same pieces, with right guesses alone: bit for bit, at every length."""
    request = Request(world.request(7).tokens, 20)
    (plain,) = world.engine().generate([request])
    whole = np.concatenate([request.tokens, plain.tokens])

    def drafter(tokens: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([2, len(tokens)])
        guess = whole[len(tokens) :][: rng.integers(1, world.DRAFT + 1)].copy()
        right = rng.integers(4)
        guess[right:] = (guess[right:] + 1) % world.VOCAB
        return guess

    made = world.engine(drafter=drafter, paged=paged)
    entry = made._entries[made.submit(request)]
    lengths = set()
    while True:
        made.step()
        if not entry.emitted:
            continue
        if entry.slot is None:
            break
        one = made.rows.take(made.cache, entry.slot)
        again = world.engine(drafter=world.guess, paged=paged)
        other = again._entries[again.submit(request)]
        other.emitted, other.pieces = list(entry.emitted), dict(entry.pieces)
        while other.cursor < len(entry.emitted):
            again.step()
        two = again.rows.take(again.cache, other.slot)
        wrong = [x for x in made.rows.differ(one, two) if int(x.row) >= 0]
        assert int(one.length[0]) == int(two.length[0]) and not wrong
        assert int(one.grid_length[0]) == int(two.grid_length[0]) <= len(request.tokens)
        lengths.add(int(one.length[0]))
    assert len(lengths) > 4 and entry.emitted == plain.tokens.tolist()
    assert {x - 1 for x in entry.pieces.values()} >= {0, 1, 2}


def test_all_accepted_is_as_some_accepted() -> None:
    """Where a mate's guess is wrong, the call has a second round; nobody else notices."""
    right, wrong = (Request(world.request(x).tokens, 12) for x in (7, 5))
    (plain,) = world.engine().generate([right])
    whole = np.concatenate([right.tokens, plain.tokens])

    def drafter(tokens: np.ndarray) -> np.ndarray:
        if np.array_equal(tokens[: len(right.tokens)], right.tokens):
            return whole[len(tokens) :][:3]
        return np.array([world.VOCAB - 1] * 3)

    (alone,) = world.engine(drafter=drafter).generate([right])
    made = world.engine(drafter=drafter)
    handle = made.submit(right)
    made.submit(wrong)
    world.drain(made)
    beside = made.result(handle)
    assert beside.tokens.tolist() == alone.tokens.tolist() == plain.tokens.tolist()
    assert beside.logits.tobytes() == alone.logits.tobytes()
    assert alone.logits.tobytes() != plain.logits.tobytes()  # another grid: the positive control


def test_verifying_is_one_program_for_every_mix(monkeypatch) -> None:
    made = world.engine(drafter=world.guess, paged=True)
    asks, real = [], made.rows.verify

    def verify(params, cache, ask):
        asks.append(ask)
        return real(params, cache, ask)

    monkeypatch.setattr(made.rows, "verify", verify)
    list(made.generate([world.request(x) for x in NUMBERS]))
    assert len({tuple(x.budget.tolist()) for x in asks}) > 3
    lower = jax.jit(functools.partial(verifying.verify, made.rows)).lower
    texts = {lower(made.params, made.cache, x).as_text() for x in (asks[0], asks[-1])}
    assert len(texts) == 1
    less = asks[0]._replace(forced=asks[0].forced[:, 1:])
    assert lower(made.params, made.cache, less).as_text() not in texts  # what a leak would do


def test_beyond_the_budget_is_refused() -> None:
    model, _ = world.model()
    chunk = model.cache_spec.chunk
    for tokens in (chunk, -1):
        with pytest.raises(ValueError, match="rewind budget"):
            Rows(model, slots=1, capacity=world.CAPACITY, draft_tokens=tokens)
    with pytest.raises(ValueError, match="draft_tokens"):
        dataclasses.replace(world.OPTIONS, draft_tokens=0)
    with pytest.raises(ValueError, match="other \\['draft_tokens'\\]"):
        world.engine(drafter=world.guess, draft_tokens=world.DRAFT - 1)


@pytest.mark.parametrize(
    "drafted, why",
    [
        ([0] * (world.DRAFT + 1), "at most 5 can be rewound"),
        ([world.VOCAB], "must be in 0..60"),
        ([-1], "must be in 0..60"),
        ([0.5], "got float64"),
        ([[1]], "got int64[1, 1]"),
        (None, "no idea"),
    ],
)
def test_what_is_no_draft_is_refused_and_the_request_is_served(drafted, why: str) -> None:
    def drafter(tokens: np.ndarray):
        if drafted is None:
            raise RuntimeError("no idea")
        return drafted

    made = world.engine(drafter=drafter)
    (result,) = made.generate([world.request(7)])
    world.same_answer(result, 7)  # decoded, as without a drafter
    (told,) = [x for x in result.reasons if x.code == "draft_refused"]
    assert why in told.detail
    assert world.count(made, "drafts_refused_total") == len(result.tokens) - 2
    assert world.count(made, "verify_calls_total") == 0


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_a_wrong_state_is_refused_by_the_call_that_verifies(paged: bool) -> None:
    requests = [Request(world.request(x).tokens, 20) for x in (7, 5)]
    made = world.engine(drafter=lambda tokens: tokens[-3:], paged=paged)
    wants = [next(made.generate([x])) for x in requests]
    handles = [made.submit(x) for x in requests]
    entry = made._entries[handles[0]]
    while len(entry.emitted) < 8:
        made.step()
    before, calls = list(entry.emitted), world.count(made, "decode_calls_total")
    if paged:
        assert world.damage_page(made, entry.slot, "csa entries", "generation")
    else:
        assert world.damage(made, entry.slot, "windows", evidence=True)
    world.drain(made)
    for handle, want in zip(handles, wants, strict=True):
        result = made.result(handle)
        assert result.tokens.tolist() == want.tokens.tolist()
        assert result.logits.tobytes() == want.logits.tobytes()
        assert (result.discarded > 0) == (handle == handles[0])
    assert want.tokens[: len(before)].tolist() != before  # of the other one
    assert world.count(made, "verdicts_total") == 1
    assert world.count(made, "decode_calls_total") - calls <= 2  # the last token of each
    world.settled(made)


def test_a_stop_in_a_draft_ends_the_answer() -> None:
    request = Request(world.request(7).tokens, 20)
    (plain,) = world.engine().generate([request])
    tokens = plain.tokens.tolist()
    at = next(x for x in range(2, 12) if tokens.index(tokens[x]) == x)
    stopped = dataclasses.replace(request, stop=(tokens[at],))
    whole = np.concatenate([request.tokens, plain.tokens])
    made = world.engine(drafter=lambda x: whole[len(x) :][: world.DRAFT])
    (result,) = made.generate([stopped])
    assert result.status == FINISHED and result.tokens.tolist() == tokens[: at + 1]
    assert len(result.logits) == at + 1
    world.settled(made)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4", *OTHERS])
def test_models_of_other_mechanisms(name: str) -> None:
    """Recurrent state, other strides and windows: right, half right and wrong guesses."""
    plain = {x: world.alone(x, name) for x in (1, 5, 7)}
    whole = {x: np.concatenate([world.request(x).tokens, y.tokens]) for x, y in plain.items()}

    def drafter(tokens: np.ndarray) -> np.ndarray:
        size, right = np.random.default_rng([5, len(tokens)]).integers(0, world.DRAFT + 1, 2)
        for text in whole.values():
            if np.array_equal(text[: len(tokens)], tokens):
                guess = text[len(tokens) :][:size].copy()
                guess[right:] = (guess[right:] + 1) % world.VOCAB
                return guess
        return tokens[:0]

    found = []
    for paged, numbers in ((False, [1]), (False, [5, 7, 1]), (True, [7, 1, 5])):
        made = world.engine("off", name, drafter=drafter, paged=paged)
        handles = {x: made.submit(world.request(x)) for x in numbers}
        world.drain(made)
        found.append({x: made.result(handle) for x, handle in handles.items()})
        assert world.count(made, "redecode_mismatches_total") == 0
    for x, want in plain.items():
        for result in (y[x] for y in found if x in y):
            assert result.tokens.tolist() == want.tokens.tolist()
            np.testing.assert_allclose(result.logits, want.logits, atol=1e-5, rtol=1e-5)
            assert result.logits.tobytes() == found[1][x].logits.tobytes()
    assert world.count(made, "drafted_tokens_total") > world.count(made, "accepted_tokens_total")
