"""Trials in an engine over shared pages, beside another request: all checks on, or all off.

Faults of the moment DEVICE strike the engine's own cache, between the restore of a request and the
call that first reads it; its pages are sealed and leased by then.
"""

import contextlib
import dataclasses
import functools
import pathlib

from hetero_kv.faults import checks, kinds, resident
from hetero_kv.faults.kinds import Case
from hetero_kv.faults.trial import BURST, SILENT, TOLD, Bench, Outcome, Served, _Answer
from hetero_kv.pages.layout import Paging
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import Request, Result
from hetero_kv.reusing import OFF, VALIDATED
from hetero_kv.rows import Rows

SLOTS = 2


class PagedBench(Bench):
    """A `Bench` whose engines hold History in pages."""

    def run(self, case: Case, off: tuple[str, ...], directory: pathlib.Path) -> Outcome:
        """As `Bench.run`; off: none of the checks, or all."""
        if set(off) not in (set(), set(kinds.CHECKS)):
            raise ValueError(f"in pages all checks are on, or all are off; got {off}")
        return super().run(case, off, directory)

    @property
    def _mate(self) -> Request:
        """What runs beside: more tokens than one step gives it, so that it is still there then."""
        return Request(self.donor_prompt, max(self.new, BURST + 2))

    def _compiled(self, capacity: int) -> tuple[Rows, Rows]:
        capacity = max(capacity, len(self.donor_prompt) + self._mate.max_new_tokens)
        made = functools.partial(
            Rows,
            self.model,
            slots=SLOTS,
            capacity=capacity,
            burst=BURST,
            keep_logits=True,
            keep_prompt_logits=True,
            paging=Paging.of(self.spec, SLOTS, capacity),  # a page a block: there are two at least
        )
        return made(), made(check=False)

    def _resident(self, case: Case, off: tuple[str, ...], directory: pathlib.Path) -> Outcome:
        rows = self.blind if off else self.rows
        with (
            checks.switched_off(off, self.identity),
            contextlib.closing(self._store(case, directory)) as store,
        ):
            self._publish(store, case)
            served, mate = self._struck(case, store, rows)
        found = self._outcome(case, off, served)
        if self._same(mate, self._mate_alone):
            return found
        return dataclasses.replace(found, live=True, status=TOLD if found.reasons else SILENT)

    def _struck(self, case: Case, store: PrefixStore, rows: Rows) -> tuple[Served, Result]:
        """The request, struck once it is restored, and the one that runs beside it."""
        engine = self._engine(store, VALIDATED, rows)
        mate = engine.submit(self._mate)
        while not engine.scheduler.decoding():
            if not engine.busy:
                raise RuntimeError(f"what runs beside has ended: {engine.result(mate).status}")
            engine.step()
        handle = engine.submit(Request(self.prompt, self.new))
        engine._admit()
        ours, theirs = (engine._entries[x] for x in (handle, mate))
        if ours.slot is None or ours.run.resumable != self.length or theirs.slot is None:
            raise RuntimeError("a fault strikes a restored row beside another one")
        about = self.spec, case, self.material, engine.cache
        engine.cache = resident.damage(*about, ours.slot, theirs.slot)
        while engine.busy:
            engine.step()
        return (engine, engine.result(handle)), engine.result(mate)

    @functools.cached_property
    def _mate_alone(self) -> Result:
        (result,) = self._engine(None, OFF, self.rows).generate([self._mate])
        return result

    @staticmethod
    def _same(one: Result, two: Result) -> bool:
        same = one.tokens.tolist() == two.tokens.tolist()
        return same and one.logits.tobytes() == two.logits.tobytes()

    def _live(self, have: _Answer, want: _Answer) -> bool:
        return False  # the pages are somebody else's by now
