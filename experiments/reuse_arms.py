"""The reuse modes of the main job: each serves the same requests, with its own store and slot."""

import dataclasses
import functools

import numpy as np

import hetero_kv
from experiments.reuse_requests import Request
from hetero_kv import Engine, Options
from hetero_kv.params import Params
from hetero_kv.prefix.baseline import HashOnlyStore
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import FINISHED
from models import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
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
    """Serves requests one after another through an engine with a single slot.

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
        self.store, reuse = None, mode.removesuffix("_zeroed")
        if mode != "off":
            identity = Identity.of(model.cache_spec, params, model.config, batch=1)
            make = functools.partial(PrefixStore, policy=policy)
            if reuse == "hash_only":
                kind = "zeroed" if mode.endswith("zeroed") else "stale"
                make = functools.partial(HashOnlyStore, kind=kind)
            self.store = make(model.cache_spec, identity, host_bytes=store_bytes)
        self.engine = Engine(
            model,
            params,
            store=self.store,
            slots=1,
            capacity=capacity,
            reuse=reuse,
            options=Options(keep_prompt_logits=True),
        )

    def serve(self, request: Request, question_tokens: int, answer_tokens: int) -> Served:
        """Runs one request; its time ends when the logits of its last prompt token are there."""
        ask = hetero_kv.Request(request.prompt, 1 + answer_tokens)
        (result,) = self.engine.generate([ask])
        if result.status != FINISHED:
            raise RuntimeError(f"the request has {result.status}: {result.why}")
        logits = result.prompt_logits[-question_tokens:]
        return Served(
            prompt_tokens=len(request.prompt),
            candidate=result.candidate_length,
            resumable=result.resumable_length,
            reused=result.reused_length,
            replayed=result.replayed_length,
            computed=result.computed_length,
            first_token_s=result.first_token_s,
            answer=np.concatenate([logits[:-1].argmax(-1).astype(np.int32), result.tokens]),
            logits=logits,
            reasons=tuple(f"{r.component}: {r.code}" for r in result.reasons),
        )

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
