"""The replay's tables, report and figures."""

from collections.abc import Mapping

import matplotlib.figure

from experiments.bench.report import Table

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


def markdown(results: Mapping) -> str:
    """The whole report."""
    sizes = results["sizes"]
    head = [
        "# Trace replay",
        "",
        "The store's own index, plan, policies and ledger over a trace, with sizes only. "
        f"Sizes: {sizes['spec']}; {sizes['block_bytes']:,} bytes per block of "
        f"{sizes['block_tokens']} tokens, {sizes['checkpoint_bytes']:,} per checkpoint; exact "
        f"replay takes {sizes['replay_tokens']:,.0f} tokens.",
        "",
        "![figure](replay.png)",
        "",
    ]
    return "\n".join(head) + "\n" + "\n".join(x.markdown() for x in tables(results))


def figure(results: Mapping) -> matplotlib.figure.Figure:
    """Block hits by capacity per order, and effective hit against bytes per placement."""
    fig = matplotlib.figure.Figure(figsize=(10, 4))
    left, right = fig.subplots(1, 2)
    for order, cells in _by_order(results).items():
        shares = sorted(cells)
        hits = [100 * _share(cells[x], "candidate_blocks", "prompt_blocks") for x in shares]
        left.plot([100 * x for x in shares], hits, marker="o", markersize=3, label=order)
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
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    return fig
