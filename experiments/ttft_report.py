"""What `ttft` shows: claims, times by hit, break-even, the surface, timelines."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.colors
import matplotlib.figure
import numpy as np

from experiments import timeline, ttft_fit
from experiments.bench.report import BUSY, Table, number
from experiments.exhibit import COLOURS, Claim, Exhibit, plain
from experiments.ttft_fit import median

D5 = "a linear and a quadratic part of prefill; thresholds are this project's"
NAMES = {"hybrid": "hybrid", "full": "full attention"}
RISE = 0.05  # of the cold time: what may be noise in a curve that should fall
BENT, STRAIGHT = 0.2, 0.2  # see `_bends`


def exhibit(results: Mapping) -> Exhibit:
    """Claims, tables and figures."""
    cells = list(results["cells"].values())
    config = results["config"]
    intro = (
        "One request at a time through the engine, random weights; a hit is a request whose first "
        "tokens were those of an earlier request, which ended there. Arms are a window policy and "
        "the tier that prefixes come from; off has no store. Medians of turns A B A B … over all "
        f"arms and hits; {results['platform']['cpus']} cores, {results['platform']['backend']}."
    )
    figures = {"ttft_curves": curves(cells), "ttft_surface": surface(cells)}
    lines = {
        f"{NAMES[kind]}, {arm}, {way}": line
        for kind, arms in results["timelines"].items()
        for arm, ways in list(arms.items())[: 3 if kind == "hybrid" else 1]
        for way, line in ways.items()
        if way == "warm" or arm == next(iter(arms))
    }
    if lines:
        figures["request_timeline"] = timeline.draw(lines)
    return Exhibit(
        "Time to the first token",
        intro,
        claims(cells),
        [_times(cells, config["hits"]), _pays(cells), _parts(results["timelines"])],
        figures,
    )


def _points(cell: Mapping, arm: str) -> list[tuple[int, float, Mapping]]:
    """(shared tokens, median seconds, the row), each length once, ascending."""
    found = {x["shared"]: (x["shared"], median(x["seconds"]), x) for x in cell["arms"][arm]}
    return [found[x] for x in sorted(found)]


def _warm(cell: Mapping, arm: str) -> tuple[list[int], list[float]]:
    """Lengths that were resumed, and their times."""
    points = [(x, y) for x, y, row in _points(cell, arm) if row["resumed"]]
    return [x for x, _ in points], [y for _, y in points]


def _fit(cell: Mapping, arm: str) -> ttft_fit.Fit | None:
    return ttft_fit.fit(cell["prompt"], *_warm(cell, arm))


def _counted_bend(cell: Mapping) -> float | None:
    """That of the operations which are computed."""
    (rows,) = list(cell["arms"].values())[:1]
    at = {x["shared"]: cell["operations"][str(x["hit"])] for x in rows}
    made = ttft_fit.fit(cell["prompt"], list(at), list(at.values()))
    return made.bend if made else None


def _break_even(cell: Mapping, arm: str) -> float | None:
    lengths, values = _warm(cell, arm)
    return ttft_fit.break_even(lengths, values, median(cell["off_seconds"]), _fit(cell, arm))


def claims(cells: Sequence[Mapping]) -> list[Claim]:
    """Of the longest prompt of each model."""
    found: list[Claim] = []
    longest = {x["kind"]: x for x in sorted(cells, key=lambda x: x["prompt"])}
    for kind, cell in longest.items():
        where = f"{NAMES[kind]}, {cell['prompt']:,} tokens"
        cold = median(cell["off_seconds"])
        for arm in cell["arms"]:
            rise = ttft_fit.largest_rise([y for _, y, _ in _points(cell, arm)])
            found.append(
                Claim(name=f"D5: TTFT falls with the hit: largest rise, {arm}, {where}",
                      published=0, found=rise / cold, margin=RISE, absolute=True, source=D5,
                      note="share of the cold time")
            )  # fmt: skip
        first, *_ = cell["arms"]
        if _warm(cell, first)[0]:
            best = min(_warm(cell, first)[1])
            found.append(
                Claim(name=f"D5: cold over the longest hit, {first}, {where}", published=2,
                      found=cold / best, margin=0, relation="at least", neutral=1, source=D5)
            )  # fmt: skip
            even = _break_even(cell, first)
            share = 1.0 if even is None else even / cell["prompt"]
            found.append(
                Claim(name=f"D5: break-even hit, {first}, {where}", published=0, found=share,
                      margin=0.1, absolute=True, source="reading is cheaper than computing",
                      note="share of the prompt from which on a hit pays")
            )  # fmt: skip
    return found + _bends(longest)


def _bends(longest: Mapping[str, Mapping]) -> list[Claim]:
    """Full attention's saving is convex in the hit, the hybrid's nearly linear."""
    found = []
    bends = {}
    for kind, cell in longest.items():
        made = _fit(cell, next(iter(cell["arms"])))
        if made is not None:
            bends[kind] = made.bend
    for kind, bend in bends.items():
        cell, counted = longest[kind], _counted_bend(longest[kind])
        note = f"counted operations bend by {counted:.2f}"
        name = f"D5: share of computing that is quadratic, {NAMES[kind]}, {cell['prompt']:,} tokens"
        if kind == "full":
            found.append(
                Claim(name=name, published=BENT, found=bend, margin=0, relation="at least",
                      neutral=0, source=D5, note=note)
            )  # fmt: skip
        else:
            found.append(
                Claim(name=name, published=0, found=bend, margin=STRAIGHT, absolute=True,
                      source=D5, note=note)
            )  # fmt: skip
    if len(bends) == 2:
        found.append(
            Claim(name="D5: quadratic share, full attention less hybrid", published=0.1,
                  found=bends["full"] - bends["hybrid"], margin=0, relation="at least",
                  absolute=True, neutral=0, source=D5)
        )  # fmt: skip
    return found


def _times(cells: Sequence[Mapping], hits: Sequence[float]) -> Table:
    rows = []
    for cell in cells:
        for arm, of in cell["arms"].items():
            by_hit = {x["hit"]: x for x in of}
            values = [number(1e3 * median(by_hit[hit]["seconds"])) for hit in hits]
            name = f"{NAMES[cell['kind']]}, {arm}, {cell['prompt']:,}"
            rows.append([name, number(1e3 * median(cell["off_seconds"])), *values])
    busy = [x for x in cells if (x["usage"]["other_cores"] or 0) > BUSY]
    note = "Hits are rounded down to a resumable length. off: without a store."
    if busy:
        names = ", ".join(f"{x['kind']}/{x['prompt']}" for x in busy)
        note += f" Others kept cores busy during {names}: measure again."
    columns = ("model, arm, prompt", "off", *(f"{hit:.0%}" for hit in hits))
    return Table("Milliseconds to the first token, by hit", columns, rows, note)


def _pays(cells: Sequence[Mapping]) -> Table:
    rows = []
    for cell in cells:
        cold, counted = median(cell["off_seconds"]), _counted_bend(cell)
        for arm in cell["arms"]:
            points = _points(cell, arm)
            made, even = _fit(cell, arm), _break_even(cell, arm)
            length, seconds, row = points[-1]
            saved = cold - seconds
            slowest = row["bytes"] / saved / 1e6 if saved > 0 and row["resumed"] else None
            rows.append(
                [
                    f"{NAMES[cell['kind']]}, {arm}, {cell['prompt']:,}",
                    f"{median(points[0][2]['seconds']) / cold:.2f}x",
                    f"{cold / seconds:.1f}x",
                    "never" if even is None else f"{even:,.0f} ({even / cell['prompt']:.0%})",
                    number(row["bytes"] / max(length, 1) / 1e3),
                    number(slowest),
                    "–" if made is None else f"{made.bend:.2f}",
                    "–" if counted is None else f"{counted:.2f}",
                ]
            )
    columns = (
        "model, arm, prompt", "cold over off", "off over longest hit", "pays from", "KB a token",
        "MB/s at least", "quadratic", "of operations",
    )  # fmt: skip
    note = (
        "cold over off: what publishing costs a request that hits nothing. pays from: resumed "
        "tokens from which on a hit takes no longer than off. KB a token: read at the longest hit. "
        "MB/s at least: a tier slower than that would not pay there. quadratic: share of computing "
        "that grows with the square of the prompt, fitted to the times, and to counted operations."
    )
    return Table("Restoring against computing", columns, rows, note)


def _parts(timelines: Mapping[str, Mapping]) -> Table:
    rows = []
    for kind, arms in timelines.items():
        for arm, ways in arms.items():
            for way, line in ways.items():
                spent = timeline.busy(line)
                rest = line["first_token_seconds"] - sum(spent.values())
                values = [*spent.values(), rest, line["first_token_seconds"]]
                rows.append(
                    [f"{NAMES[kind]}, {arm}, {way}", f"{line['resumed']:,}",
                     *(f"{1e3 * x:.2f}" for x in values)]
                )  # fmt: skip
    columns = ("model, arm", "resumed", *timeline.LANES, "engine", "first token")
    note = "Milliseconds of one request, every call waited for; engine: what is in none of them."
    return Table("One request, part by part", columns, rows, note)


def curves(cells: Sequence[Mapping]) -> matplotlib.figure.Figure:
    """Milliseconds by hit for every model and prompt; bars from quartile to quartile."""
    kinds = list(dict.fromkeys(x["kind"] for x in cells))
    prompts = sorted({x["prompt"] for x in cells})
    fig = matplotlib.figure.Figure(
        figsize=(2.7 * len(prompts) + 0.6, 2.5 * len(kinds) + 0.4), layout="constrained"
    )
    axes = fig.subplots(len(kinds), len(prompts), squeeze=False)
    arms = list(dict.fromkeys(arm for cell in cells for arm in cell["arms"]))
    for cell in cells:
        axis = axes[kinds.index(cell["kind"]), prompts.index(cell["prompt"])]
        plain(axis)
        for arm in cell["arms"]:
            points = _points(cell, arm)
            at = [100 * x / cell["prompt"] for x, _, _ in points]
            middle = [1e3 * y for _, y, _ in points]
            bars = [[1e3 * q for q in ttft_fit.quartiles(r["seconds"])] for _, _, r in points]
            below = [max(0.0, m - low) for m, (low, _) in zip(middle, bars, strict=True)]
            above = [max(0.0, high - m) for m, (_, high) in zip(middle, bars, strict=True)]
            colour = COLOURS[arms.index(arm) % len(COLOURS)]
            axis.errorbar(at, middle, yerr=[below, above], marker="o", markersize=3, capsize=2,
                          linewidth=1, color=colour, label=arm)  # fmt: skip
        axis.axhline(1e3 * median(cell["off_seconds"]), color="black", linestyle=":", linewidth=1,
                     label="off")  # fmt: skip
        axis.set_title(f"{NAMES[cell['kind']]}, {cell['prompt']:,} tokens", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("hit, % of the prompt", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms to the first token", fontsize=8)
        axis.legend(fontsize=6)
    return fig


def surface(cells: Sequence[Mapping]) -> matplotlib.figure.Figure:
    """By hit and prompt length: time over that without a store, and the line where it pays."""
    panels = list(dict.fromkeys((x["kind"], arm) for x in cells for arm in x["arms"]))
    across = min(4, len(panels))
    down = math.ceil(len(panels) / across)
    fig = matplotlib.figure.Figure(
        figsize=(2.7 * across + 0.9, 2.3 * down + 0.3), layout="constrained"
    )
    axes = fig.subplots(down, across, squeeze=False).ravel()
    norm = matplotlib.colors.Normalize(-4, 4)  # log2: 16 times faster to 16 times slower
    image = None
    for axis, (kind, arm) in zip(axes, panels, strict=False):
        of = sorted((x for x in cells if x["kind"] == kind), key=lambda x: x["prompt"])
        hits = [x["hit"] for x in of[0]["arms"][arm]]
        ratio = np.array(
            [
                [median(x["seconds"]) / median(cell["off_seconds"]) for x in cell["arms"][arm]]
                for cell in of
            ]
        )
        image = axis.imshow(np.log2(ratio), norm=norm, cmap="PuOr_r", aspect="auto",
                            origin="lower")  # fmt: skip
        for (y, x), value in np.ndenumerate(ratio):
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6)
        even = [_break_even(cell, arm) for cell in of]
        line = [
            (np.interp((e or 0.0) / cell["prompt"], hits, range(len(hits))), y)
            for y, (cell, e) in enumerate(zip(of, even, strict=True))
            if e is not None
        ]
        axis.plot([x for x, _ in line], [y for _, y in line], color="black", marker="|",
                  markersize=10, linewidth=1)  # fmt: skip
        axis.set_xticks(range(len(hits)), [f"{100 * x:.0f}" for x in hits], fontsize=7)
        axis.set_yticks(range(len(of)), [f"{x['prompt']:,}" for x in of], fontsize=7)
        axis.set_title(f"{NAMES[kind]}, {arm}", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[: len(panels)]:
        axis.set_xlabel("hit, %", fontsize=7)
        axis.set_ylabel("prompt, tokens", fontsize=7)
    bar = fig.colorbar(image, ax=list(axes[: len(panels)]), fraction=0.025, pad=0.01)
    bar.set_ticks([-4, -2, 0, 2, 4], labels=["1/16", "1/4", "1", "4", "16"])
    bar.set_label("over off; black: where it pays from", fontsize=7)
    return fig
