"""The claims that `recall` tests: directions that papers report, each with a margin of its own."""

import itertools
import statistics
from collections.abc import Mapping

from experiments.exhibit import Claim
from experiments.recall_arms import BASE, ratio_arm
from experiments.trained_report import Arms, at_least, differences, near

ZOOLOGY = "Zoology (arXiv 2312.04927), fig. 2"
BASED = "Based (arXiv 2402.18668): windows fail past their reach"
V32 = "DeepSeek-V3.2 report, section 2.1"
V4 = "DeepSeek-V4 report, section 2.3"
NSA = "NSA (arXiv 2502.11089)"
OLSSON = "Olsson et al. (arXiv 2209.11895)"


def claims(results: Mapping, rows: Mapping[str, Arms]) -> list[Claim]:
    """Of the rows that were run."""
    found = []
    for name, arms in rows.items():
        found += _CLAIMS[name](results["config"], arms)
    return found


def _mixers(config: Mapping, arms: Arms) -> list[Claim]:
    chance = arms.mean(BASE, "chance")

    def of(arm: str) -> list[float]:
        return arms.values(arm, "eval_accuracy")

    share = arms.mean(BASE, "cache_bytes") / arms.mean("full, full", "cache_bytes")
    found = [
        at_least("B1: full attention recalls", 0.99, of("full, full"), ZOOLOGY, neutral=chance),
        near("B1: windows alone stay at chance", chance, of("swa, swa"), 0.03, BASED),
        at_least("B1: window and CSA, one fact an entry, recall", 0.95, of(BASE), V4,
                 neutral=chance, note=f"{share:.2f} of the bytes of full attention"),
    ]  # fmt: skip
    linear = "linear, linear"
    # Below the plateau of the values that were there it has not begun to learn: nothing was stored
    # that a small state could lose, and nothing follows for its size.
    if arms.mean(linear, "eval_accuracy") > 1 / config["base"]["task"]["pairs"]:
        gap = differences(arms, "full, full", linear, "eval_accuracy")
        size = f"cache of {arms.mean(linear, 'cache_bytes'):,.0f} bytes"
        found.append(at_least("B1: a fixed state falls behind full attention", 0.1, gap, ZOOLOGY,
                              neutral=0, note=size))  # fmt: skip
    return found


def _ratios(config: Mapping, arms: Arms) -> list[Claim]:
    ratios = sorted(config["ratios"])
    names = [ratio_arm(m, False) for m in ratios]
    means = [arms.mean(name, "eval_accuracy") for name in names]
    found = []
    if len(means) > 1:
        rise = max(max(b - a for a, b in itertools.pairwise(means)), 0.0)
        found.append(near("B2: accuracy does not rise with the ratio: largest rise", 0, [rise],
                          0.02, V4, note="of means over seeds"))  # fmt: skip
    if len(ratios) > 2:
        gap = differences(arms, names[-2], names[-1], "eval_accuracy")
        found.append(at_least(f"B2: {names[-1]} below {names[-2]}, no overlap", 0.1, gap, V4,
                              neutral=0))  # fmt: skip
    for name in names:
        facts = arms.mean(name, "facts_per_entry")
        found.append(near(f"B2: accuracy is 1 / facts of an entry, {name}", 1 / facts,
                          arms.values(name, "eval_accuracy"), 0.07,
                          "expected: a coin toss between the facts of an entry"))  # fmt: skip
    return found


def _picks(config: Mapping, arms: Arms) -> list[Claim]:
    trained = str(config["base"]["model"]["index_topk"])
    counts = [str(k) for k in config["picks"]]
    found = []
    if trained in counts:
        lost = differences(arms, BASE, BASE, "accuracy", "all",
                           other=("accuracy", "indexer", trained))  # fmt: skip
        found.append(near(f"B3: k = {trained} loses nothing against all entries", 0, lost, 0.02,
                          V32))  # fmt: skip
        gap = differences(arms, BASE, BASE, "accuracy", "all",
                          other=("accuracy", "random", trained))  # fmt: skip
        found.append(at_least(f"B3: random picks lose much, k = {trained}", 0.1, gap, V32,
                              neutral=0))  # fmt: skip
    ties = []
    for metrics in arms.found[BASE].values():
        pairs = [(metrics["picks"][k]["found"], metrics["accuracy"]["indexer"][k]) for k in counts]
        xs, ys = zip(*pairs, strict=True)
        if max(xs) - min(xs) > 0.05 and max(ys) - min(ys) > 0.05:
            ties.append(statistics.correlation(xs, ys))
    if ties:
        found.append(at_least("B3: accuracy over k follows the facts that are picked: correlation",
                              0.9, ties, V32, neutral=0))  # fmt: skip
    return found


def _warm_up(config: Mapping, arms: Arms) -> list[Claim]:
    warm, scratch, none = "warm-up", "sparse from the start", "no divergence"
    lost = [max(x, 0.0) for x in differences(arms, warm, warm, "dense_accuracy",
                                             other=("accuracy",))]  # fmt: skip
    return [
        near("B4: what a warmed-up indexer loses at the switch", 0, lost, 0.02, V32),
        at_least("B4: without the divergence the switch loses more", 0.1,
                 differences(arms, warm, none, "accuracy"), V32, neutral=0),
        at_least("B4: warm-up against sparse from the start", 0.05,
                 differences(arms, warm, scratch, "accuracy"), V32, neutral=0),
    ]  # fmt: skip


def _borders(config: Mapping, arms: Arms) -> list[Claim]:
    # Of the best seed: misaligned arms leave a plateau late, and one that is still on it says
    # nothing of what the mechanism can hold.
    def lost(kind: str) -> list[float]:
        return [min(differences(arms, f"aligned, {kind}", f"misaligned, {kind}", "eval_accuracy"))]

    kept = [max(x, 0.0) for x in lost("overlap")]
    return [
        at_least("B5: without overlap, facts across a border are lost (best seed)", 0.1,
                 lost("no overlap"), V4, neutral=0),
        near("B5: with overlap they are not: loss (best seed)", 0, kept, 0.05, V4),
    ]  # fmt: skip


def _windows(config: Mapping, arms: Arms) -> list[Claim]:
    base = f"W = {config['base']['model']['window']}"
    if not arms.has(base, "W = 0"):
        return []
    lost = [max(x, 0.0) for x in differences(arms, base, "W = 0", "eval_accuracy")]
    return [near("B6: far facts do not need the CSA layer's window: loss", 0, lost, 0.05, NSA)]


def _distances(config: Mapping, arms: Arms) -> list[Claim]:
    distances = sorted(config["distances"])
    swa, full, single = "swa, swa", "full, full", "full"
    reach = arms.mean(swa, "reach")
    inside = [d for d in distances if d <= reach]
    outside = [d for d in distances if d > reach]
    if not inside or not outside:
        return []
    seeds = arms.found[full].values()
    least = [min(x["accuracy"].values()) for x in seeds]
    step = [x["accuracy"][str(inside[-1])] - x["accuracy"][str(outside[0])]
            for x in arms.found[swa].values()]  # fmt: skip
    one = [statistics.fmean(x["accuracy"].values()) for x in arms.found[single].values()]
    both = [statistics.fmean(x["accuracy"].values()) for x in seeds]
    return [
        at_least("B7: two full layers copy over every distance: the least accuracy", 0.9, least,
                 OLSSON, neutral=arms.mean(full, "chance")),
        at_least(f"B7: windows step down at their reach of {reach:.0f}: d = {inside[-1]} over "
                 f"d = {outside[0]}", 0.5, step, BASED, neutral=0),
        at_least("B7: one layer does not copy: two over one", 0.5,
                 [a - b for a, b in zip(both, one, strict=True)], OLSSON, neutral=0),
    ]  # fmt: skip


_CLAIMS = {
    "B1": _mixers, "B2": _ratios, "B3": _picks, "B4": _warm_up, "B5": _borders, "B6": _windows,
    "B7": _distances,
}  # fmt: skip
