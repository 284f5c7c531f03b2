"""Request traces: one record, a reader of Mooncake's format, and a calibrated generator.

A trace says how long prompts were and which blocks they share, never what was in them.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from experiments import config_checks
from hetero_kv.prefix.keys import Keys

MOONCAKE_BLOCK = 512  # tokens
KINDS = ("conversation", "agent")


@dataclasses.dataclass(frozen=True)
class Request:
    """One request. `block_ids` are chained: equal ids stand for equal prefixes.

    They cover the prompt; the last one may stand for a part of a block.
    """

    arrival_s: float
    n_in: int  # tokens of the prompt
    n_out: int
    block_ids: tuple[int, ...]
    block_size: int = MOONCAKE_BLOCK  # tokens
    session: int = -1  # -1: unknown
    turn: int = 0

    def keys(self, partial: bool) -> Keys:
        """Keys as the store knows them.

        partial: a last part of a block counts as a whole one, and the last token need not be
        computed: the definition of published hit ratios. Otherwise as a store sees the prompt.
        """
        blocks = len(self.block_ids) if partial else self.n_in // self.block_size
        length = blocks * self.block_size + 1 if partial else self.n_in
        keys = tuple(x.to_bytes(8, "little") for x in self.block_ids[:blocks])
        return Keys(b"trace", b"", keys, keys, length)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. digest: of all that is in them."""

    name: str
    requests: tuple[Request, ...]
    digest: str

    @classmethod
    def of(cls, name: str, requests: Iterable[Request]) -> "Trace":
        """Sorts by arrival and digests."""
        ordered = tuple(sorted(requests, key=lambda x: x.arrival_s))
        if not ordered:
            raise ValueError(f"the trace {name} has no requests")
        if len({x.block_size for x in ordered}) > 1:
            raise ValueError(f"the trace {name} mixes block sizes")
        total = hashlib.sha256()
        for request in ordered:
            total.update(repr(dataclasses.astuple(request)).encode())
        return cls(name, ordered, total.hexdigest())

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.requests[0].block_size

    def unique_blocks(self) -> int:
        """Distinct ids."""
        return len({x for r in self.requests for x in r.block_ids})


def load(path: str, limit: int = 0) -> Trace:
    """Reads a file of Mooncake's format; `limit` > 0 keeps the first so many requests.

    Raises:
        ValueError: the file is missing, or a line has another form; it names the line.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"trace={path}: no such file")
    with file.open() as lines:
        found = [
            _mooncake(line, f"{path}:{number}")
            for number, line in enumerate(itertools.islice(lines, limit or None), 1)
            if line.strip()
        ]
    return Trace.of(file.stem, found)


def _mooncake(line: str, where: str) -> Request:
    try:
        values = json.loads(line)
        request = Request(
            values["timestamp"] / 1e3,
            int(values["input_length"]),
            int(values["output_length"]),
            tuple(int(x) for x in values["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: not a request with timestamp, input_length, output_length and hash_ids: "
            f"{error!r}"
        ) from error
    need = -(-request.n_in // request.block_size)
    if request.n_in < 1 or len(request.block_ids) != need or min(request.block_ids) < 0:
        raise ValueError(f"{where}: {request.n_in} tokens need {need} ids >= 0, there are "
                         f"{len(request.block_ids)}")  # fmt: skip
    return request


def refine(trace: Trace, factor: int) -> Trace:
    """The same prompts in blocks `factor` times as small; what is shared stays as it is.

    Raises:
        ValueError: the block size is no multiple of `factor`.
    """
    if factor < 1 or trace.block_size % factor:
        raise ValueError(f"blocks of {trace.block_size} tokens are not cut by {factor=}")
    size = trace.block_size // factor

    def cut(request: Request) -> Request:
        ids = (x * factor + part for x in request.block_ids for part in range(factor))
        ids = tuple(itertools.islice(ids, -(-request.n_in // size)))
        return dataclasses.replace(request, block_ids=ids, block_size=size)

    return Trace.of(f"{trace.name}, blocks of {size}", map(cut, trace.requests))


def save(trace: Trace, path: str) -> None:
    """Writes Mooncake's format."""
    with pathlib.Path(path).open("w") as out:
        for x in trace.requests:
            values = {
                "timestamp": round(x.arrival_s * 1e3),
                "input_length": x.n_in,
                "output_length": x.n_out,
                "hash_ids": list(x.block_ids),
            }
            out.write(json.dumps(values) + "\n")


@dataclasses.dataclass(kw_only=True)
class GeneratorConfig:
    """A trace like a published one, without its data.

    conversation: one shared first block; sessions whose turns extend each other. agent: a few hot
    system prompts, then what nobody shares, and sessions on top. Defaults reproduce the statistics
    of Mooncake's conversation trace; tests state how closely.
    """

    kind: str = "conversation"  # of KINDS
    requests: int = 12_031
    seconds: float = 3_537.0  # what would arrive later is cut off
    seed: int = 0
    follow: float = 0.257  # probability that a first turn is followed by another
    turns: float = 0.576  # the same for later turns
    first_median: float = 5_360.0  # tokens of a first prompt
    first_sigma: float = 1.18
    more_median: float = 604.0  # tokens that a later turn adds
    more_sigma: float = 1.92
    gap_median_s: float = 145.0
    gap_sigma: float = 1.19  # p90 over median = exp(1.28 sigma)
    hot_prompts: tuple[int, ...] = (12, 7, 5)  # blocks of each system prompt (agent)
    longest: int = 126_000  # tokens

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self, "generator.")
        if self.kind not in KINDS:
            raise ValueError(f"generator.kind={self.kind!r} must be one of {KINDS}")
        if self.requests < 1 or self.seconds <= 0:
            raise ValueError(f"generator: {self.requests=} and {self.seconds=} must be positive")
        config_checks.not_empty(self, "hot_prompts")
        config_checks.at_least(self, 1, "hot_prompts", "longest")
        config_checks.above(self, 0, "first_median", "more_median", "gap_median_s")
        config_checks.at_least(self, 0, "seed", "first_sigma", "more_sigma", "gap_sigma")
        if not (0 <= self.turns < 1 and 0 <= self.follow <= 1):
            raise ValueError(f"generator: {self.turns=} and {self.follow=} are probabilities")


@dataclasses.dataclass(kw_only=True)
class TraceConfig:
    """Where a trace comes from: a file of Mooncake's format, or "" and the generator.

    limit: requests, 0: all.
    """

    path: str = ""
    limit: int = 0
    generator: GeneratorConfig = dataclasses.field(default_factory=GeneratorConfig)

    def check(self) -> None:
        """Raises ValueError where a field makes no sense, or there is no such file."""
        config_checks.at_least(self, 0, "limit")
        if not self.path:
            self.generator.check()
        elif not pathlib.Path(self.path).is_file():
            raise ValueError(f"trace={self.path}: no such file")

    def load(self) -> Trace:
        """The trace."""
        self.check()
        if self.path:
            return load(self.path, self.limit)
        config = self.generator
        if self.limit:
            config = dataclasses.replace(config, requests=min(self.limit, config.requests))
        return generate(config)


def generate(config: GeneratorConfig) -> Trace:
    """Draws a trace; equal configurations give equal traces."""
    config.check()
    rng = np.random.default_rng(config.seed)
    size, fresh = MOONCAKE_BLOCK, itertools.count(sum(config.hot_prompts) + 1)
    agent = config.kind == "agent"
    requests: list[Request] = []
    for session in itertools.count():
        if len(requests) >= config.requests:
            break
        arrival = float(rng.uniform(0, config.seconds))
        ids = _hot(config, rng) if agent else [0]
        length = len(ids) * size
        added = max(float(rng.lognormal(math.log(config.first_median), config.first_sigma)), 1.0)
        added = max(added - (0 if agent else size), 1.0)
        for turn in itertools.count():
            length = min(length + max(1, int(added)), config.longest)
            # The complete blocks of the turn before are shared; its last part was another block.
            ids += [next(fresh) for _ in range(length // size - len(ids))]
            own = ids if length % size == 0 else [*ids, next(fresh)]
            out = int(rng.integers(3, 41)) if agent else max(1, int(rng.lognormal(5.7, 0.6)))
            requests.append(Request(arrival, length, out, tuple(own), size, session, turn))
            arrival += float(rng.lognormal(math.log(config.gap_median_s), config.gap_sigma))
            going = rng.uniform() < (config.turns if turn else config.follow)
            if not going or length >= config.longest or arrival > config.seconds:
                break
            added = float(rng.lognormal(math.log(config.more_median), config.more_sigma))
    return Trace.of(f"generated {config.kind}", requests[: config.requests])


def _hot(config: GeneratorConfig, rng: np.random.Generator) -> list[int]:
    weights = 1.0 / np.arange(1, len(config.hot_prompts) + 1)
    chosen = int(rng.choice(len(weights), p=weights / weights.sum()))
    first = 1 + sum(config.hot_prompts[:chosen])
    return list(range(first, first + config.hot_prompts[chosen]))


def agent_config(**fields: object) -> GeneratorConfig:
    """The generator's form for agents: ideal hit about .59."""
    defaults = dict(
        kind="agent",
        requests=23_608,
        seconds=3_600.0,
        follow=0.146,
        turns=0.347,
        first_median=2_540.0,
        first_sigma=1.0,
        more_median=1_470.0,
        more_sigma=1.0,
        gap_sigma=1.18,
        gap_median_s=114.0,
    )
    return GeneratorConfig(**{**defaults, **fields})


def statistics_of(trace: Trace) -> dict[str, float]:
    """What traces are compared by; see the headline table of the replay report."""
    uses: collections.Counter[int] = collections.Counter()
    seen: dict[int, float] = {}
    gaps, hit_blocks, hit_tokens, any_hit = [], 0, 0, 0
    for request in trace.requests:
        hit = 0
        for block in request.block_ids:
            if block not in seen:
                break
            gaps.append(request.arrival_s - seen[block])
            hit += 1
        any_hit += bool(hit)
        hit_blocks += hit
        hit_tokens += min(hit * trace.block_size, request.n_in)
        for block in request.block_ids:
            uses[block] += 1
            seen[block] = request.arrival_s
    lengths = [x.n_in for x in trace.requests]
    reuses = sorted((x - 1 for x in uses.values()), reverse=True)
    total = sum(uses.values())
    return {
        "requests": len(trace.requests),
        "seconds": trace.requests[-1].arrival_s - trace.requests[0].arrival_s,
        "input_mean": statistics.fmean(lengths),
        "input_median": statistics.median(lengths),
        "input_p90": _quantile(lengths, 0.9),
        "blocks": total,
        "unique_blocks": len(uses),
        "ideal_blocks": hit_blocks / total,
        "ideal_tokens": hit_tokens / sum(lengths),
        "requests_with_a_hit": any_hit / len(lengths),
        "used_once": sum(x == 1 for x in uses.values()) / len(uses),
        "top_tenth_of_reuses": sum(reuses[: len(reuses) // 10]) / max(sum(reuses), 1),
        "gap_median_s": _quantile(gaps, 0.5),
        "gap_p90_s": _quantile(gaps, 0.9),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0
