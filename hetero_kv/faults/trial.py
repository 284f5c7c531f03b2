"""Trials: one request, served by an engine from a store that a fault was put into.

A bench holds what all trials of a model share: compiled functions, cold state, the right answer.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from hetero_kv.contract import CacheSpec, History, LeafSlot
from hetero_kv.engine import Engine
from hetero_kv.faults import checks, kinds, places
from hetero_kv.faults.forge import Held, Material
from hetero_kv.faults.inject import Injector
from hetero_kv.faults.kinds import Case
from hetero_kv.faults.residence import Residence, code_of
from hetero_kv.options import Options
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.keys import block_keys
from hetero_kv.prefix.plan import Reason
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import FINISHED, Request, Result
from hetero_kv.reusing import OFF, SHADOW, VALIDATED
from hetero_kv.rows import Model, Rows
from hetero_kv.state import Cache

Served = tuple[Engine, Result]

PLENTY = 1 << 26  # bytes
BURST = 4
FOREIGN = "foreign"  # the other tenant
# How a trial ended: served right without a word; right, with the reason why less was reused (or
# what an audit found); wrong although something was reported; wrong and nothing was.
UNNOTICED, REFUSED, TOLD, SILENT = "unnoticed", "refused", "wrong, told", "silently wrong"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one trial came to.

    reasons: codes, those of an audit with the component. token, logit: the first output, counted
    from the resumed length, whose token or logits are not the right ones; -1: none. live: whether
    a live row of the state at the end differs from the right one. within: outputs compared.
    """

    case: Case
    off: tuple[str, ...]
    status: str
    reasons: tuple[str, ...]
    token: int
    logit: int
    live: bool
    within: int
    resumed: int

    @property
    def bites(self) -> bool:
        """Whether an answer or a live row is not as it should be."""
        return self.logit >= 0 or self.live

    @property
    def right_reason(self) -> bool:
        """Whether the check on guard has said so, with the component where it can tell."""
        named = self.case.component if self.case.guard in kinds.NAMING else ""
        codes = kinds.CODES[self.case.guard]
        return any(x.split(":")[0] in codes and named in x for x in self.reasons)


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """Outputs from the resumed length on: what follows token L, L + 1, and so on."""

    tokens: np.ndarray  # i32[within]
    logits: np.ndarray  # f32[within, V]
    row: Cache  # the slot afterwards


class Bench:
    """Trials on one prompt of one model.

    Args:
        prompt: i32[n], n > length: resumed at `length`, a multiple of G.
        donor: i32[n], another request whose state gets mixed in.
        other: other weights of the same shapes, for old weights and foreign adapters.
        outputs: how many to compare; 0: 2 m' + 1, with m' the longest stride.
        rows: compiled functions (with the checks, without) of another bench of the same sizes.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        other: Params,
        prompt: np.ndarray,
        donor: np.ndarray,
        length: int,
        *,
        config: object,
        outputs: int = 0,
        rows: "tuple[Rows, Rows] | None" = None,
    ):
        spec = model.cache_spec
        size = len(prompt)
        if not length < size or length % spec.granularity or len(donor) != size:
            raise ValueError(f"need {length=} < {size=} == {len(donor)=}, in {spec.granularity=}")
        strides = [x.leaf.contract.stride for x in _histories(spec)]
        self.outputs = outputs or 2 * max(strides, default=1) + 1
        self.new = max(1, self.outputs - (size - length) + 1)
        self.model, self.params, self.spec = model, params, spec
        self.prompt, self.length = np.asarray(prompt, np.int32), length
        self.donor_prompt = np.asarray(donor, np.int32)
        capacity = size + self.new
        self.rows, self.blind = rows or self._compiled(capacity)
        if self.rows.capacity < capacity:
            raise ValueError(f"rows= hold {self.rows.capacity} tokens, {capacity=} are needed")
        self.identity = Identity.of(spec, params, config, batch=1)
        self.identity_of_other = Identity.of(spec, other, config, batch=1)
        self.states = self._cold(params, self.prompt)
        self.states_of_other = self._cold(other, self.prompt)
        donors = self._cold(params, self.donor_prompt)
        hold = functools.partial(Held.of, spec)
        self.material = Material(
            target=hold(self.states[length]),
            before=hold(self.states[length - spec.granularity]),
            donor=hold(donors[length]),
            donor_end=hold(donors[size]),
            other=hold(self.states_of_other[length]),
        )
        self.injector = Injector(
            spec,
            self.material,
            keys=block_keys(self.identity, self.prompt),
            donor=block_keys(self.identity, self.donor_prompt),
            foreign=block_keys(self.identity, self.prompt, FOREIGN),
            old=block_keys(self.identity_of_other, self.prompt),
        )
        self.right = self._answer(self._serve(None, OFF, self.rows))

    def cases(self, extents: tuple[str, ...] = (kinds.ALL,)) -> list[Case]:
        """All faults that this model can have."""
        return kinds.cases(self.spec, self.length, extents)

    def run(self, case: Case, off: Iterable[str], directory: pathlib.Path) -> Outcome:
        """Serves the prompt under a fault, with some checks switched off.

        directory: a new one, for the disk tier of cases that need one.
        """
        off = tuple(x for x in kinds.CHECKS if x in set(off))
        if case.moment == kinds.DEVICE:
            return self._resident(case, off, directory)
        keyed = self.identity_of_other if _is_old(case) else self.identity
        with (
            checks.switched_off(off, keyed),
            contextlib.closing(self._store(case, directory)) as store,
        ):
            self._publish(store, case)
            if case.moment == kinds.DISK:
                places.to_disk(store)
            audited = case.guard == kinds.AUDIT and kinds.AUDIT not in off
            rows = self.blind if kinds.EVIDENCE in off else self.rows
            with self._under(case, store):
                served = self._serve(store, SHADOW if audited else VALIDATED, rows)
        return self._outcome(case, off, served)

    # -- resident state ----------------------------------------------------------------------------

    @functools.cached_property
    def residence(self) -> Residence:
        """Where faults of the moment DEVICE happen."""
        return Residence(
            self.model,
            self.params,
            self.prompt,
            self.donor_prompt,
            self.length,
            self.outputs,
            self.material,
        )

    def _resident(self, case: Case, off: tuple[str, ...], directory: pathlib.Path) -> Outcome:
        del directory
        told, want = self.residence.run(case, off), self.residence.right[:, 0]
        token = _first(told.logits.argmax(-1) != want.argmax(-1))
        logit = _first((told.logits.view(np.uint32) != want.view(np.uint32)).any(-1))
        wrong = logit >= 0 or not told.mate
        if told.reasons:
            status = TOLD if wrong else REFUSED
        else:
            status = SILENT if wrong else UNNOTICED
        live, within = not told.mate, len(want)
        return Outcome(case, off, status, told.reasons, token, logit, live, within, self.length)

    # -- a store with the prefix, and the fault in it ---------------------------------------------

    def _store(self, case: Case, directory: pathlib.Path) -> PrefixStore:
        disk = dict(disk_dir=directory, disk_bytes=PLENTY) if case.moment == kinds.DISK else {}
        identity = self.identity_of_other if _is_old(case) else self.identity
        return PrefixStore(self.spec, identity, host_bytes=PLENTY, **disk)

    def _publish(self, store: PrefixStore, case: Case) -> None:
        natural = case.guard == kinds.IDENTITY  # theirs is stored, and nothing of ours
        states = self.states_of_other if natural else self.states
        tenant = FOREIGN if natural and case.kind == kinds.FOREIGN else ""
        points = tuple(x for x in states if x % self.spec.granularity == 0)
        for length in points:
            told = store.publish(self.prompt, states[length], tenant=tenant, points=points)
            if length <= self.length and not (told.checkpoint or not store.geometry.checkpoint):
                raise RuntimeError(f"a bench publishes what is right, but {told.reasons}")
        if _is_old(case):
            store.advance_epoch(self.identity)

    @contextlib.contextmanager
    def _under(self, case: Case, store: PrefixStore) -> Iterator[None]:
        """The fault happens inside: now, before the restore, or after it."""
        if case.guard == kinds.IDENTITY:
            yield
            return
        if case.moment in (kinds.HOST, kinds.DISK):
            self.injector.damage(case, store)
            yield
            return
        real, done = store.restore, False

        def restore(lease, cache: Cache, row: int = 0) -> Cache:
            nonlocal done
            first, done = not done and lease.resumable_length == self.length, True
            if first and case.moment == kinds.FETCH:
                self.injector.damage(case, store)
            cache = real(lease, cache, row=row)
            if first and case.moment == kinds.ROW:
                cache = self.injector.damage_row(case, cache, row)
            return cache

        store.restore = restore
        try:
            yield
        finally:
            del store.restore

    # -- serving -----------------------------------------------------------------------------------

    def _compiled(self, capacity: int) -> tuple[Rows, Rows]:
        """With the checks in their calls, and another that may be traced without some."""
        made = functools.partial(
            Rows,
            self.model,
            slots=1,
            capacity=capacity,
            burst=BURST,
            keep_logits=True,
            keep_prompt_logits=True,
        )
        return made(), made()

    def _cold(self, params: Params, prompt: np.ndarray) -> dict[int, Cache]:
        """Rows at every boundary, and at the end."""
        step, size, cache = self.spec.granularity, len(prompt), self.rows.new(1)
        found, at = {}, 0
        for stop in (*range(step, size, step), size):
            while at < stop:
                _, cache, _ = self.rows.prefill(params, cache, 0, prompt, at, stop)
                at += self.rows.piece(at, stop)[0]
            found[stop] = self.rows.take(cache, 0)
        return found

    def _engine(self, store: PrefixStore | None, mode: str, rows: Rows) -> Engine:
        options = Options(
            burst=rows.burst,
            keep_logits=True,
            keep_prompt_logits=True,
            flight_timeout=0.0,
            paging=rows.paging,
            validate=rows.check,
        )
        return Engine(
            self.model,
            self.params,
            store=store,
            slots=rows.slots,
            capacity=rows.capacity,
            reuse=mode,
            options=options,
            rows=rows,
        )

    def _serve(self, store: PrefixStore | None, mode: str, rows: Rows) -> Served:
        engine = self._engine(store, mode, rows)
        (result,) = engine.generate([Request(self.prompt, self.new)])
        return engine, result

    def _answer(self, served: Served) -> _Answer:
        engine, result = served
        if result.status != FINISHED:
            raise RuntimeError(f"the request did not finish: {result.why}")
        rest = len(self.prompt) - self.length
        prompt = result.prompt_logits[-rest:]
        logits = np.concatenate([prompt, result.logits[1:]])[: self.outputs]
        return _Answer(logits.argmax(-1), logits, engine.cache)

    def _outcome(self, case: Case, off: tuple[str, ...], served: Served) -> Outcome:
        engine, result = served
        have, want = self._answer(served), self.right
        audits = tuple(f"audit: {'; '.join(x.others)}" for x in engine.breaker.failed)
        reasons = (*dict.fromkeys(y for x in result.reasons for y in _told(x)), *audits)
        token = _first(have.tokens != want.tokens)
        logit = _first((have.logits.view(np.uint32) != want.logits.view(np.uint32)).any(-1))
        live = self._live(have, want)
        if logit >= 0:
            status = TOLD if reasons else SILENT
        else:
            status = REFUSED if reasons else UNNOTICED
        return Outcome(
            case,
            off,
            status,
            reasons,
            token,
            logit,
            live,
            len(want.tokens),
            result.resumable_length,
        )

    def _live(self, have: _Answer, want: _Answer) -> bool:
        """Whether the slot afterwards differs on a live row."""
        if np.any(jax.device_get(have.row.length != want.row.length)):
            return True
        return any(int(x.row) >= 0 for x in self.rows.differ(have.row, want.row))


def _told(reason: Reason) -> Iterator[str]:
    """A reason as texts "code: component". What a call has refused is a reason per bit."""
    if reason.code != "evidence" or reason.component:
        yield f"{reason.code}: {reason.component or reason.detail}"
        return
    for one in reason.detail.split("; "):
        component, bit = one.rsplit(": ", 1)
        yield f"{code_of(bit)}: {component}"


def _is_old(case: Case) -> bool:
    """Whether what is stored is of an earlier epoch, and only the keys tell."""
    return case.kind == kinds.OLD and case.guard == kinds.IDENTITY


def _first(wrong: np.ndarray) -> int:
    return int(wrong.argmax()) if wrong.any() else -1


def _histories(spec: CacheSpec) -> list[LeafSlot]:
    return [x for x in spec.slots() if isinstance(x.leaf.contract, History)]
