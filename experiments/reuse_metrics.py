"""From served requests to the rows of the main job's table."""

import numpy as np

from experiments.reuse_arms import Served
from experiments.reuse_requests import Request


def summarise(served: list[Served], cold: list[Served], requests: list[Request]) -> dict:
    """One mode against the cold run of the same requests.

    Fields:
        requests: number of requests.
        candidate_rate, resumable_rate: tokens matched by keys, and resumed, per prompt token.
        right: share of answers that are true (known answers), else that equal the cold run's.
        wrong_requests: requests whose answer differs from the cold run's in any token.
        token_agreement: share of answer tokens equal to the cold run's.
        bitwise_requests: requests whose question logits equal the cold run's bit for bit.
        max_logit_difference: largest absolute difference to the cold run's question logits.
        tokens_computed, tokens_replayed, tokens_reused: prompt tokens; they add up to all.
        first_token_ms_median, first_token_ms_p95: milliseconds.
        shortened_by: how often each component and reason shortened a hit.
    """
    total = sum(one.prompt_tokens for one in served)
    pairs = list(zip(served, cold, strict=True))
    agree = [np.mean(a.answer == b.answer) for a, b in pairs]
    bitwise = [a.logits.tobytes() == b.logits.tobytes() for a, b in pairs]
    right = [
        np.mean(one.answer[: len(r.truth)] == r.truth) if len(r.truth) else same
        for one, r, same in zip(served, requests, agree, strict=True)
    ]
    times = 1e3 * np.array([one.first_token_s for one in served])
    reasons: dict[str, int] = {}
    for one in served:
        for reason in one.reasons:
            reasons[reason] = reasons.get(reason, 0) + 1
    computed = sum(one.computed for one in served)
    replayed = sum(one.replayed for one in served)
    reused = sum(one.reused for one in served)
    if computed + replayed + reused != total:
        raise AssertionError(f"{computed=} + {replayed=} + {reused=} != {total=}")
    return {
        "requests": len(served),
        "candidate_rate": sum(one.candidate for one in served) / total,
        "resumable_rate": sum(one.resumable for one in served) / total,
        "right": float(np.mean(right)),
        "wrong_requests": int(sum(share < 1 for share in agree)),
        "token_agreement": float(np.mean(agree)),
        "bitwise_requests": int(sum(bitwise)),
        "max_logit_difference": float(max(np.max(np.abs(a.logits - b.logits)) for a, b in pairs)),
        "tokens_computed": computed,
        "tokens_replayed": replayed,
        "tokens_reused": reused,
        "first_token_ms_median": float(np.median(times)),
        "first_token_ms_p95": float(np.percentile(times, 95)),
        "shortened_by": dict(sorted(reasons.items())),
    }
