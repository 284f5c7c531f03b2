"""The cost of safety: what validators, pages and the engine around them take, side by side.

    python -m experiments.safety_cost [--config.parts=step]

Writes to the work directory: config.json, run.json, results.json (every sample), report.md,
safety_cost.png.
"""

import pathlib
import statistics
from collections.abc import Mapping

import jax
import matplotlib.figure

import models
from experiments import cli, config_tools, run_record, safety_arms
from experiments.bench import timing
from experiments.bench.report import BUSY, Table
from experiments.safety_arms import BARE, CONTIGUOUS, LEAST, PAGED, READ, UNCHECKED, WARM
from experiments.safety_config import FIRST_TOKEN, RATE, STEP, SafetyConfig


def run(config: SafetyConfig) -> dict:
    """Measures every part that the configuration names; writes results, report and figure."""
    config.check()
    workdir = pathlib.Path(config.workdir)
    run_record.write(workdir, config_tools.to_dict(config), seed=config.seed)
    model = models.build(config.model)
    params = model.prepare(jax.jit(model.init)(jax.random.key(config.seed)))
    results: dict = {
        "platform": run_record.platform_info(),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "parts": {},
    }
    for part in config.parts:
        with timing.usage() as usage:
            found = PARTS[part](config, model, params)
        results["parts"][part] = found | {"usage": usage}
        run_record.write_results(workdir, results)
    (workdir / "report.md").write_text("\n".join(x.markdown() for x in tables(results)))
    figure(results).savefig(workdir / "safety_cost.png", dpi=120)
    return results


def _step(config: SafetyConfig, model: models.Decoder, params: dict) -> dict:
    found: dict = {"samples": {}, "claims": []}
    for span in config.spans:
        samples = safety_arms.step_times(config, model, params, span)
        size = span or model.cache_spec.block
        pages = f"{config.rows} rows x {config.capacity // size} pages"
        found["samples"] |= {f"{pages}: {name}": x for name, x in samples.items()}
        found["claims"] += [
            _claim(f"validation, {pages}", samples[PAGED], samples[UNCHECKED], 1.03),
            _claim(
                f"paging, {pages}", samples[UNCHECKED], samples[f"{CONTIGUOUS}, unchecked"], 1.15
            ),
            _claim(f"both, {pages}", samples[PAGED], samples[f"{CONTIGUOUS}, unchecked"], None),
        ]
    return found


def _rate(config: SafetyConfig, model: models.Decoder, params: dict) -> dict:
    samples = safety_arms.rate_times(config, model, params)
    claims = [
        _claim(f"engine over a bare scan, {name}", samples[name], samples[BARE], 1 / 0.9)
        for name in (CONTIGUOUS, PAGED)
    ]
    return {"samples": samples, "claims": claims}


def _first_token(config: SafetyConfig, model: models.Decoder, params: dict) -> dict:
    samples, facts = safety_arms.first_token_times(config, model, params)
    name = f"warm first token, {facts['resumed']} + {facts['computed']} tokens"
    return {
        "samples": samples,
        "facts": facts,
        "claims": [
            _claim(f"{name}, over reading and prefill", samples[WARM], samples[LEAST], 1.15)
        ],
    }


PARTS = {STEP: _step, RATE: _rate, FIRST_TOKEN: _first_token}


def _claim(name: str, arm: list[float], base: list[float], goal: float | None) -> dict:
    """An arm's time over that of another: the median of the ratios, each within one turn."""
    ratios = sorted(a / b for a, b in zip(arm, base, strict=True))
    quarter = len(ratios) // 4
    return {
        "name": name,
        "milliseconds": 1e3 * statistics.median(arm),
        "base_milliseconds": 1e3 * statistics.median(base),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[quarter], ratios[-1 - quarter]],
        "turns": len(ratios),
        "goal": goal,
    }


def tables(results: Mapping) -> list[Table]:
    """One, of all claims."""
    rows, notes = [], []
    for part, found in results["parts"].items():
        busy = found["usage"]["other_cores"]
        if busy is not None and busy > BUSY:
            notes.append(f"{part}: others kept {busy:g} cores busy, measure again.")
        facts = found.get("facts")
        if facts:
            notes.append(
                f"A warm request restores {facts['restored_bytes']:,} bytes, read at "
                f"{facts['tier_mb_per_s']:,.0f} MB/s in {_median(found, READ):.2f} ms."
            )
        for x in found["claims"]:
            low, high = x["quartiles"]
            goal = "" if x["goal"] is None else f"{x['goal']:.3f}"
            verdict = "" if x["goal"] is None else ("yes" if x["ratio"] <= x["goal"] else "no")
            rows.append(
                [
                    x["name"],
                    f"{x['milliseconds']:.3f}",
                    f"{x['base_milliseconds']:.3f}",
                    f"{x['ratio']:.3f}",
                    f"{low:.3f}-{high:.3f}",
                    goal,
                    verdict,
                ]
            )
    columns = ("cost", "ms", "beside, ms", "ratio", "quartiles", "goal", "reached")
    note = "Medians of turns A B A B …; ratios within a turn. " + " ".join(notes)
    title = f"Cost of safety, {results['parameters'] / 1e6:.1f}M parameters"
    return [Table(title, columns, rows, note.strip())]


def _median(found: Mapping, arm: str) -> float:
    return 1e3 * statistics.median(found["samples"][arm])


def figure(results: Mapping) -> matplotlib.figure.Figure:
    """Times of all arms, part by part: a box per arm."""
    parts = results["parts"]
    fig = matplotlib.figure.Figure(figsize=(4.6 * len(parts), 4.2))
    for axis, (part, found) in zip(fig.subplots(1, len(parts), squeeze=False)[0], parts.items(),
                                   strict=True):  # fmt: skip
        names = list(found["samples"])
        times = [[1e3 * x for x in found["samples"][name]] for name in names]
        axis.boxplot(times, showfliers=False)
        axis.set_xticks(range(1, len(names) + 1), names, rotation=40, ha="right", fontsize=7)
        axis.set_title(part.replace("_", " "), fontsize=10)
        axis.set_ylabel("milliseconds")
        axis.set_ylim(bottom=0)
    fig.tight_layout()
    return fig


def main(config: SafetyConfig) -> None:
    """Measures and prints the table."""
    results = run(config)
    cli.show(tables(results), config.workdir)


if __name__ == "__main__":
    cli.run(main, default="configs/safety_cost.py")
