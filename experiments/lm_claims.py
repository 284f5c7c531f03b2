"""The claims that `lm` tests: directions that papers report, each with a margin of its own."""

import statistics
from collections.abc import Mapping

from experiments import lm_metrics
from experiments.exhibit import Claim
from experiments.lm_arms import GLOBAL, LOCAL
from experiments.trained_report import Arms, at_least, differences, near

GEMMA = "Gemma 3 (arXiv 2503.19786), figs. 3-4"
SINKS = "gpt-oss and MiMo-V2-Flash (secondary)"
STREAMING = "StreamingLLM (arXiv 2309.17453), table 1"
NSA = "NSA (arXiv 2502.11089)"
V4 = "DeepSeek-V4 report, section 2"
LENGTH = "arXiv 2510.17196"
RULER = "RULER (arXiv 2404.06654)"


def claims(results: Mapping, rows: Mapping[str, Arms]) -> list[Claim]:
    """Of the rows that were run."""
    found = []
    for name, arms in rows.items():
        found += _CLAIMS[name](results, arms)
    return found


def needle(arms: Arms, arm: str, length: str, depth: str = "") -> float:
    """Digits that are right, a mean over seeds, and over depths where none is given."""
    depths = [depth] if depth else list(next(iter(arms.found[arm].values()))["needle"][length])
    return statistics.fmean(arms.mean(arm, "needle", length, d) for d in depths)


def _length(results: Mapping) -> str:
    """Of the longest needle sequences."""
    return str(max(results["config"]["lengths"]))


def _stretch(results: Mapping, place: int) -> str:
    """The name of the first (0) or last (-1) stretch of positions."""
    config = results["config"]
    return lm_metrics.buckets(config["edges"], config["base"]["task"]["length"])[place][0]


def _over(arms: Arms, arm: str, base: str, stretch: str = "all") -> list[float]:
    """Bits a byte above those of `base`, by seed, at least 0."""
    return [max(x, 0.0) for x in differences(arms, arm, base, "bits", stretch)]


def _ratios(results: Mapping, arms: Arms) -> list[Claim]:
    length, late, early = _length(results), _stretch(results, -1), _stretch(results, 0)
    mixed = [arm for arm in arms.found if arm not in (GLOBAL, LOCAL)]
    found = [
        near(f"C1: bits a byte of {arm} above {GLOBAL}", 0, _over(arms, arm, GLOBAL), 0.03, GEMMA)
        for arm in mixed
    ]
    lost = differences(arms, LOCAL, GLOBAL, "bits", late)
    near_by = _over(arms, LOCAL, GLOBAL, early)
    found += [
        at_least(f"C1: {LOCAL} loses bits at positions {late}", 0.02, lost, GEMMA, neutral=0),
        near(f"C1: {LOCAL} loses none at positions {early}", 0, near_by, 0.03, GEMMA),
        at_least(f"C1: {GLOBAL} finds needles, {length} bytes", 0.95,
                 [needle(arms, GLOBAL, length)], GEMMA, neutral=0.1),
    ]  # fmt: skip
    if 0 in results["config"]["depths"]:
        found.append(near(f"C1: {LOCAL} does not find the farthest needle, {length} bytes", 0.1,
                          [needle(arms, LOCAL, length, "0")], 0.1,
                          "beyond the reach of windows"))  # fmt: skip
    best = min(arms.found, key=lambda arm: arms.mean(arm, "bits", "all"))
    gain = [results["xz"]["windows"] - x for x in arms.values(best, "bits", "all")]
    found.append(at_least(f"C1: {best} below `xz -6` of the same windows, bits a byte", 0, gain,
                          "a model is of use where it beats a general compressor"))  # fmt: skip
    return found


def _sinks(results: Mapping, arms: Arms) -> list[Claim]:
    small, large = results["config"]["small_window"], results["config"]["base"]["model"]["window"]
    found = []
    for width in (small, large):
        off, on = f"W = {width}, no sink", f"W = {width}, sink"
        moved = differences(arms, off, on, "attention", "first")
        found.append(at_least(f"C2: a sink takes attention off token 0, W = {width}", 0.01, moved,
                              SINKS, neutral=0))  # fmt: skip
        worse = [max(x, 0.0) for x in differences(arms, on, off, "bits", "all")]
        found.append(near(f"C2: bits a byte of sink above no sink, W = {width}", 0, worse, 0.01,
                          SINKS))  # fmt: skip
    return found


def _streams(results: Mapping, arms: Arms) -> list[Claim]:
    (arm,) = arms.found
    late = _stretch(results, -1)

    def over(kind: str) -> list[float]:
        return differences(arms, arm, arm, "bits", kind, late, other=("bits", "full", late))

    return [
        at_least(f"C3: a window alone costs bits, positions {late}", 0.3, over("window"), STREAMING,
                 neutral=0),
        near("C3: with the first tokens kept it costs little", 0,
             [max(x, 0.0) for x in over("first")], 0.1, STREAMING),
    ]  # fmt: skip


def _sparse(results: Mapping, arms: Arms) -> list[Claim]:
    length, found = _length(results), []
    for arm in (x for x in arms.found if x != GLOBAL):
        found.append(near(f"C4: bits a byte of {arm} above {GLOBAL}", 0, _over(arms, arm, GLOBAL),
                          0.02, NSA))  # fmt: skip
        found.append(at_least(f"C4: {arm} finds needles, {length} bytes", 0.95,
                              [needle(arms, arm, length)], NSA, neutral=0.1,
                              note=f"{GLOBAL} {needle(arms, GLOBAL, length):.2f}"))  # fmt: skip
    return found


def _compressed(results: Mapping, arms: Arms) -> list[Claim]:
    def at(arm: str) -> tuple[float, float]:
        return arms.mean(arm, "cache_bytes"), arms.mean(arm, "bits", "all")

    size, bits = at("CSA, HCA")
    gain = lm_metrics.line_at(size, at("all CSA"), at("all HCA")) - bits
    return [at_least("C5: bits a byte of CSA and HCA in turns below the line between the pure ones",
                     0, [gain], V4, note="of means over seeds")]  # fmt: skip


def _longer(results: Mapping, arms: Arms) -> list[Claim]:
    free, fixed = "1:1, full without positions", GLOBAL
    lengths = list(next(iter(arms.found[free].values()))["needle"])
    last = list(next(iter(arms.found[free].values()))["bits"])[-1]
    before = _stretch(results, -1)

    def worse(arm: str) -> list[float]:
        return differences(arms, arm, arm, "bits", last, other=("bits", before))

    gain = [a - b for a, b in zip(worse(fixed), worse(free), strict=True)]
    kept = differences(arms, free, fixed, "needle", lengths[-1])
    return [
        at_least(f"C6: bits a byte at {last}: without positions in full layers degrades less", 0.2,
                 gain, LENGTH, neutral=0),
        at_least(f"C6: needles at {lengths[-1]} bytes: without positions over {fixed}", 0.2, kept,
                 LENGTH, neutral=0),
    ]  # fmt: skip


def _keys(results: Mapping, arms: Arms) -> list[Claim]:
    first, *_, last = (str(x) for x in results["config"]["keys"])
    return [
        at_least(f"C7: one needle is found at least as often as one of {last}, {arm}", -0.02,
                 differences(arms, arm, arm, "needle", first, other=("needle", last)), RULER)
        for arm in arms.found if arm != LOCAL
    ]  # fmt: skip


def _windows(results: Mapping, arms: Arms) -> list[Claim]:
    width = results["config"]["base"]["model"]["window"]
    lost = differences(arms, "W = 0", f"W = {width}", "bits", "all")
    return [at_least("B6: bits a byte that CSA loses without its window", 0.05, lost, NSA,
                     neutral=0)]  # fmt: skip


_CLAIMS = {
    "B6": _windows, "C1": _ratios, "C2": _sinks, "C3": _streams, "C4": _sparse, "C5": _compressed,
    "C6": _longer, "C7": _keys,
}  # fmt: skip
