"""One size at one batch and context: this decoder and HF's on the same weights, in turns."""

import functools
import pathlib
import time
from collections.abc import Callable, Mapping

import numpy as np

from experiments.bench import arms, timing, weights
from experiments.bench.bench_config import BenchConfig
from models.config import DecoderConfig

HF = "hf"

Arms = dict[str, arms.Arm]  # by layout, and HF
Shown = Callable[[int, Mapping[str, float] | None], None]


def load(config: BenchConfig, size: str, directory: str | pathlib.Path, threads: int) -> Arms:
    """Writes random weights of a size into an empty directory, and reads them into every arm.

    Args:
      threads: Of HF; 0 leaves it out.
    """
    chosen = config.size(size)
    weights.save_random(chosen.model, directory, config.seed)
    every: Arms = {
        layout: arms.Ours(*weights.load(chosen.in_layout(layout), directory))
        for layout in chosen.layouts
    }
    if threads:
        every[HF] = arms.Reference(directory, threads)
    return every


def cell(
    config: BenchConfig, every: Arms, size: str, batch: int, context: int, shown: Shown
) -> dict:
    """Measures prefill and decode, and compares the outputs; see `runner.FIELDS`.

    Args:
      shown: Told how many of 2 * repeats rounds are done, and medians in ms.
    """
    rng = np.random.default_rng(config.seed)
    vocab = config.size(size).model.vocab_size
    tokens = rng.integers(0, vocab, (batch, context), dtype=np.int32)
    capacity = context + max(config.warm_steps + config.steps, config.check_steps)
    reference = every.get(HF)
    tried: dict = {}
    if reference is not None:
        tried = _tune_prefill(config, reference, tokens, config.size(size).model)
    last: dict[str, np.ndarray] = {}

    def prefill(name: str) -> float:
        every[name].reset(batch, capacity)
        began = time.perf_counter()
        last[name] = every[name].prefill(tokens)
        return time.perf_counter() - began

    samples = _in_turns(config, {f"{name} prefill": (prefill, name) for name in every}, 0, shown)
    for arm in every.values():
        arm.save()
    first = greedy(last[next(iter(every))])
    if reference is not None:
        tried |= _tune_decode(config, reference, first)

    def decode(name: str) -> float:
        every[name].restore()
        return step_seconds(every[name], first, config.steps, config.warm_steps)

    def scan(name: str) -> float:
        every[name].restore()
        return scan_seconds(every[name], first, config.steps, config.warm_steps)

    blocks = {}
    for name in every:
        blocks[f"{name} decode"] = (decode, name)
        if name != HF:
            blocks[f"{name} scanned"] = (scan, name)
    samples |= _in_turns(config, blocks, config.repeats, shown)
    times = {name: medians(name, samples) for name in every}
    found = {
        "part": "model",
        "size": size,
        "parameters": weights.parameter_count(config.size(size).model),
        "batch": batch,
        "context": context,
        "arms": times,
        **_compare(config, every, last, first),
        "samples": samples,
    }
    if reference is not None:
        found["hf"] = tried
        found["over_hf"] = {
            name: {
                "prefill": times[HF]["prefill_ms"] / ours["prefill_ms"],
                "decode": times[HF]["decode_ms"] / ours["decode_ms"],
                "scanned": times[HF]["decode_ms"] / ours["scanned_ms"],
            }
            for name, ours in times.items()
            if name != HF
        }
    return found


def greedy(logits: np.ndarray) -> np.ndarray:
    """The likeliest token i32[...] of logits f32[..., V]."""
    return logits.argmax(-1).astype(np.int32)


def step_seconds(arm: arms.Arm, token: np.ndarray, steps: int, warm: int = 0) -> float:
    """Seconds of a step when every token is chosen on the host.

    warm: steps before the clock starts: right after the other arm, its threads still spin and the
    processor's caches hold its weights.
    """
    token = _run(arm, token, warm)
    began = time.perf_counter()
    _run(arm, token, steps)
    return (time.perf_counter() - began) / steps


def scan_seconds(arm: arms.Ours, token: np.ndarray, steps: int, warm: int = 0) -> float:
    """Seconds of a step when all of them are one compiled call; warm as for `step_seconds`."""
    token = _run(arm, token, warm)
    began = time.perf_counter()
    arm.scan(token, steps)
    return (time.perf_counter() - began) / steps


def _run(arm: arms.Arm, token: np.ndarray, steps: int) -> np.ndarray:
    """Greedy steps; the token after them."""
    for _ in range(steps):
        token = greedy(arm.step(token))
    return token


def medians(name: str, samples: Mapping[str, list[float]]) -> dict[str, float]:
    """{"decode_ms": …} of the samples called `name decode` and so on."""
    return {
        f"{what}_ms": 1e3 * timing.median(samples[f"{name} {what}"])
        for what in ("prefill", "decode", "scanned")
        if f"{name} {what}" in samples
    }


def _in_turns(
    config: BenchConfig, blocks: Mapping[str, tuple[Callable, str]], before: int, shown: Shown
) -> dict[str, list[float]]:
    def on_round(samples: Mapping[str, list[float]]) -> None:
        rounds = len(next(iter(samples.values())))
        ms = {name: 1e3 * timing.median(values) for name, values in samples.items()}
        shown(before + rounds, ms)

    def after_pause(run: Callable, arm: str) -> float:
        time.sleep(config.pause_seconds)
        return run(arm)

    return timing.in_turns(
        {name: functools.partial(after_pause, *block) for name, block in blocks.items()},
        repeats=config.repeats,
        least_repeats=config.least_repeats,
        seconds=config.seconds,
        on_round=on_round,
    )


def _compare(
    config: BenchConfig, every: Arms, last: Mapping[str, np.ndarray], first: np.ndarray
) -> dict:
    """Logits of all arms on the greedy tokens of the first one, from the saved states."""
    leader = next(iter(every))
    fed, logits = [first], {name: [] for name in every}
    for arm in every.values():
        arm.restore()
    for _ in range(config.check_steps):
        for name, arm in every.items():
            logits[name].append(arm.step(fed[-1]))
        fed.append(greedy(logits[leader][-1]))
    every[leader].restore()
    scanned = every[leader].scan(first, config.check_steps)
    found = {
        "logit_size": float(np.abs(logits[leader]).max()),
        "scan_agrees": np.array_equal(scanned.T, fed[1:]),
    }
    if HF in every:
        theirs = np.stack(logits[HF])
        found["difference"] = {
            name: {
                "prefill": float(np.abs(last[name] - last[HF]).max()),
                "decode": float(np.abs(np.stack(logits[name]) - theirs).max()),
                "same_tokens": float((greedy(np.stack(logits[name])) == greedy(theirs)).mean()),
            }
            for name in every
            if name != HF
        }
    return found


def _tune_prefill(
    config: BenchConfig, reference: arms.Reference, tokens: np.ndarray, model: DecoderConfig
) -> dict:
    """Leaves HF with the fastest of its ways to prefill; each is tried once."""
    batch, context = tokens.shape
    sizes = [size for size in config.hf_calls if size < context] or [0]
    column = 4e-9 * batch * context * (model.n_heads + model.index_heads)  # gigabytes of scores
    fits = [size for size in sizes if column * (size or context) < config.hf_gigabytes]
    ways = [(size, experts) for size in fits or [max(sizes)] for experts in config.hf_experts]
    seconds, logits = {}, []
    reference.reset(batch, context)
    reference.prefill(tokens[:, :64])  # the first call of all is slow
    for way in ways:
        reference.call_tokens, experts = way
        reference.use_experts(experts)
        reference.reset(batch, context)
        began = time.perf_counter()
        logits.append(reference.prefill(tokens))
        seconds[way] = time.perf_counter() - began
    reference.call_tokens, experts = min(seconds, key=seconds.get)
    reference.use_experts(experts)
    return {
        "prefill": {"call_tokens": reference.call_tokens, "experts": experts},
        "prefill_tried": [
            {"call_tokens": way[0], "experts": way[1], "seconds": s} for way, s in seconds.items()
        ],
        "self_difference": max(float(np.abs(x - logits[0]).max()) for x in logits),
    }


def _tune_decode(config: BenchConfig, reference: arms.Reference, first: np.ndarray) -> dict:
    """The same for decode."""
    seconds = {}
    for experts in config.hf_experts:
        reference.use_experts(experts)
        reference.restore()
        reference.step(first)
        seconds[experts] = step_seconds(reference, first, config.steps)
    experts = min(seconds, key=seconds.get)
    reference.use_experts(experts)
    return {
        "decode": {"experts": experts},
        "decode_tried": [{"experts": name, "seconds": s} for name, s in seconds.items()],
    }
