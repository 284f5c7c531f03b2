"""One request from arrival to its first token: which call of store and model took which part."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import matplotlib.figure

from experiments.exhibit import COLOURS, plain
from experiments.shared_prefix import Served

LANES = ("lookup", "restore", "replay", "prefill", "publish")
OF_STORE = ("lookup", "restore", "publish")


@dataclasses.dataclass(frozen=True)
class Span:
    """A call. start_seconds, stop_seconds: since arrival. tokens: [first, last) of a model call."""

    lane: str
    start_seconds: float
    stop_seconds: float
    tokens: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """spans: in order. first_token_seconds: since arrival. resumed: of the prompt's `length`."""

    length: int
    resumed: int
    first_token_seconds: float
    spans: tuple[Span, ...]


class Watch:
    """Stands for an object: calls of some of its methods are waited for and noted."""

    def __init__(self, target: object, names: Sequence[str], note: Callable[..., None]):
        self._target, self._names, self._note = target, names, note

    def __getattr__(self, name: str):
        found = getattr(self._target, name)
        if name not in self._names:
            return found

        def noted(*args, **kwargs):
            began = time.perf_counter()
            made = jax.block_until_ready(found(*args, **kwargs))
            self._note(name, began, time.perf_counter(), args, kwargs)
            return made

        return noted


def record(served: Served, length: int, shared: int) -> Timeline:
    """Serves one request whose calls are watched; waiting for each makes it a little slower."""
    spans: list[Span] = []

    def note(name: str, began: float, ended: float, args: tuple, kwargs: Mapping) -> None:
        lane, tokens = name, None
        if name == "prefill":
            start, stop = args[4], args[5]
            count, _ = served.bench.rows.piece(start, stop)
            lane, tokens = "replay" if kwargs["replay"] else name, (start, start + count)
        spans.append(Span(lane, began - arrival, ended - arrival, tokens))

    plain_rows, plain_engine = served.bench.rows, served.engine
    watched = Watch(served.store, OF_STORE, note) if served.store is not None else None
    served.settle()
    try:
        served.bench.rows = Watch(plain_rows, ("prefill",), note)
        served.engine = served.engine_of(watched, clock=time.perf_counter)
        prompt = served.prompt(length, shared)
        arrival = time.perf_counter()
        result = served.finished(prompt)
    finally:
        served.bench.rows, served.engine = plain_rows, plain_engine
    return Timeline(length, result.resumable_length, result.first_token_s, tuple(spans))


def draw(timelines: Mapping[str, Mapping]) -> matplotlib.figure.Figure:
    """Timelines (`Timeline` as JSON) by name, one below the other on one axis of time.

    Bars of model calls are as wide as they took; a line marks the first token.
    """
    fig = matplotlib.figure.Figure(figsize=(8, 0.5 + 1.35 * len(timelines)), layout="constrained")
    axes = fig.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    plain(*axes)
    for axis, (name, line) in zip(axes, timelines.items(), strict=True):
        for span in line["spans"]:
            lane = LANES.index(span["lane"])
            start, stop = (1e3 * span[f"{x}_seconds"] for x in ("start", "stop"))
            axis.barh(lane, stop - start, left=start, height=0.8, color=COLOURS[lane],
                      edgecolor="white", linewidth=0.4)  # fmt: skip
        axis.axvline(1e3 * line["first_token_seconds"], color="black", linewidth=1)
        axis.set_yticks(range(len(LANES)), LANES, fontsize=7)
        axis.set_ylim(len(LANES) - 0.4, -0.6)
        share = f"{line['resumed']:,} of {line['length']:,} tokens resumed"
        axis.set_title(f"{name}: {share}", fontsize=8, loc="left")
    axes[-1].set_xlabel("milliseconds since arrival (line: first token)")
    return fig


def busy(line: Mapping) -> dict[str, float]:
    """Seconds by lane before the first token."""
    found = dict.fromkeys(LANES, 0.0)
    for span in line["spans"]:
        stop = min(span["stop_seconds"], line["first_token_seconds"])
        found[span["lane"]] += max(0.0, stop - span["start_seconds"])
    return found
