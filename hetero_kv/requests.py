"""What an engine is asked and what it answers: requests, sampling, events, results."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from hetero_kv.arguments import is_integer, is_number
from hetero_kv.prefix.plan import Reason

# Where a request is. The last four are final.
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"
FINISHED, CANCELLED, REFUSED, FAILED = "finished", "cancelled", "refused", "failed"
FINAL = (FINISHED, CANCELLED, REFUSED, FAILED)

# Events that are not a final status.
ADMITTED, TOKEN, PREEMPTED, REUSE_OFF = "admitted", "token", "preempted", "reuse_off"

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1
MAX_FLOAT = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    temperature 0: greedy. top_k: only the k most probable tokens, 0: all. top_p: of those, the
    smallest set with that probability. Token i is drawn with `fold_in(key(seed), i)`: it depends
    neither on the slot nor on batch mates nor on when the request arrived.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def problem(self) -> str:
        """What makes no sense of it, or ""."""
        if not _is_number(self.temperature) or self.temperature < 0:
            return f"temperature must be finite and >= 0, got {self.temperature!r}"
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], got {self.top_p!r}"
        if not is_integer(self.top_k) or not 0 <= self.top_k <= MAX_TOP_K:
            return f"top_k must be an integer in 0..{MAX_TOP_K}, got {self.top_k!r}"
        if not is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED:
            return f"seed must be an integer in 0..{MAX_SEED}, got {self.seed!r}"
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt to be continued.

    tokens: i32[n], n >= 1. max_new_tokens: >= 1. stop: token ids that end the answer, each of them
    the last token of it. priority: higher goes first, and may preempt. arrival: seconds by the
    engine's clock; before them it is not admitted; None: when it is submitted. tenant, extra: as
    for `PrefixStore.lookup`. bundle: it is audited whatever the share, and leaves a bundle whatever
    is found (where the engine has `Options.bundle_dir`).
    """

    tokens: np.ndarray
    max_new_tokens: int = 16
    stop: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    tenant: str = ""
    extra: Mapping[str, object] | None = None
    priority: int = 0
    arrival: float | None = None
    bundle: bool = False


@dataclasses.dataclass(frozen=True)
class Handle:
    """Names a submitted request of one engine; ascending in the order of submission.

    engine: whose; other engines refuse the handle.
    """

    number: int
    engine: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a step did.

    kind: "admitted", "token", "preempted", "finished", "cancelled", "refused", "failed", or
    "reuse_off" (of the engine: no handle). token and index: of "token", the index from 0.
    """

    kind: str
    handle: Handle | None = None
    token: int = -1
    index: int = -1
    detail: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """How a request ended. Lengths are in prompt tokens.

    status: "finished", "cancelled", "refused" or "failed"; `why` says why, where it is not
    "finished". reused + replayed + computed_length is the part of the prompt that its last run
    has gone through: all of it if the request finished. What earlier runs did in vain, because
    they were preempted, refused by a check or lost, is `discarded`.

    tokens: i32[k], the stop token included. logits: f32[k, V], those that each token was chosen
    from, if the engine keeps them. prompt_logits: f32[n - resumable, V], at the prompt tokens
    that were computed, if the engine keeps them. first_token_s: seconds from arrival to
    the first token; NaN if there was none. shared_pages: by component, pages of its last run that
    it got because another request held them (route "share"); none without `Options.paging`.
    """

    handle: Handle
    status: str
    why: str
    tokens: np.ndarray
    logits: np.ndarray | None
    prompt_logits: np.ndarray | None
    first_token_s: float
    total_s: float
    candidate_length: int
    resumable_length: int
    reused_length: int
    replayed_length: int
    computed_length: int
    discarded: int
    preemptions: int
    approximate: bool
    routes: Mapping[str, str]
    shared_pages: Mapping[str, int]
    reasons: tuple[Reason, ...]


def _is_number(value: object) -> bool:
    """Whether it is a finite real number that a float32 holds."""
    return is_number(value) and abs(value) <= MAX_FLOAT


def problem(request: Request, vocab: int, capacity: int, max_stops: int) -> str:
    """Why a request can never be served, and what to do about it, or ""."""
    if not isinstance(request, Request):
        return f"a Request is needed, got {type(request).__name__}"
    tokens = np.asarray(request.tokens)
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        return f"tokens must be i32[n] with n >= 1, got {tokens.dtype}{list(tokens.shape)}"
    if tokens.min() < 0 or tokens.max() >= vocab:
        return f"tokens must be in 0..{vocab - 1}, got {tokens.min()}..{tokens.max()}"
    count = request.max_new_tokens
    if not is_integer(count) or count < 1:
        return f"max_new_tokens must be an integer >= 1, got {count!r}"
    need = tokens.size + count
    if need > capacity:
        return (
            f"needs {tokens.size} + {count} = {need} tokens, but a slot holds "
            f"{capacity}; ask for fewer, or make an engine with a larger capacity"
        )
    if not isinstance(request.stop, tuple | list) or not all(map(is_integer, request.stop)):
        return f"stop must be a tuple of token ids, got {request.stop!r}"
    if len(request.stop) > max_stops:
        return f"has {len(request.stop)} stop ids, at most {max_stops} are possible"
    if any(not 0 <= x < vocab for x in request.stop):
        return f"stop ids must be in 0..{vocab - 1}, got {request.stop}"
    if not _is_number(request.priority):
        return f"priority must be a finite number, got {request.priority!r}"
    if request.arrival is not None and not _is_number(request.arrival):
        return f"arrival must be None or finite seconds, got {request.arrival!r}"
    if not isinstance(request.tenant, str):
        return f"tenant must be a string, got {request.tenant!r}"
    if not isinstance(request.sampling, Sampling):
        return f"sampling must be a Sampling, got {request.sampling!r}"
    return request.sampling.problem()
