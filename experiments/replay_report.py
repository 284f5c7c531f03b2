"""The replay's tables, report and figures."""

from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.figure

from experiments.bench.report import Table
from experiments.exhibit import Claim, Exhibit, plain
from experiments.replay_config import PAPER_LRU
from experiments.traces import MOONCAKE_BLOCK

FULL_WINDOWS = "windows kept for every token"


def _share(cell: Mapping, part: str, whole: str) -> float:
    return cell[part] / max(cell[whole], 1)


def _effective(cell: Mapping) -> float:
    return (cell["resumable_tokens"] - cell["replayed_tokens"]) / max(cell["prompt_tokens"], 1)


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:,.1f}"


def _of(results: Mapping, part: str) -> dict[str, Mapping]:
    return {name: x for name, x in results["cells"].items() if x["part"] == part}


def tables(results: Mapping) -> list[Table]:
    """All tables that have rows."""
    found = [
        _trace(results),
        _ideal(results),
        _eviction(results),
        _eviction_costs(results),
        _placement(results),
        _budget(results),
    ]
    return [table for table in found if table.rows]


def _trace(results: Mapping) -> Table:
    shown = [(k, v) for k, v in results["trace"].items() if k not in ("name", "digest")]
    rows = [[k.replace("_", " "), f"{v:,.3f}" if v < 1 else f"{v:,.0f}"] for k, v in shown]
    note = "gap: time since a block was last used, over all reuses."
    return Table(f"Trace: {results['trace']['name']}", ("statistic", "value"), rows, note)


def _ideal(results: Mapping) -> Table:
    rows = [
        [
            name,
            f"{_share(x, 'candidate_blocks', 'prompt_blocks'):.1%}",
            f"{_share(x, 'candidate_tokens', 'prompt_tokens'):.1%}",
            f"{_share(x, 'saved_flops', 'prompt_flops'):.1%}",
        ]
        for name, x in _of(results, "ideal").items()
    ]
    note = "Hash hits of a model without windows and tails; a last part of a block counts whole."
    return Table("Prefix hits", ("capacity", "blocks", "tokens", "FLOPs saved"), rows, note)


def _by_order(results: Mapping) -> dict[str, dict[float, Mapping]]:
    found: dict[str, dict[float, Mapping]] = {}
    for name, cell in _of(results, "eviction").items():
        _, order, share = name.split("/")
        found.setdefault(order, {})[float(share)] = cell
    return found


def _eviction(results: Mapping) -> Table:
    orders = _by_order(results)
    shares = sorted({x for cells in orders.values() for x in cells})
    rows = [
        [order]
        + [f"{_share(x[s], 'candidate_blocks', 'prompt_blocks'):.3f}" for s in shares if s in x]
        for order, x in orders.items()
    ]
    note = "Block hits by capacity (share of the distinct blocks). Victims are always leaves."
    return Table("Eviction", ("order", *(f"{x:.0%}" for x in shares)), rows, note)


def _eviction_costs(results: Mapping) -> Table:
    rows = []
    for order, cells in _by_order(results).items():
        share = max(cells)
        x = cells[share]
        rows.append(
            [
                f"{order} at {share:.0%}",
                f"{_share(x, 'candidate_tokens', 'prompt_tokens'):.3f}",
                f"{_share(x, 'saved_flops', 'prompt_flops'):.3f}",
                _gigabytes(x["written_bytes"]),
                _gigabytes(x["restored_bytes"]),
                f"{x['seconds']:.1f}",
            ]
        )
    columns = ("order", "token hits", "FLOPs saved", "GB written", "GB restored", "CPU s")
    return Table("Eviction: what it is worth", columns, rows)


def _placement(results: Mapping) -> Table:
    sizes, rows = results["sizes"], []
    for name, x in _of(results, "placement").items():
        held = x["used_history_bytes"] + x["used_checkpoint_bytes"]
        tokens = x["used_history_bytes"] / sizes["block_bytes"] * sizes["block_tokens"]
        # A window holds 128 rows; kept for every token, each adds one row a layer.
        each = sizes["block_bytes"] / sizes["block_tokens"] + sizes["checkpoint_bytes"] / 128
        hit = _share(x, "candidate_tokens", "prompt_tokens")
        rows.append(
            [
                name.partition("/")[2],
                f"{hit:.3f}",
                f"{_effective(x):.3f}",
                f"{hit - _effective(x):.3f}",
                f"{held / max(tokens, 1) / each:.3f}",
                f"{x['checkpoints']:,}",
            ]
        )
    columns = ("checkpoints", "hash hit", "effective", "recomputed", "bytes", "stored")
    note = (
        "Unlimited capacity; shares of prompt tokens. effective: resumed and not replayed; "
        f"recomputed: what the hash hit promised beyond it; bytes: over those of {FULL_WINDOWS}. "
        "every:n is a checkpoint at every n-th block and nothing else."
    )
    return Table("Checkpoint placement", columns, rows, note)


def _budget(results: Mapping) -> Table:
    rows = []
    for name, x in _of(results, "budget").items():
        _, share, placement, order = name.split("/")
        rows.append(
            [
                f"{placement}, {order}, {float(share):.0%}",
                f"{_share(x, 'candidate_tokens', 'prompt_tokens'):.3f}",
                f"{_effective(x):.3f}",
                f"{_share(x, 'saved_flops', 'prompt_flops'):.3f}",
                _gigabytes(x["written_bytes"]),
                _gigabytes(x["evicted_bytes"]),
            ]
        )
    columns = ("policy", "hash hit", "effective", "FLOPs saved", "GB written", "GB evicted")
    note = "History and checkpoints share a budget: a part of the bytes that all history takes."
    return Table("Within a budget", columns, rows, note)


def exhibit(results: Mapping) -> Exhibit:
    """Claims about published traces, tables, figure."""
    sizes = results["sizes"]
    intro = (
        "The store's own index, plan, policies and ledger over a trace, with sizes only. "
        f"Sizes: {sizes['spec']}; {sizes['block_bytes']:,} bytes per block of "
        f"{sizes['block_tokens']} tokens, {sizes['checkpoint_bytes']:,} per checkpoint; exact "
        f"replay takes {sizes['replay_tokens']:,.0f} tokens."
    )
    title = f"Trace replay: {results['trace']['name']}"
    return Exhibit(title, intro, claims(results), tables(results), {"replay": figure(results)})


# Ideal share of tokens that hit, and the shares of it that 3M and 50M tokens of cache reach
# (Mooncake, FAST'25, table 2 and fig. 9).
MOONCAKE = {"conversation": (0.40, 0.41, 1.0), "synthetic": (0.66, 0.46, 1.0)}
# Effective hit by placement as measured by hand on the same traces, unlimited capacity.
BY_HAND = {
    "conversation": {"every:4": 0.321, "every:16": 0.240, "zero": 0.215, "end": 0.350},
    "synthetic": {"every:4": 0.629, "every:16": 0.541, "zero": 0.505, "end": 0.509},
}


def claims(results: Mapping) -> list[Claim]:
    """Of D1, D2 and D6, where the trace is one of Mooncake's, whole."""
    name = results["trace"]["name"].removesuffix("_trace").removeprefix("mooncake_")
    if name not in MOONCAKE or results["trace"]["requests"] < 3_900:
        return []
    found, cells = [], results["cells"]

    def add(text: str, published: float, value: float, margin: float, source: str, **more):
        more = {"absolute": True, **more}
        found.append(
            Claim(name=text, published=published, found=value, margin=margin, source=source, **more)
        )

    paper = "Mooncake (FAST'25), table 2 and fig. 9"
    if "ideal" in cells:
        ideal = _share(cells["ideal"], "candidate_blocks", "prompt_blocks")
        add(f"D1: ideal hit, {name}", MOONCAKE[name][0], ideal, 0.05, paper, neutral=0)
        for blocks, part in zip(PAPER_LRU, MOONCAKE[name][1:], strict=True):
            cell = cells.get(f"lru at {blocks:,} blocks")
            if cell:
                share = _share(cell, "candidate_blocks", "prompt_blocks") / ideal
                text = f"D1: share of the ideal hit at {blocks * MOONCAKE_BLOCK / 1e6:.0f}M tokens"
                add(f"{text}, {name}", part, share, 0.05, paper, neutral=0)
    found += _crossover(results) if name == "conversation" else []
    for placement, published in BY_HAND[name].items():
        cell = cells.get(f"placement/{placement}")
        if cell:
            add(f"D6: effective hit, windows {placement}, {name}", published, _effective(cell),
                0.015, "a simulation of the same trace", neutral=0)  # fmt: skip
    return found


def _crossover(results: Mapping) -> list[Claim]:
    """D2: which of W-TinyLFU and LRU hits more turns over between 2 % and 10 %."""
    orders, found = _by_order(results), []
    first, second = orders.get("wtinylfu", {}), orders.get("lru", {})
    for share, published in ((0.02, 0.056), (0.1, -0.093)):
        if share in first and share in second:
            gap = [_share(x[share], "candidate_blocks", "prompt_blocks") for x in (first, second)]
            text = f"D2: hits of W-TinyLFU less those of LRU at {share:.0%} of the blocks"
            found.append(
                Claim(name=text, published=published, found=gap[0] - gap[1], margin=0.05,
                      source="a simulation of the same trace", absolute=True, neutral=0)
            )  # fmt: skip
    return found


def _crossings(results: Mapping) -> list[tuple[str, str, float, float]]:
    """Where another order comes to hit most: (until there, from there, capacity, hit), as shares.

    By straight lines between capacities, whose axis is logarithmic.
    """
    orders = _by_order(results)
    shares = sorted({x for cells in orders.values() for x in cells})
    hits = {
        name: [_share(cells[x], "candidate_blocks", "prompt_blocks") for x in shares]
        for name, cells in orders.items()
        if all(x in cells for x in shares)
    }
    found = []
    for i in range(len(shares) - 1):
        first, then = (
            (max(hits, key=lambda x: hits[x][i + k]) for k in (0, 1)) if hits else ("", "")
        )
        if first == then:
            continue
        (a0, a1), (b0, b1) = (hits[x][i : i + 2] for x in (first, then))
        part = (a0 - b0) / ((a0 - b0) + (b1 - a1))
        at = shares[i] * (shares[i + 1] / shares[i]) ** part
        found.append((first, then, at, a0 + part * (a1 - a0)))
    return found


def _mark_crossings(
    axis: matplotlib.axes.Axes, crossings: Sequence[tuple[str, str, float, float]]
) -> None:
    for first, then, share, hit in crossings:
        axis.axvline(100 * share, color="grey", linestyle=":", linewidth=1)
        axis.annotate(f"{first} | {then}", (100 * share, 100 * hit), fontsize=7, ha="center",
                      xytext=(0, 14), textcoords="offset points")  # fmt: skip


def figure(results: Mapping) -> matplotlib.figure.Figure:
    """Block hits by capacity per order, and effective hit against bytes per placement.

    Dotted: where another order of eviction comes to hit most.
    """
    fig = matplotlib.figure.Figure(figsize=(10, 4))
    left, right = fig.subplots(1, 2)
    plain(left, right)
    for order, cells in _by_order(results).items():
        shares = sorted(cells)
        hits = [100 * _share(cells[x], "candidate_blocks", "prompt_blocks") for x in shares]
        left.plot([100 * x for x in shares], hits, marker="o", markersize=3, label=order)
    _mark_crossings(left, _crossings(results))
    if left.lines:
        left.set_xscale("log")
        left.legend(fontsize=7)
    left.set_xlabel("capacity, % of distinct blocks")
    left.set_ylabel("block hits, %")
    for name, cell in _of(results, "placement").items():
        held = cell["used_history_bytes"] + cell["used_checkpoint_bytes"]
        right.scatter(held / 1e9, 100 * _effective(cell), s=12, color="#0072B2")
        right.annotate(
            name.partition("/")[2],
            (held / 1e9, 100 * _effective(cell)),
            fontsize=7,
            xytext=(3, 3),
            textcoords="offset points",
        )
    right.set_xlabel("GB held, unlimited capacity")
    right.set_ylabel("prompt tokens resumed without replay, %")
    fig.tight_layout()
    return fig
