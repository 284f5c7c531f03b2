"""How an engine reuses prefixes: lookup, restore, publish, audits; one mode for all requests.

Whatever the store does wrong ends here: the request is then computed cold.
"""

import random

import jax
import numpy as np

from hetero_kv.arguments import check_stands_for
from hetero_kv.audit import Audit, Breaker, Finding
from hetero_kv.bundle import FAILED, Bundles, Exhibit, Written
from hetero_kv.guard import LeakedShape
from hetero_kv.metrics import Counters
from hetero_kv.params import Params
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import weights_digest
from hetero_kv.prefix.plan import Reason
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import Handle
from hetero_kv.rows import Rows
from hetero_kv.scheduler import Entry, Run
from hetero_kv.slot_pages import NOTHING, NoRoom, PagesLost, Prefix, SlotPages
from hetero_kv.state import Cache

OFF, HASH_ONLY, VALIDATED, SHADOW = "off", "hash_only", "validated", "shadow"
MODES = (OFF, HASH_ONLY, VALIDATED, SHADOW)
WAIT_NO_MORE = 1e-6  # seconds; a store takes any timeout above 0 for "then go ahead"
SHARE = "share"  # route of a component that comes back as pages which another row holds
TRIES = 2  # of a restore into pages that are to be shared: the second plan may be a shorter one


class CacheLost(RuntimeError):
    """The cache is of no use: a failed call has taken it along, or its pages are in disorder."""


class Reuser:
    """The reuse of one engine.

    Args:
        mode: see MODES.
        share: of requests that are audited (`validated`, `hash_only`) or shadowed (`shadow`).
        floor: an error up to it is noise; 0 in the exact regime.
        breaker: reuse is off once it opens.
        flight_timeout: seconds to wait for another request that computes the same prefix.
        max_audits: unfinished audits at a time, each with two rows of its own.
        bundles: of failed audits, and of requests that ask for one.
        pages: what the slots hold.
    """

    def __init__(
        self,
        rows: Rows,
        params: Params,
        mode: str,
        store: PrefixStore | None,
        counters: Counters,
        pages: SlotPages,
        *,
        share: float,
        floor: float,
        breaker: Breaker,
        flight_timeout: float,
        max_audits: int,
        seed: int,
        bundles: Bundles | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"reuse must be one of {MODES}, got {mode!r}")
        if (store is None) != (mode == OFF):
            raise ValueError(f"reuse={mode!r} and {store=}: a store is for reuse, and only for it")
        if store is not None:
            _check_store(rows, mode, store, params)
        if not 0 <= share <= 1:
            raise ValueError(f"the share of audited or shadowed requests is 0..1, got {share}")
        self.mode, self.store, self.breaker = mode, store, breaker
        self.bundles = bundles
        self.audits: dict[Handle, Audit] = {}
        self._exhibits: dict[Handle, Exhibit] = {}  # of audits that may come to a bundle
        self.findings: list[Finding] = []  # of finished audits, not yet taken by the engine
        if pages.paged and mode == HASH_ONLY:
            raise ValueError(
                "reuse='hash_only' claims state that is not there, which pages refuse: use "
                "Options(paging=None)"
            )
        self._rows, self._params, self._counters, self._pages = rows, params, counters, pages
        self._share, self._floor, self._seed = share, floor, seed
        self._flight_timeout, self._max_audits = flight_timeout, max_audits

    @property
    def on(self) -> bool:
        """Whether anything is looked up or published."""
        return self.store is not None and not self.breaker.open

    # -- before a run --------------------------------------------------------------------------

    def ready(self, entry: Entry, now: float) -> bool:
        """Looks the prompt up. False: another request is computing its prefix; ask again."""
        if entry.cold or not self.on or entry.saved is not None:
            self.release(entry)
            return True
        try:
            if entry.lease is None:
                request = entry.request
                entry.lease = self.store.lookup(
                    entry.prompt, tenant=request.tenant, extra=request.extra
                )
                if not entry.lease.pending or self.mode == SHADOW:  # which delays nothing
                    return True
                entry.patience = now + self._flight_timeout
                self._counters.add("flight_waits_total")
            if self.store.wait(entry.lease, 0):
                return True
            if now < entry.patience:
                return False
            self._counters.add("flight_timeouts_total")
            self.store.wait(entry.lease, WAIT_NO_MORE)
        except LeakedShape:
            raise
        except Exception as error:  # whatever a store does, the request is served
            self._failed(entry, "lookup", error)
        return True

    def prefix(self, entry: Entry) -> Prefix:
        """Whose pages the entry may get by sharing when it is admitted."""
        if entry.apart or self.mode == SHADOW:
            return NOTHING
        if entry.saved is not None:
            return entry.saved.prefix
        if entry.lease is None:
            return NOTHING
        return Prefix(entry.lease.keys.keys, entry.lease.resumable_length)

    def begin(self, entry: Entry, cache: Cache) -> Cache:
        """Starts a run in the entry's slot: restored as far as the lease goes, or empty.

        Raises CacheLost if a failed restore has consumed the cache, or its pages are in disorder;
        NoRoom if pages that were to be shared have changed, and there are no others.
        """
        entry.run = Run()
        if entry.lease is None:
            if self.breaker.open:
                detail = f"off after {len(self.breaker.failed)} failed audits"
                entry.run.reasons = (Reason("", "reuse_off", 0, 0, detail),)
            return self._enter(entry, cache)
        try:
            if self.mode == SHADOW:
                self._shadow(entry)
                cache = self._enter(entry, cache)
            else:
                for _ in range(TRIES):
                    length = entry.lease.resumable_length
                    cache = self._enter(entry, cache, Prefix(entry.lease.keys.keys, length))
                    cache = self._fetch(entry, cache)
                    if not self._pages.exceeds(entry.slot, entry.lease.resumable_length):
                        break
                    cache = self._pages.leave(cache, entry.slot)
                else:
                    raise RuntimeError(f"{TRIES} plans were shortened while they were restored")
                cache = self._pages.settle(cache, entry.slot, entry.lease.resumable_length)
                self._restored(entry)
            self._describe(entry)
        except (LeakedShape, CacheLost, NoRoom):
            raise
        except Exception as error:
            self._failed(entry, "restore", error)
            if is_lost(cache):
                raise CacheLost(f"restore: {error}") from error
            cache = self._pages.fail_load(cache, entry.slot)
            return self._enter(entry, self._pages.leave(cache, entry.slot))
        if not entry.lease.leader:  # a leader's lease tells others to wait until it is released
            self.release(entry)
        if self.mode == SHADOW:
            return cache
        run = entry.run
        run.position = run.replay[0] if run.replay else run.resumable
        if run.replay:
            cache = self._stand(cache, entry.slot, run.replay)
        else:
            self._sample(entry, cache)
        return cache

    # -- during and after a run ----------------------------------------------------------------

    def advanced(self, entry: Entry, cache: Cache, count: int) -> Cache:
        """`count` prompt tokens more are in the row, the last of which ends a call."""
        run = entry.run
        if run.replay and run.position == run.replay[1]:
            run.replay = None
            self._sample(entry, cache)
            return cache
        audit = self.audits.get(entry.handle)
        # Once: a run that starts over after the one that is served may go wrong. (Only audits of
        # shadows wait for a cold row.)
        if audit is not None and audit.cold is None and run.position == audit.length:
            audit.cold = self._rows.take(cache, entry.slot)
        if run.replay or run.epoch is None or not self.on:
            return cache
        if self.mode != SHADOW or run.position > run.resumable:
            self.store.computed(count)
        if run.position in run.points and run.position < entry.size:
            self.publish(entry, cache)
            cache = self._pages.settle(cache, entry.slot)
        return cache

    def finished_prompt(self, entry: Entry, cache: Cache, logits: np.ndarray) -> Cache:
        """The whole prompt is in the row; logits f32[V] are the answer's first."""
        self.publish(entry, cache)
        self.release(entry)
        if self.on:
            cache = self._pages.settle(cache, entry.slot)
        audit = self.audits.get(entry.handle)
        if audit is not None:
            audit.served = logits
        elif entry.request.bundle:  # nothing was resumed
            self._bundle(Exhibit.of(self._rows.spec, entry, 0, None), None, served=logits)
        return cache

    def publish(self, entry: Entry, cache: Cache) -> None:
        """Publishes what the row holds of the prompt, if it was begun under the store's eyes."""
        run, request = entry.run, entry.request
        if run.epoch is None or run.replay or not self.on:
            return
        try:
            self.store.publish(
                entry.prompt,
                cache,
                row=entry.slot,
                tenant=request.tenant,
                extra=request.extra,
                points=run.points,
                epoch=run.epoch,
            )
        except LeakedShape:
            raise
        except Exception as error:
            self._failed(entry, "publish", error, release=False)

    def release(self, entry: Entry) -> None:
        """Gives the lease back, whatever state it is in."""
        lease, entry.lease, entry.patience = entry.lease, None, None
        if lease is not None:
            lease.release()

    def leave(self, entry: Entry) -> None:
        """The entry leaves its slot or the queue: no lease, and no audit that cannot end."""
        self.release(entry)
        audit = self.audits.get(entry.handle)
        if audit is not None and audit.served is None:
            audit.dropped = True
            del self.audits[entry.handle]
            self._exhibits.pop(entry.handle, None)
            self._counters.add("audits_total", outcome="dropped")

    # -- audits --------------------------------------------------------------------------------

    def audit(self) -> bool:
        """One piece of audit work; False: there is none to do now."""
        found = next((x for x in self.audits.values() if x.ready), None)
        if found is None:
            return False
        self._counters.add("audit_tokens_total", found.advance(self._params))
        if found.finding is not None:
            del self.audits[found.handle]
            self.findings.append(found.finding)
            exhibit = self._exhibits.pop(found.handle, None)
            if exhibit and (exhibit.entry.request.bundle or not found.finding.ok):
                logits = dict(served=found.served, recomputed=found.recomputed)
                self._bundle(exhibit, found.finding, **logits)
            self._counters.add("audits_total", outcome="same" if found.finding.ok else "differs")
            if not found.finding.ok:
                self.breaker.failed.append(found.finding)
        return True

    # -- inside --------------------------------------------------------------------------------

    def _enter(self, entry: Entry, cache: Cache, prefix: Prefix = NOTHING) -> Cache:
        """The slot starts over at length 0, with all pages that the entry can come to need."""
        try:
            return self._pages.enter(
                cache,
                entry.slot,
                entry.handle.number,
                entry.tokens,
                prefix,
                share=not entry.apart,
            )
        except PagesLost as error:
            raise CacheLost(str(error)) from error

    def _fetch(self, entry: Entry, cache: Cache) -> Cache:
        """What the lease promises, into the slot; but for what it shares already."""
        held = self._pages.held_blocks(entry.slot)
        if not held:
            return self.store.restore(entry.lease, cache, row=entry.slot)
        return self.store.restore(entry.lease, cache, row=entry.slot, held=held)

    def _describe(self, entry: Entry) -> None:
        """What the lease has come to, into the run."""
        run, lease = entry.run, entry.lease
        run.candidate, run.resumable = lease.candidate_length, lease.resumable_length
        run.approximate = lease.approximate
        run.routes, run.reasons = dict(lease.routes), lease.reasons
        run.shared = self._pages.shared(entry.slot)
        run.routes |= {name: SHARE for name, count in run.shared.items() if count}
        run.epoch = lease.epoch
        run.points = () if self.mode == HASH_ONLY else lease.checkpoint_points

    def _restored(self, entry: Entry) -> None:
        run, lease = entry.run, entry.lease
        run.replay, run.brought = lease.replay, lease.brought
        replayed = run.replay[1] - run.replay[0] if run.replay else 0
        run.reused = lease.resumable_length - replayed
        self._counters.add("prompt_tokens_total", run.reused, how="reused")

    def _stand(self, cache: Cache, row: int, replay: tuple[int, int]) -> Cache:
        start, stop = replay
        exact = start == 0 or stop - start >= self._rows.spec.replay_tokens(stop)
        return self._rows.stand(cache, row, start, start if exact else 0)

    def _sample(self, entry: Entry, cache: Cache) -> None:
        """The row stands where it was resumed: maybe audit that."""
        run = entry.run
        if run.resumable and not run.approximate and self._chosen(entry):
            held = self._rows.take(cache, entry.slot)
            self.audits[entry.handle] = self._audit(entry, run.resumable, held)

    def _shadow(self, entry: Entry) -> None:
        """Restores into a row of its own; the answer comes from the cold path."""
        lease = entry.lease
        if not lease.resumable_length or lease.approximate or not self._chosen(entry):
            return
        held = self.store.restore(lease, self._rows.new(1), row=0)
        if not lease.resumable_length:
            return
        if lease.replay:
            held = self._stand(held, 0, lease.replay)
        self.audits[entry.handle] = self._audit(
            entry, lease.resumable_length, held, shadow=True, replay=lease.replay
        )

    def _audit(self, entry: Entry, length: int, held: Cache, **options: object) -> Audit:
        handle, prompt = entry.handle, entry.prompt
        if self.bundles is not None:
            about = entry, length, held, options.get("replay")
            exhibit = self.bundles.take(self._rows.spec, *about)
            if exhibit is None:
                self._note_bundle(entry, self.bundles.last)
            else:
                self._exhibits[handle] = exhibit
        return Audit(self._rows, handle, prompt, length, held, floor=self._floor, **options)

    def _bundle(self, exhibit: Exhibit, finding: Finding | None, **logits: np.ndarray) -> None:
        if self.bundles is None:
            return
        made = self.bundles.write(
            self._rows, self.store, exhibit, finding, mode=self.mode, **logits
        )
        self._note_bundle(exhibit.entry, made)

    def _note_bundle(self, entry: Entry, made: Written) -> None:
        """What became of a bundle; what went wrong is told to its request, if that still runs."""
        self._counters.add("bundles_total", outcome=made.outcome)
        if made.outcome == FAILED:
            error = made.reason.partition(":")[0]
            self._counters.add("bundle_failures_total", error=error)
            entry.notes.append(Reason("", "bundle_failed", 0, 0, made.reason))

    def _chosen(self, entry: Entry) -> bool:
        if entry.handle in self.audits:
            return False
        draw = random.Random(f"{self._seed} {entry.handle.number}").random()
        if draw >= self._share and not (entry.request.bundle and self.bundles):
            return False
        if len(self.audits) >= self._max_audits:
            self._counters.add("audits_total", outcome="skipped")
            return False
        return True

    def _failed(self, entry: Entry, call: str, error: Exception, release: bool = True) -> None:
        self._counters.add("store_failures_total", call=call)
        entry.notes.append(Reason("", f"{call}_failed", 0, 0, repr(error)))
        if release:
            entry.cold = True
            try:
                self.release(entry)
            except Exception:  # the store is in no state to take it back; its pins are its own
                self._counters.add("store_failures_total", call="release")
            entry.run = Run()


def _check_store(rows: Rows, mode: str, store: PrefixStore, params: Params) -> None:
    check_stands_for("store", store, PrefixStore, "give PrefixStore(…) or None")
    if store.closed:
        raise ValueError("the store is closed: open another, as PrefixStore(…), for this engine")
    if store.spec != rows.spec:
        raise ValueError("the store was made for another cache spec than the model's")
    identity = store.identity
    if identity.regime == "exact" and identity.batch != 1:
        raise ValueError(
            f"an engine computes prompts in calls of batch 1, the store's identity says "
            f"{identity.batch=}: use Identity.of(…, batch=1)"
        )
    if isinstance(store, HashOnlyStore) != (mode == HASH_ONLY):
        raise ValueError(
            f"reuse={mode!r} does not go with a {type(store).__name__}: 'hash_only' takes a "
            "hetero_kv.prefix.baseline.HashOnlyStore, every other mode a PrefixStore"
        )
    if identity.weights != weights_digest(params):
        raise ValueError(
            "the store's identity was made of other weights than the engine's: make it with "
            "Identity.of(spec, params, …) of the very params in use, or call store.advance_epoch"
        )


def is_lost(cache: Cache) -> bool:
    """Whether a failed call has consumed the cache."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(cache))
