"""What `levels` shows: seconds beside counted operations, a token and a request."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.figure

from experiments.bench.report import BUSY, Table, number
from experiments.exhibit import COLOURS, Claim, Exhibit, plain
from experiments.ttft_fit import median
from experiments.ttft_report import NAMES

NONE, REQUEST = "none", "request"
COUNTED = "counted operations of the same model"
FACTOR = 0.5  # of a ratio: seconds follow operations, but not to the letter


def exhibit(results: Mapping) -> Exhibit:
    """Claims, tables and figures."""
    cells, config = list(results["cells"].values()), results["config"]
    intro = (
        f"An answer of {config['answer']} tokens to prompts of growing length. none: nothing is "
        "kept between two tokens; request: a cache that dies with the request; across: what an "
        f"earlier request shares is resumed ({config['arm']}). Random weights, medians of turns, "
        f"{results['platform']['cpus']} cores, {results['platform']['backend']}."
    )
    tables = [_requests(cells), _tokens(cells)]
    return Exhibit("Levels of caching", intro, claims(cells), tables, {"levels": figure(cells)})


def _levels(cell: Mapping) -> list[str]:
    return list(cell["request_seconds"])


def _ratio(cell: Mapping, over: str, under: str) -> tuple[float, float]:
    """A request's seconds, and its operations, at one level over those at another."""
    seconds, counted = cell["request_seconds"], cell["operations"]
    return (
        median(seconds[over]) / median(seconds[under]),
        counted[over]["request"] / counted[under]["request"],
    )


def claims(cells: Sequence[Mapping]) -> list[Claim]:
    """Of the longest prompt: each level pays, by about what it saves of operations."""
    found: list[Claim] = []
    for kind in dict.fromkeys(x["kind"] for x in cells):
        of = sorted((x for x in cells if x["kind"] == kind), key=lambda x: x["prompt"])
        first, last = of[0], of[-1]
        where = f"{NAMES[kind]}, {last['prompt']:,} tokens"
        pairs = [(NONE, REQUEST), *((REQUEST, x) for x in _levels(last)[2:])]
        for over, under in pairs:
            seconds, counted = _ratio(last, over, under)
            found.append(
                Claim(name=f"Seconds of a request: {over} over {under}, {where}",
                      published=counted, found=seconds, margin=FACTOR, neutral=1, source=COUNTED)
            )  # fmt: skip
        if last is not first:
            grown = math.log2(last["prompt"] / first["prompt"])
            for name in (NONE, REQUEST):
                times = [median(x["token_seconds"][name]) for x in (first, last)]
                counted = [x["operations"][name]["token"] for x in (first, last)]
                slopes = [math.log2(x[1] / x[0]) / grown for x in (times, counted)]
                text = f"Growth of a token's seconds, power of the length: {name}, {NAMES[kind]}"
                found.append(
                    Claim(name=text, published=slopes[1], found=slopes[0], margin=0.35,
                          absolute=True, neutral=0, source=COUNTED)
                )  # fmt: skip
    return found


def _requests(cells: Sequence[Mapping]) -> Table:
    rows = []
    for cell in cells:
        for name in _levels(cell):
            seconds, counted = _ratio(cell, REQUEST, name)
            time = median(cell["request_seconds"][name])
            first = cell["first_token_seconds"].get(name)
            rows.append(
                [
                    f"{NAMES[cell['kind']]}, {cell['prompt']:,}, {name}",
                    f"{cell['shared'].get(name, 0):,}",
                    number(1e3 * time),
                    "–" if not first else number(1e3 * median(first)),
                    number(cell["operations"][name]["request"] / 1e9),
                    f"{seconds:.2f}x",
                    f"{counted:.2f}x",
                ]
            )
    busy = [x for x in cells if (x["usage"]["other_cores"] or 0) > BUSY]
    note = "Of a whole request. The last two: of a request with a cache of its own, over this one."
    if busy:
        names = ", ".join(f"{x['kind']}/{x['prompt']}" for x in busy)
        note += f" Others kept cores busy during {names}: measure again."
    columns = (
        "model, prompt, level", "resumed", "ms", "first token, ms", "10^9 operations",
        "faster than request", "by operations",
    )  # fmt: skip
    return Table("A request", columns, rows, note)


def _tokens(cells: Sequence[Mapping]) -> Table:
    rows = []
    for cell in cells:
        for name in (NONE, REQUEST):
            rows.append(
                [
                    f"{NAMES[cell['kind']]}, {cell['prompt']:,}, {name}",
                    number(1e3 * median(cell["token_seconds"][name])),
                    number(cell["operations"][name]["token"] / 1e6),
                ]
            )
    note = "Of one token more after the prompt; across requests it is that of a request's own."
    return Table("A token", ("model, prompt, level", "ms", "10^6 operations"), rows, note)


def figure(cells: Sequence[Mapping]) -> matplotlib.figure.Figure:
    """Milliseconds (left) and operations (right) by prompt, a row a model: requests and tokens."""
    kinds = list(dict.fromkeys(x["kind"] for x in cells))
    fig = matplotlib.figure.Figure(figsize=(10, 2.7 * len(kinds) + 0.3), layout="constrained")
    axes = fig.subplots(len(kinds), 4, squeeze=False)
    names = list(dict.fromkeys(x for cell in cells for x in _levels(cell)))
    for row, kind in zip(axes, kinds, strict=True):
        plain(*row)
        of = sorted((x for x in cells if x["kind"] == kind), key=lambda x: x["prompt"])
        for number_, name in enumerate(names):
            have = [x for x in of if name in x["request_seconds"]]
            style = dict(
                marker="o", markersize=3, color=COLOURS[number_ % len(COLOURS)], label=name
            )
            at = [x["prompt"] for x in have]
            row[0].plot(at, [1e3 * median(x["request_seconds"][name]) for x in have], **style)
            row[1].plot(at, [x["operations"][name]["request"] / 1e9 for x in have], **style)
            if name in (NONE, REQUEST):
                row[2].plot(at, [1e3 * median(x["token_seconds"][name]) for x in have], **style)
                row[3].plot(at, [x["operations"][name]["token"] / 1e9 for x in have], **style)
        titles = ("a request, ms", "a request, 10^9 operations", "a token, ms",
                  "a token, 10^9 operations")  # fmt: skip
        for axis, title in zip(row, titles, strict=True):
            axis.set(xscale="log", yscale="log")
            axis.set_title(f"{NAMES[kind]}: {title}", fontsize=8)
            axis.set_xticks([x["prompt"] for x in of], [f"{x['prompt']:,}" for x in of])
            axis.minorticks_off()
            axis.tick_params(labelsize=7)
        row[0].legend(fontsize=6)
    for axis in axes[-1]:
        axis.set_xlabel("prompt, tokens", fontsize=8)
    return fig
