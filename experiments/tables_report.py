"""What `tables` shows: a claim per published figure, tables, curves."""

from collections.abc import Mapping

import matplotlib.figure

import models
from experiments import anatomy
from experiments.bench.report import Table
from experiments.exhibit import COLOURS, Claim, Exhibit, plain

NAMES = {
    "v3_2": "DeepSeek-V3.2",
    "v4_pro": "DeepSeek-V4-Pro",
    "v4_flash": "DeepSeek-V4-Flash",
    "gqa8": "GQA, 8 heads, 61 layers",
}
V4_REPORT = "DeepSeek-V4 report, fig. 1"
GIB = 1 << 30


def exhibit(results: Mapping) -> Exhibit:
    """Claims, tables and figures."""
    return Exhibit(
        "Counted tables",
        "Bytes are those of cache pytrees (`state.abstract`) of the models' own configurations; "
        "packed rows (`cache_layouts`) have the sizes of serving kernels. Raw rows of "
        "compressors (tails) and position counters, which published sizes leave out, are included. "
        "The last figure is the cache of a small model.",
        _claims(results),
        [_sizes(results), _operations(results), _mixes(results), _allocator(results),
         _prices(results)],
        {
            "kv_by_length": _curve(results),
            "cache_parts": _parts(results),
            "cache_anatomy": _anatomy(results["config"]["anatomy_length"]),
        },
    )  # fmt: skip


def _total(results: Mapping, convention: str, name: str) -> float:
    return sum(results["operations"][convention][name].values())


def _claims(results: Mapping) -> list[Claim]:
    kv, found = results["kv"], []
    convention = results["config"]["convention"]
    at_million = results["config"]["context"] == 1 << 20
    base = kv["v3_2"]["packed_total"]

    def add(name: str, published: float, value: float, margin: float, source: str, **more):
        claim = Claim(
            name=name, published=published, found=value, margin=margin, source=source, **more
        )
        found.append(claim)

    if at_million:
        for name, published in (("v4_pro", 9.5), ("v4_flash", 13.7)):
            ratio = base / kv[name]["packed_total"]
            text = f"A1: KV of V3.2 over {NAMES[name]}, 2^20 tokens"
            add(text, published, ratio, 0.02, V4_REPORT, neutral=1)
        pro = kv["v4_pro"]
        bf16 = pro["bf16_total"] / GIB
        add("A1: KV of V4-Pro in bf16, GiB", 9.62, bf16, 0.005, "vLLM's note on V4")
        share = 100 * pro["packed_total"] / kv["gqa8"]["bf16_total"]
        add("A2: KV of V4-Pro, % of bf16 GQA-8", 2.0, share, 0.1, "HF's note on V4 (secondary)",
            absolute=True)  # fmt: skip
        for name, published in (("v4_pro", 3.7), ("v4_flash", 9.8)):
            ratio = _total(results, convention, "v3_2") / _total(results, convention, name)
            text = f"A3: operations of V3.2 over {NAMES[name]} a token, 2^20 tokens"
            add(text, published, ratio, 0.2, V4_REPORT, neutral=1, note=f"counted {convention}")
    ratios = results["ratios"]
    if results["config"]["ratio_context"] == 131_072:
        add("A4: all global over 5:1, W = 1,024, 128k", 5.77, ratios["mixes"]["5:1"]["1024"], 0.005,
            "1 / (1/6 + 5/6 · 1/128); Gemma 3 (arXiv 2503.19786), fig. 6", neutral=1)  # fmt: skip
        mimo = ratios["mimo"]
        add("A5: all global over MiMo-V2-Flash's mix, first layer aside", 6,
            mimo["first layer aside"], 0.05, "MiMo-V2-Flash, “nearly 6x” (secondary)", neutral=1,
            note=f"with the first layer {mimo['whole']:.2f}")  # fmt: skip
    for name in ("v4_flash", "v4_pro"):
        ratio = kv[name]["window_bytes_per_token"] / kv[name]["packed_per_token"]
        add(f"A7: windows of every token over compressed KV, {NAMES[name]}", 8, ratio, 1,
            "DeepSeek-V4 report, on-disk strategies: “about 8”", absolute=True)  # fmt: skip
    for name, wanted, relation in (("5:1, W = 1,024", 1.3, "at least"), ("all full", 1, "equal")):
        arms = results["allocator"][name]
        gain = arms["lcm"]["concurrency"] / arms["uniform"]["concurrency"]
        add(f"A6: requests at a time, LCM pages over one block table, {name}", wanted, gain, 0.02,
            "Jenga (SOSP'25): up to 4.9x throughput", relation=relation, neutral=1)  # fmt: skip
    if results["config"]["hit"] == 0.374:
        prices = results["prices"]
        for name, published in (("V4-Flash", 0.37), ("V2", 0.34)):
            if name in prices:
                add(f"A8: cost of prompts saved at 37.4 % hits, {name}'s prices", published,
                    prices[name]["saved"], 0.005, prices[name]["as_of"], absolute=True)  # fmt: skip
    return found


def _sizes(results: Mapping) -> Table:
    rows, kv = [], results["kv"]
    for name, row in kv.items():
        small = row.get("packed_total")
        rows.append(
            [
                NAMES[name],
                f"{row['bf16_total'] / GIB:,.2f}",
                f"{row['bf16_per_token']:,.1f}",
                f"{small / 1e9:,.3f}" if small else "",
                f"{row['packed_per_token']:,.1f}" if small else "",
                f"{kv['v3_2']['packed_total'] / small:.3f}" if small else "",
                f"{row['window_bytes_per_token'] / row['packed_per_token']:.2f}" if small else "",
            ]
        )
    columns = (
        "model", "GiB, bf16", "bytes a token, bf16", "GB, packed", "bytes a token, packed",
        "V3.2 over it", "windows over entries",
    )  # fmt: skip
    note = (
        f"One sequence of {results['config']['context']:,} tokens. Packed rows: 584 bytes (448 "
        "FP8, 64 BF16, 8 of scales), index keys 68 (128 FP4, 4 of scales); V3.2 656 and 132."
    )
    return Table("Cache bytes", columns, rows, note)


def _operations(results: Mapping) -> Table:
    rows, counted = [], [x for of in results["operations"].values() for x in of.values()]
    kinds = [x for x in counted[0] if any(parts[x] for parts in counted)]
    for convention, of in results["operations"].items():
        for name, parts in of.items():
            ratio = _total(results, convention, "v3_2") / sum(parts.values())
            cells = [f"{parts[x] / 1e12:.4f}" for x in kinds]
            rows.append([f"{NAMES[name]}, {convention}", *cells,
                         f"{sum(parts.values()) / 1e12:.4f}", f"{ratio:.2f}"])  # fmt: skip
    columns = ("model, convention", *kinds, "all", "V3.2 over it")
    note = (
        "10^12 operations of one decode step: products with weights (experts that are picked; no "
        "lookup), index scores, attention over visible and picked rows; a multiply-add is two. "
        "fp4_half: V4's FP4 index scores count half, as in FP8 equivalents."
    )
    return Table("Operations", columns, rows, note)


def _mixes(results: Mapping) -> Table:
    mixes = results["ratios"]["mixes"]
    widths = list(next(iter(mixes.values())))
    rows = [[mix, *(f"{of[w]:.2f}" for w in widths)] for mix, of in mixes.items()]
    columns = ("local:global", *(f"W = {int(w):,}" for w in widths))
    note = f"All-global bytes over the mix's, {results['config']['ratio_context']:,} tokens."
    return Table("Windows between full layers", columns, rows, note)


def _allocator(results: Mapping) -> Table:
    rows = [
        [f"{name}, {arm}", f"{x['concurrency']:.1f}", f"{x['waste']:.1%}",
         f"{x['concurrency'] / arms['uniform']['concurrency']:.2f}"]
        for name, arms in results["allocator"].items()
        for arm, x in arms.items()
    ]  # fmt: skip
    note = (
        "Mean requests at a time in the same bytes, and bytes that hold no live row. uniform: one "
        "block table for all layers; largest: one page size; static: a pool per kind; lcm: large "
        "pages cut into small ones. Rows of one size leave lcm and largest the same."
    )
    columns = ("model, pages", "requests", "waste", "over uniform")
    return Table("Page allocators", columns, rows, note)


def _prices(results: Mapping) -> Table:
    rows = [
        [name, f"{x['times']:.0f}x", f"{x['saved']:.1%}",
         f"{x['break_even_reuses_per_hour']:.2g}", x["as_of"]]
        for name, x in results["prices"].items()
    ]  # fmt: skip
    rent = results["config"]["dollars_per_gb_hour"]
    note = (
        f"Saved: at {results['config']['hit']:.1%} hits. Break-even: reuses an hour of a stored "
        f"token above which ${rent:g} per GB and hour is less than computing it anew (V4-Flash's "
        "bytes). Prices are configuration, as read at the date given."
    )
    columns = ("prices", "miss over hit", "saved", "break-even", "as of")
    return Table("Price of a cached token", columns, rows, note)


def _anatomy(length: int) -> matplotlib.figure.Figure:
    spec = models.build(anatomy.example()).cache_spec
    return anatomy.draw(anatomy.rows_of(spec, length), length)


def _curve(results: Mapping) -> matplotlib.figure.Figure:
    fig = matplotlib.figure.Figure(figsize=(6, 4))
    axis = fig.subplots()
    plain(axis)
    lengths = results["config"]["contexts"]
    for name, row in results["kv"].items():
        if "curve" in row:
            axis.plot(lengths, [x / 1e9 for x in row["curve"]], marker="o", markersize=3,
                      label=NAMES[name])  # fmt: skip
    base = results["kv"]["v3_2"]["packed_total"] / 1e9
    context = results["config"]["context"]
    published = [base / ratio for ratio in (9.5, 13.7)]
    axis.scatter([context] * 2, published, marker="x", color="black", zorder=3,
                 label="published: 9.5x and 13.7x below V3.2")  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB of one sequence, packed")
    axis.legend(fontsize=8)
    fig.tight_layout()
    return fig


def _parts(results: Mapping) -> matplotlib.figure.Figure:
    fig = matplotlib.figure.Figure(figsize=(7.5, 2.4))
    axis = fig.subplots()
    plain(axis)
    kv = {name: row for name, row in results["kv"].items() if "packed" in row}
    kinds = sorted({part for row in kv.values() for part in row["packed"]} - {"lengths"})
    left = dict.fromkeys(kv, 0.0)
    for colour, kind in zip(COLOURS, kinds, strict=False):
        sizes = {name: row["packed"].get(kind, 0) / row["packed_total"] for name, row in kv.items()}
        axis.barh([NAMES[x] for x in kv], [100 * x for x in sizes.values()],
                  left=[100 * x for x in left.values()], color=colour, label=kind)  # fmt: skip
        left = {name: left[name] + sizes[name] for name in kv}
    axis.set(xlabel="% of the bytes")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    fig.tight_layout()
    return fig
