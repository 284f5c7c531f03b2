"""Times prefill and replay of a model, for the costs that a store plans with."""

import statistics
import time

import jax
import numpy as np

from hetero_kv.params import Params
from models import Decoder


def measure_prefill(
    model: Decoder, params: Params, *, chunks: int = 8, repeats: int = 3, batch: int = 1
) -> dict[str, float]:
    """Seconds as `Costs` takes them: {"prefill_per_token", "prefill_per_pair", "replay_per_token"}.

    Times every chunk of a prompt of so many chunks, after a first run that compiles, and fits a
    line over the tokens before it. A replay is timed over the last chunk.

    Raises ValueError for fewer than two chunks: a slope needs two points.
    """
    if chunks < 2 or repeats < 1:
        raise ValueError(f"two chunks and one repeat at least, got {chunks=}, {repeats=}")
    size = model.cache_spec.chunk
    total = size * chunks
    tokens = np.arange(total, dtype=np.int32)[None] % model.config.vocab_size
    tokens = np.repeat(tokens, batch, axis=0)
    times: list[list[float]] = [[] for _ in range(chunks)]
    replays: list[float] = []
    for turn in range(repeats + 1):
        cache = model.init_cache(batch=batch, capacity=total)
        for i in range(chunks):
            part = tokens[:, i * size : (i + 1) * size]
            began = time.perf_counter()
            _, cache = model.prefill(params, part, cache, logits="none")
            jax.block_until_ready(cache)
            if turn:
                times[i].append(time.perf_counter() - began)
        began = time.perf_counter()
        cache = model.replay(params, tokens, cache, total - size, total)
        jax.block_until_ready(cache)
        if turn:
            replays.append(time.perf_counter() - began)
    per_token = np.array([statistics.median(x) for x in times]) / size
    middle = (np.arange(chunks) + 0.5) * size  # tokens before a chunk's token, on average
    slope = max(0.0, float(np.polyfit(middle, per_token, 1)[0]))
    return {
        "prefill_per_token": max(0.0, float(np.mean(per_token) - slope * np.mean(middle))),
        "prefill_per_pair": slope,
        "replay_per_token": statistics.median(replays) / size,
    }
