"""How answers are made: decode calls, and calls that verify what a drafter has guessed."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from hetero_kv import sampling
from hetero_kv.calls import Ask, Told
from hetero_kv.drafting import Drafting
from hetero_kv.endings import Endings
from hetero_kv.guard import LeakedShape
from hetero_kv.params import Params
from hetero_kv.requests import DECODE, FINISHED, TOKEN, Event, Sampling
from hetero_kv.scheduler import Entry


class Decoding(Endings):
    """The part of Engine that makes the tokens after the first. Engine fills in the attributes."""

    params: Params
    drafting: Drafting | None

    def _decode(self) -> None:
        running = self.scheduler.decoding()
        if self.drafting is None:
            steps = 1 if self.scheduler.prefilling() else self.options.burst
            self._decode_call(running, steps)
            return
        guesses = {x: guess for x in running if (guess := self.drafting.guess(x)) is not None}
        self._verify_call(guesses)
        rest = (x for x in running if x not in guesses)
        # A step at a time: what is verified when must not depend on who else is there.
        self._decode_call([x for x in rest if x.slot is not None and x.status == DECODE], 1)

    def _decode_call(self, running: list[Entry], steps: int) -> None:
        if not running:
            return
        if (told := self._all_rows(running, self.rows.decode, self._ask(running), steps)) is None:
            return
        self.counters.add("decode_calls_total")
        self._told(running, told)

    def _verify_call(self, guesses: Mapping[Entry, np.ndarray]) -> None:
        if not guesses:
            return
        running, ask = list(guesses), self._ask(list(guesses))
        ask = ask._replace(forced=np.zeros((self.rows.slots, self.rows.draft_tokens), np.int32))
        for entry, guess in guesses.items():
            ask.forced[entry.slot, : len(guess)] = guess
            ask.budget[entry.slot] = len(guess) + 1
            ask.known[entry.slot] = len(guess) if entry.cursor < len(entry.emitted) else 0
        if (told := self._all_rows(running, self.rows.verify, ask)) is None:
            return
        self.counters.add("verify_calls_total")
        for entry, guess in guesses.items():
            if not ask.known[entry.slot] and (ran := int(told.ran[entry.slot])):
                entry.pieces[entry.cursor] = ran
                self.counters.add("drafted_tokens_total", len(guess))
                self.counters.add("accepted_tokens_total", ran - 1)
        self._told(running, told)

    def _all_rows(self, running: list[Entry], call: Callable, *args: object) -> Told | None:
        """What a call for all rows told; None: it has failed, and somebody starts over."""
        try:
            told, self.cache = call(self.params, self.cache, *args)
            return jax.device_get(told)
        except LeakedShape:
            raise
        except Exception as error:
            self._broke(running, error)
            return None

    def _told(self, running: list[Entry], told: Told) -> None:
        bad = [(x, told.bits[x.slot]) for x in running if told.bits[x.slot].any()]
        wild = [x for x in running if not told.finite[x.slot]]
        for entry in running:
            self._decoded(entry, told)
        self._refused_by_check(bad)
        self._not_finite(wild)
        for entry in running:
            if entry.slot is not None and entry.status == DECODE:
                self._maybe_finish(entry)

    def _ask(self, running: list[Entry] | None = None) -> Ask:
        """For those who run; None: all who decode."""
        rows, burst = self.rows.slots, self.rows.burst
        running = self.scheduler.decoding() if running is None else running
        ask = Ask(
            length=np.zeros(rows, np.int32),
            token=np.zeros(rows, np.int32),
            index=np.zeros(rows, np.int32),
            budget=np.zeros(rows, np.int32),
            check=np.ones(rows, bool),
            forced=np.zeros((rows, burst), np.int32),
            known=np.zeros(rows, np.int32),
            stops=np.full((rows, self.rows.max_stops), -1, np.int32),
            choice=sampling.stack(
                [x.request.sampling if x in running else Sampling() for x in self.scheduler.slots]
            ),
            expected=self.pages.expected(),
        )
        for entry in running:
            r, at = entry.slot, entry.cursor
            again = entry.emitted[at : at + burst]
            ask.length[r] = entry.size + at - 1
            ask.token[r] = entry.emitted[at - 1]
            ask.index[r] = at
            ask.budget[r] = entry.request.max_new_tokens - at
            ask.check[r] = not entry.run.approximate
            ask.forced[r, : len(again)] = again
            ask.known[r] = len(again)
            ask.stops[r, : len(entry.request.stop)] = entry.request.stop
        return ask

    def _decoded(self, entry: Entry, told: Told) -> None:
        r = entry.slot
        for i in range(int(told.ran[r])):
            logits = told.logits[r, i] if self.rows.keep_logits else None
            self._made(entry, int(told.tokens[r, i]), logits)
        self.counters.add("decoded_tokens_total", int(told.ran[r]))
        if told.differs[r]:
            self.counters.add("redecode_mismatches_total")

    def _made(self, entry: Entry, token: int, logits: np.ndarray | None) -> None:
        """Token `cursor` of the answer, perhaps made before."""
        at = entry.cursor
        entry.cursor += 1
        if at < len(entry.emitted):
            # After a preemption: what was streamed stands.
            self.counters.add("redecoded_tokens_total")
            if entry.emitted[at] != token:
                self.counters.add("redecode_mismatches_total")
            return
        entry.emitted.append(token)
        if self.rows.keep_logits and logits is not None:
            entry.logits.append(np.array(logits))
        self._emit(Event(TOKEN, entry.handle, token, at))

    def _maybe_finish(self, entry: Entry) -> None:
        done = entry.cursor == len(entry.emitted) and (
            len(entry.emitted) >= entry.request.max_new_tokens
            or entry.emitted[-1] in entry.request.stop
        )
        if done:
            self._end(entry, FINISHED, "")
