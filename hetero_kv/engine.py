"""Engine: many requests at once over the slots of one cache, with reuse of prefixes (DESIGN §6)."""

import math
import uuid
from collections import deque
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from hetero_kv import engine_metrics, requests, sampling
from hetero_kv.arguments import check_stands_for, check_type
from hetero_kv.audit import Breaker, last_logits
from hetero_kv.bundle import Bundles
from hetero_kv.decoding import Decoding
from hetero_kv.drafting import Drafting
from hetero_kv.guard import LeakedShape
from hetero_kv.metrics import Snapshot
from hetero_kv.options import NEVER, SAVE, Options
from hetero_kv.params import Params
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import (
    ADMITTED,
    CANCELLED,
    DECODE,
    PREFILL,
    REFUSED,
    REUSE_OFF,
    Event,
    Handle,
    Request,
    Result,
)
from hetero_kv.reusing import HASH_ONLY, SHADOW, CacheLost, Reuser
from hetero_kv.rows import Model, Rows
from hetero_kv.scheduler import Entry, Scheduler
from hetero_kv.slot_pages import NoRoom, PagesLost, SlotPages

IDLE_SECONDS = 1e-3


class Engine(Decoding):
    """Continuous batching: prompts run in chunks, between decode steps of all running rows.

    Tokens and logits of a request depend, for a given number of slots, on that request alone: not
    on batch mates, slot, arrival, reuse or preemption (bitwise, in float32).

    Args:
        model: a decoder; see `rows.Model`.
        params: its weights.
        store: for every mode but "off"; its identity says batch=1. "hash_only" takes a
            HashOnlyStore.
        slots: requests that run at a time. capacity: tokens per slot, answer included.
        reuse: "off"; "hash_only": a hash hit is reused as it is; "validated"; "shadow": lookups,
            plans and restores run for real, but every answer comes from the cold path, and both
            are compared.
        options: see Options.
        rows: compiled functions of another engine of the same model, sizes and options.

    Not thread-safe. Everything but `generate` returns at once; `step` does the work.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        store: PrefixStore | None = None,
        slots: int = 8,
        capacity: int,
        reuse: str = "validated",
        options: Options | None = None,
        rows: Rows | None = None,
    ):
        self.options = options = Options() if options is None else options
        check_type("options", options, Options, "give Options(…) or None")
        if rows is not None:
            check_stands_for("rows", rows, Rows, "give `rows` of another engine or None")
        if not hasattr(model, "stack") or not hasattr(model, "cache_spec"):
            raise ValueError(f"model is a decoder, as of models.build(…), got {model!r}")
        for name, value in (("slots", slots), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is an integer >= 1, got {value!r}")
        model.stack.check(params)
        sizes = dict(
            slots=slots,
            capacity=capacity,
            burst=options.burst,
            max_stops=options.max_stops,
            keep_logits=options.keep_logits,
            keep_prompt_logits=options.keep_prompt_logits,
            check=options.validate and reuse != HASH_ONLY,
            poison=options.debug_poison,
            paging=options.paging,
        )
        if options.drafter is not None:
            sizes["draft_tokens"] = options.draft_tokens
        self.rows = rows or Rows(model, strict=options.strict, **sizes)
        other = {x for x, value in sizes.items() if getattr(self.rows, x) != value}
        if other or self.rows.model is not model:
            raise ValueError(f"rows= were made for other {sorted(other) or 'models'}")
        self.params = params
        self.store = store
        self.counters = engine_metrics.counters()
        self.breaker = Breaker(options.audit_failures)
        self.pages = SlotPages(self.rows, self.counters, options.keep_pages)
        self.reuser = Reuser(
            self.rows,
            params,
            reuse,
            store,
            self.counters,
            self.pages,
            share=options.shadow_share if reuse == SHADOW else options.audit_share,
            floor=options.noise_floor,
            breaker=self.breaker,
            flight_timeout=options.flight_timeout,
            max_audits=options.max_audits,
            seed=options.seed,
            bundles=Bundles.of(options),
        )
        self.scheduler = Scheduler(slots, options.max_waiting, options.tenant_slots)
        self.cache = self.rows.new()
        self._vocab = model.stack.vocab
        self.drafting = None
        if options.drafter is not None:
            about = options.draft_tokens, self._vocab, self.counters
            self.drafting = Drafting(options.drafter, *about)
        self._entries: dict[Handle, Entry] = {}
        self._results: dict[Handle, Result] = {}
        self._events: list[Event] = []
        self._claimed: dict[Handle, deque[Handle]] = {}
        self._submitted = 0
        self._name = uuid.uuid4().hex  # told apart from engines of other processes too
        self._saved_bytes = 0
        self._first_token = engine_metrics.first_token_histogram(self.counters)

    # -- for whoever has requests --------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Takes a request in. One that cannot be served is refused: its result says why."""
        handle = Handle(self._submitted, self._name)
        self._submitted += 1
        self.counters.add("requests_total")
        arrival = now = self.now()
        try:
            rows = self.rows
            why = requests.problem(request, self._vocab, rows.capacity, rows.max_stops)
            prompt = np.array(request.tokens, np.int32) if not why else np.zeros(0, np.int32)
            if not why:
                why = self.pages.refusal(len(prompt) + int(request.max_new_tokens) - 1)
            if not why and request.arrival is not None:
                arrival = max(request.arrival, now)
        except (TypeError, ValueError, OverflowError) as error:
            why, prompt = f"the request is malformed: {error}", np.zeros(0, np.int32)
        if not why and self.scheduler.full:
            why = f"{len(self.scheduler.waiting)} requests are waiting, the most there may be"
        if not isinstance(request, Request):
            request = Request(prompt)  # stands for what was given, and is refused
        entry = Entry(handle, request, prompt, arrival)
        self._entries[handle] = entry
        if why:
            self._end(entry, REFUSED, why)
        else:
            self.scheduler.wait(entry)
        return handle

    def cancel(self, handle: Handle) -> bool:
        """Ends a request, wherever it is; False: it has ended already.

        Here, in `preempt` and in `result` a handle of another engine raises ValueError.
        """
        entry = self._entries.get(self._own(handle))
        if entry is None:
            return False
        self._end(entry, CANCELLED, "cancelled")
        return True

    def preempt(self, handle: Handle, save: bool = True) -> bool:
        """Sends a running request back to the queue; False: it is not in a slot.

        save: copy its state to the host, and go on there later. Otherwise its prompt runs again
        (from the store, if that has it), and its tokens are decoded again, never prefilled.
        """
        entry = self._entries.get(self._own(handle))
        if entry is None or entry.slot is None:
            return False
        self._preempt(entry, save)
        return True

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, now or later."""
        return bool(self._events) or self._at_work

    @property
    def _at_work(self) -> bool:
        """Whether there is more to do than to tell what has happened."""
        return bool(self._entries) or any(x.ready for x in self.reuser.audits.values())

    def step(self) -> list[Event]:
        """Admits, runs some prompt chunks and one decode call. What happened, in order."""
        self.counters.add("steps_total")
        self._admit()
        for _ in range(self.options.chunks_per_step):
            if not self._prefill():
                break
        self._decode()
        if self.reuser.audits and self.reuser.audit():
            self._judge()
        events, self._events = self._events, []
        return events

    def result(self, handle: Handle) -> Result | None:
        """The result of a request that has ended; it is given out once."""
        return self._results.pop(self._own(handle), None)

    def _own(self, handle: Handle) -> Handle:
        if not isinstance(handle, Handle):
            raise ValueError(f"a handle is what `submit` returns, got {handle!r}")
        if handle.engine != self._name:
            raise ValueError(f"{handle} is of another engine: ask the one that it was submitted to")
        return handle

    def generate(self, todo: Iterable[Request]) -> Iterator[Result]:
        """Serves all requests, yielding each result as the request ends.

        It goes on until the engine has nothing left to do, for others either. Several may take
        turns, and with `submit`, `step` and `cancel`: each gets the results of its own requests,
        whoever takes the steps. Events of requests that no `generate` has submitted are left to
        the next `step`. Of a generator that is closed early the requests go on.
        """
        todo, more = iter(todo), True
        mine: set[Handle] = set()
        ended: deque[Handle] = deque()
        try:
            while more or mine or self._at_work:
                while more and not self.scheduler.full:
                    request = next(todo, None)
                    more = request is not None
                    if more:
                        mine.add(self._claim(request, ended))
                self._step_for_generators()
                for _ in range(len(ended)):
                    handle = ended.popleft()
                    mine.remove(handle)
                    del self._claimed[handle]
                    result = self._results.pop(handle, None)
                    if result is not None:  # or somebody has asked for it by its handle
                        yield result
        finally:
            for handle in mine:
                del self._claimed[handle]

    def _claim(self, request: Request, ended: deque[Handle]) -> Handle:
        """Submits a request whose end is to be told to that queue."""
        handle = self.submit(request)
        self._claimed[handle] = ended
        if handle not in self._entries:  # refused at once
            ended.append(handle)
        return handle

    def _step_for_generators(self) -> None:
        """A step of which only others than generators are yet to be told."""
        before = len(self._events)
        events = self.step()
        self._events = [
            x for x in events if x.kind == REUSE_OFF or x.handle not in self._claimed
        ] + self._events
        if len(events) == before and not self.scheduler.active():
            self._idle()

    def metrics(self) -> Snapshot:
        """Counters and gauges by name; `engine_metrics.to_text` says what each means."""
        gauges = {"saved_state_bytes": self._saved_bytes, "reuse_on": int(self.reuser.on)}
        gauges["unfinished_audits"] = len(self.reuser.audits)
        gauges |= self.pages.gauges()
        return engine_metrics.snapshot(self.counters, self.scheduler, self.rows.guard, gauges)

    def problems(self) -> list[str]:
        """What is wrong with the books (rules 7 and 14); an empty list: nothing."""
        found = self.scheduler.problems()
        placed = {*self.scheduler.active(), *self.scheduler.waiting}
        if placed != set(self._entries.values()):
            found.append(f"{len(placed)} entries have a place, {len(self._entries)} exist")
        saved = sum(x.saved.nbytes for x in placed if x.saved)
        if saved != self._saved_bytes or saved > self.options.saved_bytes:
            found.append(f"{saved} bytes are saved, {self._saved_bytes} are booked")
        audits = self.reuser.audits.values()
        if any(x.served is None and x.handle not in self._entries for x in audits):
            found.append("there are audits that can never end")
        found += self.pages.problems(self.cache)
        return found + engine_metrics.token_problems(self.counters, placed)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self) -> None:
        now, may = self.now(), self.options.preempt != NEVER
        if not self.scheduler.has_room(may):
            return
        for entry in self.scheduler.arrived(now):
            if self.scheduler.place(entry, may) is None:
                continue
            if not self.reuser.ready(entry, now):
                continue
            victims = self._victims(entry, may)
            if victims is None:
                self.counters.add("page_waits_total")
                return  # nobody overtakes it, or small requests could keep it out for ever
            for victim in victims:
                self._preempt(victim, self.options.preempt == SAVE)
            self._start(entry, self.scheduler.place(entry, may)[0])

    def _victims(self, entry: Entry, may: bool) -> list[Entry] | None:
        """Who must go so that there are a slot and pages for an entry; None: it must wait."""
        _, victim = self.scheduler.place(entry, may)
        victims = [] if victim is None else [victim]
        others = [x for x in self.scheduler.below(entry) if x is not victim] if may else []
        prefix = self.reuser.prefix(entry)
        while not self.pages.fits(entry.tokens, prefix, [x.slot for x in victims]):
            if not others:
                return None
            victims.append(others.pop())
        return victims

    def _start(self, entry: Entry, slot: int) -> None:
        self.scheduler.enter(entry, slot)
        try:
            if entry.saved is not None:
                self._return(entry)
            else:
                entry.status = PREFILL
                self.cache = self.reuser.begin(entry, self.cache)
        except NoRoom as error:
            self.cache = error.cache
            self._start_over(entry, str(error))
        except (CacheLost, PagesLost) as error:
            self._recover(error, [])
        else:
            self._emit(Event(ADMITTED, entry.handle))

    def _return(self, entry: Entry) -> None:
        """From saved state."""
        saved, slot = self._drop_saved(entry), entry.slot
        entry.status = saved.status
        cache = self.pages.enter(
            self.cache,
            slot,
            entry.handle.number,
            entry.tokens,
            saved.prefix,
            share=not entry.apart,
        )
        self.cache = self.pages.settle(self.rows.put(cache, slot, saved.row), slot)

    # -- prompts -------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """One call for the first prompt in order; False: none is left to run."""
        todo = self.scheduler.prefilling()
        if not todo:
            return False
        entry, run = todo[0], todo[0].run
        start, stop = run.position, self._stop(entry)
        first = run.replay[0] if run.replay else 0
        try:
            logits, self.cache, bits = self.rows.prefill(
                self.params,
                self.cache,
                entry.slot,
                entry.prompt,
                start,
                stop,
                first=first,
                replay=run.replay is not None,
                check=not run.approximate,
                expected=self.pages.expected(entry.slot),
                brought=self.pages.brought(entry.slot, run.brought),
            )
        except LeakedShape:
            raise
        except Exception as error:
            self._broke([entry], error)
            return True
        run.brought = None
        return self._prefilled(entry, logits, bits)

    def _stop(self, entry: Entry) -> int:
        """Where the entry's next call must end at the latest."""
        run = entry.run
        if run.replay:
            return run.replay[1]
        audit = self.reuser.audits.get(entry.handle)
        meets = (audit.length,) if audit is not None and audit.shadow else ()
        ahead = [x for x in (*run.points, *meets) if run.position < x < entry.size]
        return min(ahead, default=entry.size)

    def _prefilled(self, entry: Entry, logits: jax.Array, bits: jax.Array) -> bool:
        run = entry.run
        count, _ = self.rows.piece(run.position, self._stop(entry))
        run.position += count
        run.bits.append(bits)
        if run.replay:
            run.replayed += count
        else:
            run.computed += count
        how = "replayed" if run.replay else "computed"
        self.counters.add("prompt_tokens_total", count, how=how)
        if self.rows.keep_prompt_logits and not run.replay:
            run.prompt_logits.append(np.asarray(logits)[0, :count])
        self.cache = self.reuser.advanced(entry, self.cache, count)
        if run.position < entry.size:
            return True
        bad = np.bitwise_or.reduce(np.array(jax.device_get(run.bits), np.uint32), axis=0)
        if bad.any():
            self._refused_by_check([(entry, bad)])
            return True
        self._answer(entry, last_logits(logits, count))
        return True

    def _answer(self, entry: Entry, logits: np.ndarray) -> None:
        """The prompt has run: its first token."""
        entry.run.bits.clear()
        if not np.isfinite(logits).all():
            self._not_finite([entry])
            return
        token = self.rows.pick(logits[None], sampling.stack([entry.request.sampling]))
        if not entry.emitted:
            entry.first_token_s = self.now() - entry.arrival
            self._first_token.observe(entry.first_token_s)
        self._made(entry, token, logits)
        self.cache = self.reuser.finished_prompt(entry, self.cache, logits)
        entry.status = DECODE
        self._maybe_finish(entry)

    def _idle(self) -> None:
        """Nothing runs: somebody is yet to arrive, or waits for a flight."""
        ahead = self.scheduler.next_arrival()
        left = math.inf if ahead is None else ahead - self.now()
        if self.scheduler.waiting:
            self.options.sleep(min(max(left, IDLE_SECONDS), 0.05))
