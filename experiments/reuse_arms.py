"""The reuse modes of the main job: each serves the same requests, with its own store and slot."""

import dataclasses
import functools
import time

import jax
import numpy as np

from experiments.reuse_requests import Request
from hetero_kv import state
from hetero_kv.params import Params
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from models import Decoder


@dataclasses.dataclass(frozen=True)
class Served:
    """One request as one mode served it. Lengths in tokens, times in seconds."""

    prompt_tokens: int
    candidate: int
    resumable: int
    reused: int  # tokens whose state came out of the store
    replayed: int
    computed: int  # prompt tokens that went through the model; the three add up to the prompt
    first_token_s: float  # lookup, restore, prefill and publishing on the way, until the logits
    answer: np.ndarray  # i32: the arg-max at every question token, then the decoded tokens
    logits: np.ndarray  # f32[q, V]: at the question tokens
    reasons: tuple[str, ...]  # components that shortened the hit, with the code


class Arm:
    """Serves requests one after another in one slot, as a server with a single slot would.

    The slot is never cleaned between requests: what the last one left is what `hash_only` finds.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        mode: str,
        store_bytes: int,
        policy: str,
        capacity: int,
    ):
        self.model, self.params, self.mode = model, params, mode
        self.cache = model.init_cache(batch=1, capacity=capacity)
        self.store = None
        if mode != "off":
            identity = Identity.of(model.cache_spec, params, model.config, batch=1)
            make = functools.partial(
                PrefixStore, model.cache_spec, identity, host_bytes=store_bytes
            )
            if mode == "validated":
                self.store = make(policy=policy)
            else:
                kind = "zeroed" if mode.endswith("zeroed") else "stale"
                self.store = HashOnlyStore(
                    model.cache_spec, identity, host_bytes=store_bytes, kind=kind
                )
        self._reset = jax.jit(
            functools.partial(state.reset_row, model.cache_spec), donate_argnames=("cache",)
        )

    def serve(self, request: Request, question_tokens: int, answer_tokens: int) -> Served:
        """Runs one request; measures until the logits of its last prompt token are there."""
        prompt, size = request.prompt, len(request.prompt)
        begin = time.perf_counter()
        if self.store is None:
            self.cache = self._reset(cache=self.cache, row=0)
            logits, answered = self._prefill(prompt, 0, ()), (0, 0, 0, ())
        else:
            with self.store.lookup(prompt) as lease:
                self.cache = self.store.restore(lease, self.cache)
                start, replay = lease.resumable_length, lease.replay
                replayed = replay[1] - replay[0] if replay else 0
                if replay:
                    self.cache = self.model.replay(self.params, prompt[None], self.cache, *replay)
                points = () if self.mode.startswith("hash_only") else lease.checkpoint_points
                logits = self._prefill(prompt, start, points)
                reasons = tuple(f"{r.component}: {r.code}" for r in lease.reasons)
                answered = (lease.candidate_length, start, replayed, reasons)
        logits = np.asarray(logits)[0, -question_tokens:]
        first_token = time.perf_counter() - begin
        if self.store is not None:
            self.store.publish(prompt, self.cache)
        answer = logits.argmax(-1).astype(np.int32)
        if answer_tokens:
            more, self.cache = self.model.decode_many(
                self.params, answer[-1:], self.cache, answer_tokens
            )
            answer = np.concatenate([answer, np.asarray(more)[0]])
        candidate, start, replayed, reasons = answered
        return Served(
            prompt_tokens=size,
            candidate=candidate,
            resumable=start,
            reused=start - replayed,
            replayed=replayed,
            computed=size - start,
            first_token_s=first_token,
            answer=answer,
            logits=logits,
            reasons=reasons,
        )

    def _prefill(self, prompt: np.ndarray, start: int, points: tuple[int, ...]) -> jax.Array:
        """Prefills from `start`, ending a call at every checkpoint point to publish there."""
        stops = [p for p in points if start < p < len(prompt)]
        for stop in stops:
            part = prompt[None, start:stop]
            _, self.cache = self.model.prefill(self.params, part, self.cache, logits="none")
            self.store.publish(prompt, self.cache, points=points)
            start = stop
        logits, self.cache = self.model.prefill(self.params, prompt[None, start:], self.cache)
        return logits

    def close(self) -> dict[str, int]:
        """Frees the store; its counters."""
        if self.store is None:
            return {}
        counters = self.store.metrics()
        self.store.close()
        return counters


def published_bytes(model: Decoder, documents: int, tokens: int) -> int:
    """Bytes that all documents take in validated mode: their history, one checkpoint each."""
    spec = model.cache_spec
    return documents * (tokens // spec.block * spec.block_bytes() + spec.checkpoint_bytes())
