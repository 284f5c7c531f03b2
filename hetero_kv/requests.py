"""What an engine is asked and what it answers: requests, sampling, events, results."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from hetero_kv.prefix.plan import Reason

# Where a request is. The last four are final.
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"
FINISHED, CANCELLED, REFUSED, FAILED = "finished", "cancelled", "refused", "failed"
FINAL = (FINISHED, CANCELLED, REFUSED, FAILED)

# Events that are not a final status.
ADMITTED, TOKEN, PREEMPTED, REUSE_OFF = "admitted", "token", "preempted", "reuse_off"

MAX_SEED = 2**32 - 1


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
        if not (0 <= self.temperature < float("inf")):
            return f"temperature must be finite and >= 0, got {self.temperature}"
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            return f"need top_k >= 0 and 0 < top_p <= 1, got {self.top_k=}, {self.top_p=}"
        if not 0 <= self.seed <= MAX_SEED:
            return f"seed must be in 0..{MAX_SEED}, got {self.seed}"
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt to be continued.

    tokens: i32[n], n >= 1. max_new_tokens: >= 1. stop: token ids that end the answer, each of them
    the last token of it. priority: higher goes first, and may preempt. arrival: seconds by the
    engine's clock; before them it is not admitted; None: when it is submitted. tenant, extra: as
    for `PrefixStore.lookup`.
    """

    tokens: np.ndarray
    max_new_tokens: int = 16
    stop: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    tenant: str = ""
    extra: Mapping[str, object] | None = None
    priority: int = 0
    arrival: float | None = None


@dataclasses.dataclass(frozen=True)
class Handle:
    """Names a submitted request; ascending in the order of submission."""

    number: int


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
    the first token; NaN if there was none.
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
    reasons: tuple[Reason, ...]


def problem(request: Request, vocab: int, capacity: int, max_stops: int) -> str:
    """Why a request can never be served, and what to do about it, or ""."""
    tokens = np.asarray(request.tokens)
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        return f"tokens must be i32[n] with n >= 1, got {tokens.dtype}{list(tokens.shape)}"
    if tokens.min() < 0 or tokens.max() >= vocab:
        return f"tokens must be in 0..{vocab - 1}, got {tokens.min()}..{tokens.max()}"
    if request.max_new_tokens < 1:
        return f"max_new_tokens must be >= 1, got {request.max_new_tokens}"
    need = tokens.size + request.max_new_tokens
    if need > capacity:
        return (
            f"needs {tokens.size} + {request.max_new_tokens} = {need} tokens, but a slot holds "
            f"{capacity}; ask for fewer, or make an engine with a larger capacity"
        )
    if len(request.stop) > max_stops:
        return f"has {len(request.stop)} stop ids, at most {max_stops} are possible"
    if any(not 0 <= x < vocab for x in request.stop):
        return f"stop ids must be in 0..{vocab - 1}, got {request.stop}"
    return request.sampling.problem()
