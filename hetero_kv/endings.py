"""How requests leave their slots: preempted, at an end, or because something is wrong."""

from collections import deque

import jax
import numpy as np

from hetero_kv import validate
from hetero_kv.audit import Breaker
from hetero_kv.metrics import Counters
from hetero_kv.options import Options
from hetero_kv.prefix.plan import Reason
from hetero_kv.requests import FAILED, PREEMPTED, PREFILL, REUSE_OFF, Event, Handle, Result
from hetero_kv.reusing import Reuser, is_lost
from hetero_kv.rows import Rows
from hetero_kv.scheduler import Entry, Saved, Scheduler
from hetero_kv.slot_pages import SlotPages
from hetero_kv.state import Cache

FAILURES = 2  # runs of a request that may end by a bad verdict or an error before it fails


class Endings:
    """The part of Engine that takes requests out of slots. Engine fills in the attributes."""

    options: Options
    rows: Rows
    pages: SlotPages
    cache: Cache
    counters: Counters
    breaker: Breaker
    reuser: Reuser
    scheduler: Scheduler
    _entries: dict[Handle, Entry]
    _results: dict[Handle, Result]
    _events: list[Event]
    _claimed: dict[Handle, deque[Handle]]  # of `generate`: each puts its own in its own queue
    _saved_bytes: int

    def now(self) -> float:
        """Seconds by the engine's clock, as for `Request.arrival`."""
        return self.options.clock()

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    # -- leaving a slot ------------------------------------------------------------------------

    def _preempt(self, entry: Entry, save: bool) -> None:
        self.counters.add("preemptions_total", saved=str(save).lower())
        entry.preemptions += 1
        saved = None
        if save:
            row = jax.device_get(self.rows.take(self.cache, entry.slot))
            saved = Saved(row, entry.status, self.pages.exact(self.cache, entry.slot))
            if self._saved_bytes + saved.nbytes > self.options.saved_bytes:
                saved = None
        if saved is None:
            if entry.status == PREFILL:
                self.reuser.publish(entry, self.cache)
            self._discard(entry)
        else:
            entry.saved = saved
            self._saved_bytes += saved.nbytes
        self._vacate(entry)
        self._emit(Event(PREEMPTED, entry.handle, detail="saved" if saved else "recomputed"))

    def _vacate(self, entry: Entry) -> None:
        """Out of its slot, into the queue."""
        self.reuser.leave(entry)
        slot = entry.slot
        self.scheduler.wait(entry)
        self.cache = self.pages.leave(self.cache, slot)

    def _discard(self, entry: Entry) -> None:
        self.counters.add("discarded_tokens_total", entry.discard())

    def _drop_saved(self, entry: Entry) -> Saved:
        saved, entry.saved = entry.saved, None
        self._saved_bytes -= saved.nbytes
        return saved

    def _end(self, entry: Entry, status: str, why: str) -> None:
        self.reuser.leave(entry)
        slot = entry.slot
        self.scheduler.leave(entry)
        if slot is not None and not is_lost(self.cache):
            self.cache = self.pages.leave(self.cache, slot)
        if entry.saved is not None:
            self._drop_saved(entry)
        del self._entries[entry.handle]
        entry.status = status
        self.counters.add("ended_total", status=status)
        self.counters.add("ended_prompt_tokens_total", entry.run.tokens, status=status)
        self._results[entry.handle] = self._result(entry, status, why)
        if entry.handle in self._claimed:
            self._claimed[entry.handle].append(entry.handle)
        self._emit(Event(status, entry.handle, detail=why))

    def _result(self, entry: Entry, status: str, why: str) -> Result:
        run, keep = entry.run, self.rows
        prompt = run.prompt_logits if keep.keep_prompt_logits else []
        return Result(
            handle=entry.handle,
            status=status,
            why=why,
            tokens=np.array(entry.emitted, np.int32),
            logits=np.stack(entry.logits) if keep.keep_logits and entry.logits else None,
            prompt_logits=np.concatenate(prompt) if prompt else None,
            first_token_s=entry.first_token_s,
            total_s=self.now() - entry.arrival,
            candidate_length=run.candidate,
            resumable_length=run.resumable,
            reused_length=run.reused,
            replayed_length=run.replayed,
            computed_length=run.computed,
            discarded=entry.discarded,
            preemptions=entry.preemptions,
            approximate=run.approximate,
            routes=run.routes,
            shared_pages=run.shared,
            reasons=(*entry.notes, *run.reasons),
        )

    # -- when something is wrong ---------------------------------------------------------------

    def _refused_by_check(self, found: list[tuple[Entry, np.ndarray]]) -> None:
        """Rows whose verdict is bad have not moved: they start over."""
        for entry, bits in found:
            verdict = validate.Verdict(bits[None], np.zeros(1, bool))
            wrongs = validate.describe(self.rows.spec, verdict, 0)
            wrong = "; ".join(wrongs)
            self.counters.add("verdicts_total")
            for one in wrongs:
                component, reason = one.split(": ")
                self.counters.add("verdict_bits_total", component=component, reason=reason)
            self._again(entry, Reason("", "evidence", entry.run.resumable, 0, wrong), wrong)

    def _not_finite(self, found: list[Entry]) -> None:
        for entry in found:
            self.counters.add("nonfinite_total")
            why = "logits are not finite"
            self._again(entry, Reason("", "nonfinite", entry.run.resumable, 0, why), why)

    def _broke(self, entries: list[Entry], error: Exception) -> None:
        """A compiled call has failed."""
        self.counters.add("call_failures_total")
        if is_lost(self.cache):
            self._recover(error, entries)
            return
        for entry in entries:
            self._again(entry, Reason("", "call_failed", 0, 0, repr(error)), repr(error))

    def _recover(self, error: Exception, culprits: list[Entry]) -> None:
        """The cache went down with a failed call: everybody in a slot starts over.

        Only for `culprits`, whom the call was made for, is it a failure of their own.
        """
        self.counters.add("caches_lost_total")
        self.cache = self.rows.new()
        self.pages.clear()
        for entry in self.scheduler.active():
            reason = Reason("", "cache_lost", 0, 0, repr(error))
            if entry in culprits:
                self._again(entry, reason, repr(error))
            else:
                entry.notes.append(reason)
                self._start_over(entry, "the cache was lost")

    def _again(self, entry: Entry, reason: Reason, why: str) -> None:
        """The entry starts over, cold; or it has failed often enough.

        Once it may be planned anew instead, if it shared pages: it then gets others.
        """
        entry.notes.append(reason)
        self.pages.distrust(entry.slot)
        if any(entry.run.shared.values()) and not entry.apart:
            entry.apart = True
            self._start_over(entry, why)
            return
        entry.failures += 1
        entry.cold = True
        if entry.failures >= FAILURES:
            self._end(entry, FAILED, why)
            return
        self._start_over(entry, why)

    def _start_over(self, entry: Entry, why: str) -> None:
        self._discard(entry)
        self._vacate(entry)
        self._emit(Event(PREEMPTED, entry.handle, detail=why))

    def _judge(self) -> None:
        """Reads the findings of audits; when the breaker opens, nothing is reused any more."""
        findings, self.reuser.findings = self.reuser.findings, []
        for found in findings:
            if found.ok or len(self.breaker.failed) != self.breaker.limit:
                continue
            self.counters.add("reuse_off_total")
            self._emit(Event(REUSE_OFF, found.handle, detail=str(found)))
            for entry in self.scheduler.prefilling():
                if entry.run.reused:
                    self._start_over(entry, "reuse is off")
            for entry in self.scheduler.waiting:
                if entry.saved and entry.saved.status == PREFILL and entry.run.reused:
                    self._drop_saved(entry)
                    self._discard(entry)
