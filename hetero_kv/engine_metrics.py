"""What an engine counts, what each name means, and the token ledger (DESIGN rule 14).

Prompt tokens are counted where they run, or where a restore has delivered them:

    reused + replayed + computed == prompt tokens of requests that ended (as far as they came)
                                    + what runs that were given up had gone through
                                    + what requests in slots have gone through
"""

from collections.abc import Iterable, Mapping

from hetero_kv import metrics
from hetero_kv.guard import Guard
from hetero_kv.metrics import Counters, Family, Histogram, Number, Snapshot
from hetero_kv.requests import DECODE, FINAL, PREFILL
from hetero_kv.scheduler import Entry, Scheduler

NAMESPACE = "hetero_kv_engine_"
HOW = ("reused", "replayed", "computed")
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

_COUNTERS = {
    "requests_total": "Requests submitted.",
    "ended_total": "Requests that ended, by status.",
    "steps_total": "Steps.",
    "prompt_tokens_total": "Prompt tokens, by how their state came about.",
    "ended_prompt_tokens_total": "Prompt tokens that ended requests had gone through, by status.",
    "discarded_tokens_total": "Prompt tokens of runs that were given up and begun again.",
    "decode_calls_total": "Decode calls, each of up to `burst` steps.",
    "decoded_tokens_total": "Tokens that decode calls made, those made again included.",
    "verify_calls_total": "Calls that verified drafts.",
    "drafted_tokens_total": "Drafted tokens that were verified.",
    "accepted_tokens_total": "Drafted tokens that were accepted.",
    "drafts_refused_total": "Drafts that were too long or no tokens, and drafters that raised.",
    "redecoded_tokens_total": "Tokens of answers that were made again after a preemption.",
    "redecode_mismatches_total": "Tokens that came out otherwise the second time.",
    "preemptions_total": "Preemptions, by whether saving was asked for.",
    "flight_waits_total": "Requests that waited for another one to compute their prefix.",
    "flight_timeouts_total": "Requests that waited for that too long.",
    "store_failures_total": "Calls of the store that raised, by call; the request ran cold.",
    "call_failures_total": "Compiled calls that raised.",
    "caches_lost_total": "Caches that failed calls have consumed.",
    "verdicts_total": "Rows that a call refused because their state or their pages were wrong.",
    "verdict_bits_total": "What was wrong with them, by component and reason.",
    "shared_pages_total": "Pages that requests got because others held them, by component.",
    "revived_pages_total": "Of these, pages that were kept and of no request, by component.",
    "dropped_pages_total": "Kept pages that had to go so that a request could be admitted.",
    "corrupt_pages_total": "Pages that were not shared because their bytes had changed.",
    "page_waits_total": "Steps in which a request found a slot, but too few pages.",
    "nonfinite_total": "Answers given up because logits were not finite.",
    "audits_total": "Audits, by outcome.",
    "bundles_total": "Bundles of audits and requests, by outcome; see Engine.reuser.bundles.last.",
    "bundle_failures_total": "Bundles that could not be written, by error.",
    "audit_tokens_total": "Tokens that ran for audits.",
    "reuse_off_total": "Times that failed audits have switched reuse off.",
}
_GAUGES = {
    "waiting_requests": "Requests in the queue.",
    "prefilling_requests": "Requests whose prompt runs.",
    "decoding_requests": "Requests whose answer is being made.",
    "free_slots": "Slots without a request.",
    "pages": "Pages of the device pools, by component and state.",
    "saved_state_bytes": "State of preempted requests in host memory.",
    "unfinished_audits": "Audits under way.",
    "reuse_on": "1: prefixes are looked up and published.",
    "compiles": "Compiled functions, by the static-graph guard.",
    "leaked_shapes": "Compiles beyond one per function and bucket.",
}
FAMILIES: Mapping[str, Family] = {
    **{name: Family("counter", text) for name, text in _COUNTERS.items()},
    **{name: Family("gauge", text) for name, text in _GAUGES.items()},
    "first_token_seconds": Family("histogram", "Seconds from arrival to the first token."),
}


def counters() -> Counters:
    """Of an engine."""
    return Counters(NAMESPACE)


def first_token_histogram(found: Counters) -> Histogram:
    """Time to first token."""
    return found.histogram("first_token_seconds", FIRST_TOKEN_BOUNDS)


def snapshot(
    found: Counters, scheduler: Scheduler, guard: Guard, more: Mapping[str, Number]
) -> Snapshot:
    """All counters and gauges at this moment."""
    active = scheduler.active()
    gauges = {
        "waiting_requests": len(scheduler.waiting),
        "prefilling_requests": sum(x.status == PREFILL for x in active),
        "decoding_requests": sum(x.status == DECODE for x in active),
        "free_slots": scheduler.slots.count(None),
        "compiles": sum(guard.counts.values()),
        "leaked_shapes": sum(x - 1 for x in guard.leaks.values()),
        **more,
    }
    return found.snapshot() | found.named(gauges)


def to_text(found: Mapping[str, Number]) -> str:
    """The Prometheus text format of `Engine.metrics()`."""
    return metrics.to_text(found, FAMILIES, NAMESPACE)


def token_problems(found: Counters, placed: Iterable[Entry]) -> list[str]:
    """Whether the tokens add up; an empty list: they do."""
    went = sum(found.get("prompt_tokens_total", how=x) for x in HOW)
    ended = sum(found.get("ended_prompt_tokens_total", status=x) for x in FINAL)
    kept = ended + found.get("discarded_tokens_total") + sum(x.run.tokens for x in placed)
    if went == kept:
        return []
    return [f"{went} prompt tokens were run or reused, but {kept} are accounted for"]
