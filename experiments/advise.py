"""Which reuse pays for a model and a trace, with the numbers behind each answer.

    python -m experiments.advise --config=configs/advise.py:v4_pro [--config.trace.path=PATH]
        [--config.prompts=TOKENS.jsonl] [--config.host_gb=64]

Writes to the work directory: config.json, run.json, results.json (`Answer`s) and report.md.
"""

import dataclasses
import json
import math
from collections.abc import Iterator

import rich.console

import models
from experiments import (
    advise_report,
    cli,
    config_tools,
    counting,
    layout,
    progress,
    replay_lib,
    run_record,
)
from experiments.advise_config import AdviseConfig
from experiments.replay_lib import Cell, Outcome
from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.policy import Flops
from models.decoder import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """verdict: yes, no, a policy's name, or unknown. why: a sentence; numbers: behind it."""

    question: str
    verdict: str
    why: str
    numbers: dict[str, float]


def flops_of(model: Decoder, near: int = 4_096, far: int = 65_536) -> Flops:
    """Operations of a token, and what each token before it adds, from two decode steps."""
    low, high = (sum(counting.decode_flops(model, n).values()) for n in (near, far))
    slope = (high - low) / (far - near)
    return Flops(low - slope * near, slope)


def fitted(config: AdviseConfig, block: int) -> Decoder:
    """The model with the trace's block; its chunk divides the block.

    Raises:
        ValueError: the block is no multiple of the model's strides.
    """
    chunk = math.gcd(config.model.chunk, block)
    return models.build(config.model.replace(block=block, chunk=chunk))


class Replays:
    """Replays of one trace under one model, in seconds saved and lost."""

    def __init__(self, config: AdviseConfig, spec: CacheSpec, flops: Flops):
        self.config, self.spec, self.flops = config, spec, flops
        self.trace = config.trace.load()
        self.keys = replay_lib.keys_of(self.trace, partial=False)

    def run(self, placement: str, gigabytes: float) -> Outcome:
        """One policy within so many bytes."""
        capacity = max(1, int(gigabytes * 1e9))
        cell = Cell(placement, self.config.order, capacity, partial=False)
        return replay_lib.replay(self.trace, self.keys, self.spec, cell, flops=self.flops)

    def seconds(self, found: Outcome, slow_bytes: int = 0) -> dict[str, float]:
        """Of all prompts: without reuse, saved by it, spent on reading."""
        config = self.config
        reading = (found.restored_bytes - slow_bytes) / config.host_bytes_per_s
        reading += slow_bytes / config.disk_bytes_per_s
        cold, saved = (x / config.flops_per_s for x in (found.prompt_flops, found.saved_flops))
        return {"cold_s": cold, "saved_s": saved, "reading_s": reading, "net_s": saved - reading}


def classical(geometry: Geometry, found: Outcome) -> Answer:
    """Does a hash hit suffice?"""
    hit = found.candidate_tokens / found.prompt_tokens
    numbers = {"hash_hit": hit, "state_components": len(geometry.checkpoint)}
    question = "Does classical reuse (a hash hit is a hit) suffice?"
    if not geometry.checkpoint:
        return Answer(question, "yes", "every cached component is kept per token", numbers)
    why = (
        f"{', '.join(geometry.checkpoint)} stand at one position only: all of the hash hits, "
        f"{hit:.1%} of prompt tokens, would be resumed without them"
    )
    return Answer(question, "no", why, numbers)


def policies(replays: Replays, done) -> tuple[dict[str, dict[str, float]], dict[str, Outcome]]:
    """Seconds and shares by placement, in host memory."""
    config = replays.config
    names = config.placements if Geometry.of(replays.spec).checkpoint else ("never",)
    table, outcomes = {}, {}
    for name in names:
        found = outcomes[name] = replays.run(name, config.host_gb)
        resumed = (found.resumable_tokens - found.replayed_tokens) / found.prompt_tokens
        shares = {
            "hash_hit": found.candidate_tokens / found.prompt_tokens,
            "resumed": resumed,
            "checkpoints": found.checkpoints,
        }
        table[name] = shares | replays.seconds(found)
        done()
    return table, outcomes


def heterogeneous(best: str, row: dict[str, float]) -> Answer:
    """Do the best policy's hits save more than they cost?"""
    share = row["net_s"] / max(row["cold_s"], 1e-12)
    why = (
        f"under {best} {row['resumed']:.1%} of prompt tokens are resumed and "
        f"{share:.1%} of prefill time is saved, reading included"
    )
    pays = "yes" if row["net_s"] > 0 else "no"
    return Answer("Does heterogeneous reuse pay?", pays, why, row)


def window_policy(best: str, table: dict[str, dict[str, float]]) -> Answer:
    """The placement that saves most."""
    order = sorted(table, key=lambda x: -table[x]["net_s"])
    why = "net seconds saved: " + ", ".join(f"{x} {table[x]['net_s']:,.1f}" for x in order)
    numbers = {x: table[x]["net_s"] for x in order}
    return Answer("Which window policy?", best, why, numbers)


def disk_tier(replays: Replays, best: str, host: Outcome) -> Answer:
    """Is what a disk adds worth reading it?"""
    config, question = replays.config, "Does the disk tier pay?"
    if not config.disk_gb:
        return Answer(question, "no", "disk_gb is 0", {})
    both = replays.run(best, config.host_gb + config.disk_gb)
    slow = max(both.restored_bytes - host.restored_bytes, 0)
    with_disk, without = replays.seconds(both, slow), replays.seconds(host)
    gain = with_disk["net_s"] - without["net_s"]
    numbers = {"gain_s": gain, "host_net_s": without["net_s"], "disk_net_s": with_disk["net_s"],
               "disk_bytes_read": slow}  # fmt: skip
    why = (
        f"{config.disk_gb:g} GB more bring {gain:+,.1f} s over the trace; {slow / 1e9:,.1f} GB "
        "are read from disk at least"
    )
    return Answer(question, "yes" if gain > 0 else "no", why, numbers)


def prompt_layout(config: AdviseConfig) -> Answer:
    """What stands in front of shared text?"""
    question = "What does the prompts' own layout forfeit?"
    if not config.prompts:
        why = "a trace of chained ids cannot tell: give token ids with prompts=FILE"
        return Answer(question, "unknown", why, {})
    found = layout.measure(prompts_of(config.prompts), config.layout_block)
    numbers = {"forfeited": found.forfeited, "tokens": found.tokens, "prefix": found.prefix,
               "anywhere": found.anywhere}  # fmt: skip
    why = (
        f"{found.anywhere / max(found.tokens, 1):.1%} of tokens stood in an earlier prompt, "
        f"{found.prefix / max(found.tokens, 1):.1%} as its beginning; put what varies last"
    )
    return Answer(question, f"{found.forfeited:.1%}", why, numbers)


def prompts_of(path: str) -> Iterator[list[int]]:
    """Token ids, a prompt a line.

    Raises:
        ValueError: a line has another form; it names the line.
    """
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield [int(x) for x in json.loads(line)["tokens"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}:{number}: not {{"tokens": [...]}}: {error!r}') from error


def run(config: AdviseConfig) -> dict:
    """Answers every question and reports.

    Raises:
        ValueError: the configuration, the trace or the prompts make no sense.
    """
    config.check()
    model = fitted(config, config.trace.load().block_size)
    values = config_tools.to_dict(config)
    seed = config.trace.generator.seed
    run_record.write(config.workdir, values, seed=seed, runner="advise")
    replays = Replays(config, model.cache_spec, flops_of(model))
    geometry = Geometry.of(model.cache_spec)
    layout_of = prompt_layout(config)  # a bad line of the file is told before the replays
    with progress.Progress(len(config.placements) + 1, title="advise") as bar:
        steps = iter(range(1, len(config.placements) + 1))
        table, outcomes = policies(replays, lambda: bar.update(next(steps)))
        best = max(table, key=lambda x: table[x]["net_s"])
        answers = [
            classical(geometry, outcomes[best]),
            heterogeneous(best, table[best]),
            window_policy(best, table),
            disk_tier(replays, best, outcomes[best]),
            layout_of,
        ]
        bar.update(len(config.placements) + 1)
    results = {
        "name": config.name,
        "trace": replays.trace.name,
        "requests": len(replays.trace.requests),
        "policies": table,
        "answers": [dataclasses.asdict(x) for x in answers],
        "config": values,
    }
    run_record.write_results(config.workdir, results)
    advise_report.exhibit(results).write(config.workdir)
    return results


def main(config: AdviseConfig) -> None:
    """Answers and shows the numbers."""
    results = run(config)
    console = rich.console.Console()
    for answer in results["answers"]:
        text = f"{answer['question']} {answer['verdict']}\n    {answer['why']}"
        console.print(text, markup=False, highlight=False)
    console.print(f"results.json and report.md are in {config.workdir}", markup=False)


if __name__ == "__main__":
    cli.run(main, default="configs/advise.py")
