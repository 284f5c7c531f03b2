"""Ways to cut a sequence into calls, and to run a model over them."""

import numpy as np


def splits_of(length: int) -> dict[str, list[int]]:
    """Sizes of consecutive calls; -1 is a decode step of one token."""
    rng = np.random.default_rng(length)
    random: list[int] = []
    while sum(map(abs, random)) < length:
        room = length - sum(map(abs, random))
        random.append(-1 if rng.random() < 0.5 else min(int(rng.integers(1, 20)), room))
    out = {"one shot": [length], "token by token": [-1] * length, "random": random}
    for size in (1, 5, 7, 16):
        whole, rest = divmod(length, size)
        out[f"chunks of {size}"] = [size] * whole + ([rest] if rest else [])
    half = length // 2
    return out | {"prefill, then decode": [half] + [-1] * (length - half)}


def run_split(model, params, tokens: np.ndarray, split: list[int]) -> np.ndarray:
    """Logits f32[B, T, V] of consecutive calls on one cache."""
    cache = model.init_cache(batch=tokens.shape[0], capacity=tokens.shape[1])
    out, start = [], 0
    for size in split:
        if size < 0:
            logits, cache = model.decode_step(params, tokens[:, start], cache)
            out.append(np.asarray(logits)[:, None])
        else:
            logits, cache = model.prefill(params, tokens[:, start : start + size], cache)
            out.append(np.asarray(logits))
        start += abs(size)
    assert np.asarray(cache.length).tolist() == [tokens.shape[1]] * tokens.shape[0]
    return np.concatenate(out, axis=1)
