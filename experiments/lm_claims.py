"""The claims that `lm` tests: directions that papers report, each with a margin of its own.

A claim that presupposes something of an arm, such as that it finds needles at all, is not tested
where the arm has not learnt it; its line then says so, whatever number was found.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

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
# Share of digits from which on a model counts as one that finds needles: most of them, where
# guesses find 0.1. How many it finds stands in a claim of its own.
FINDS = 0.5


def claims(results: Mapping, rows: Mapping[str, Arms]) -> list[Claim]:
    """Of the rows that were run."""
    found = []
    for name, arms in rows.items():
        found += _CLAIMS[name](results, arms)
    return found


def needles(arms: Arms, arm: str, length: str, depth: str = "") -> list[float]:
    """Digits that are right by seed, a mean over depths where none is given."""
    depths = [depth] if depth else list(arms.example["needle"][length])
    by_depth = [arms.values(arm, "needle", length, d) for d in depths]
    return [statistics.fmean(x) for x in zip(*by_depth, strict=True)]


def blind_pick(count: int) -> float:
    """Share of digits that are right where any one of so many needles is copied, asked for or
    not: what a model finds that does not look at names."""
    return 1 / count + (1 - 1 / count) * 0.1


def _unfound(arms: Arms, arm: str, length: str) -> str:
    """Why nothing can be said that presupposes that an arm finds needles, or nothing."""
    share = statistics.fmean(needles(arms, arm, length))
    return "" if share >= FINDS else f"{arm} finds only {share:.2f} at {length} bytes"


def _unused(results: Mapping) -> str:
    """Why nothing can be said that presupposes that full attention is of use on text: windows do
    as well late in a sequence. Nothing where it is of use, or C1 was not run."""
    if "C1" not in results["rows"]:
        return ""
    arms, late = Arms(results["rows"]["C1"]), _stretch(results, -1)
    gain = statistics.fmean(differences(arms, LOCAL, GLOBAL, "bits", late))
    return "" if gain > 0 else (
        f"{GLOBAL} is not ahead of {LOCAL} at positions {late} ({gain:+.3f} bits)"
    )  # fmt: skip


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
        near(f"C1: bits a byte of {arm} above {GLOBAL}", 0, _over(arms, arm, GLOBAL), 0.03, GEMMA,
             untested=_unused(results))
        for arm in mixed
    ]  # fmt: skip
    lost = differences(arms, LOCAL, GLOBAL, "bits", late)
    near_by = _over(arms, LOCAL, GLOBAL, early)
    found += [
        at_least(f"C1: {LOCAL} loses bits at positions {late}", 0.02, lost, GEMMA, neutral=0,
                 note=f"after {results['config']['base']['steps']:,} steps"),
        near(f"C1: {LOCAL} loses none at positions {early}", 0, near_by, 0.03, GEMMA),
        at_least(f"C1: {GLOBAL} finds needles, {length} bytes", 0.95,
                 needles(arms, GLOBAL, length), GEMMA, neutral=0.1),
    ]  # fmt: skip
    if 0 in results["config"]["depths"]:
        found.append(near(f"C1: {LOCAL} does not find the farthest needle, {length} bytes", 0.1,
                          needles(arms, LOCAL, length, "0"), 0.1, "beyond the reach of windows",
                          untested=_unfound(arms, GLOBAL, length)))  # fmt: skip
    best = min(arms.found, key=lambda arm: arms.mean(arm, "bits", "all"))
    for kind, what in (("windows", "of the same windows"), ("stream", "of all text at once")):
        gain = [results["xz"][kind] - x for x in arms.values(best, "bits", "all")]
        found.append(at_least(f"C1: {best} below `xz -6` {what}, bits a byte", 0, gain,
                              "a model is of use where it beats a general compressor"))  # fmt: skip
    return found


def _sinks(results: Mapping, arms: Arms) -> list[Claim]:
    small, large = results["config"]["small_window"], results["config"]["base"]["model"]["window"]
    length, found = results["config"]["base"]["task"]["length"], []
    even = statistics.fmean(1 / seen for seen in range(2, length + 1))
    for width in (small, large):
        off, on = f"W = {width}, no sink", f"W = {width}, sink"
        share = statistics.fmean(1 / (min(seen, width) + 1) for seen in range(1, length + 1))
        moved = differences(arms, off, on, "attention", "first")
        first = arms.mean(off, "attention", "first")
        idle = "" if first > even else (
            f"without a sink token 0 gets {first:.3f}, an even share being {even:.3f}"
        )  # fmt: skip
        found.append(at_least(f"C2: a sink takes attention off token 0, W = {width}", 0.01, moved,
                              SINKS, neutral=0, untested=idle))  # fmt: skip
        taken = [x - share for x in arms.values(on, "attention", "sink_local")]
        found.append(at_least(f"C2: a sink takes more of a window than an even share, W = {width}",
                              0.01, taken, SINKS, neutral=0, note=f"even {share:.3f}"))  # fmt: skip
        worse = [max(x, 0.0) for x in differences(arms, on, off, "bits", "all")]
        found.append(near(f"C2: bits a byte of sink above no sink, W = {width}", 0, worse, 0.01,
                          SINKS))  # fmt: skip
    return found


def _streams(results: Mapping, arms: Arms) -> list[Claim]:
    (arm,) = arms.found
    late = _stretch(results, -1)

    def over(kind: str) -> list[float]:
        return differences(arms, arm, arm, "bits", kind, late, other=("bits", "full", late))

    margin, cost = 0.1, statistics.fmean(over("window"))
    idle = "" if cost > margin else f"a window alone costs {cost:.3f} already"
    steps = results["config"]["base"]["steps"]
    return [
        at_least(f"C3: a window alone costs bits, positions {late}", 0.3, over("window"), STREAMING,
                 neutral=0, note=f"after {steps:,} steps"),
        near("C3: with the first tokens kept it costs little", 0,
             [max(x, 0.0) for x in over("first")], margin, STREAMING, untested=idle),
    ]  # fmt: skip


def _sparse(results: Mapping, arms: Arms) -> list[Claim]:
    length, found = _length(results), []
    full = needles(arms, GLOBAL, length)
    for arm in (x for x in arms.found if x != GLOBAL):
        found.append(near(f"C4: bits a byte of {arm} above {GLOBAL}", 0, _over(arms, arm, GLOBAL),
                          0.02, NSA, untested=_unused(results)))  # fmt: skip
        lead = [a - b for a, b in zip(needles(arms, arm, length), full, strict=True)]
        found.append(at_least(f"C4: needles of {arm} against {GLOBAL}, {length} bytes", 0, lead,
                              NSA, margin=0.05, note=f"{GLOBAL} {statistics.fmean(full):.2f}",
                              untested=_unfound(arms, GLOBAL, length)))  # fmt: skip
    return found


def _compressed(results: Mapping, arms: Arms) -> list[Claim]:
    names, length = ("CSA, HCA", "all CSA", "all HCA"), _length(results)
    sizes = [arms.mean(name, "cache_bytes") for name in names]

    def over(by_arm: Iterable[Sequence[float]]) -> list[float]:
        """By seed, how far the turns lie above the line of the pure arms over cache bytes."""
        return [
            turns - lm_metrics.line_at(sizes[0], (sizes[1], csa), (sizes[2], hca))
            for turns, csa, hca in zip(*by_arm, strict=True)
        ]

    bits = [-x for x in over(arms.values(name, "bits", "all") for name in names)]
    found = over(needles(arms, name, length) for name in names)
    line = "the line between the pure ones"
    return [
        at_least(f"C5: bits a byte of CSA and HCA in turns below {line}", 0, bits, V4),
        at_least(f"C5: needles of CSA and HCA in turns above {line}, {length} bytes", 0, found, V4),
    ]


def _longer(results: Mapping, arms: Arms) -> list[Claim]:
    free, fixed = "1:1, full without positions", GLOBAL
    lengths, last = list(arms.example["needle"]), list(arms.example["bits"])[-1]
    before = _stretch(results, -1)

    def worse(arm: str) -> list[float]:
        return differences(arms, arm, arm, "bits", last, other=("bits", before))

    gain = [a - b for a, b in zip(worse(fixed), worse(free), strict=True)]
    ends = (needles(arms, arm, lengths[-1]) for arm in (free, fixed))
    kept = [a - b for a, b in zip(*ends, strict=True)]
    # What the other arm finds where it was trained may be little: that makes it only harder.
    unfound = _unfound(arms, fixed, lengths[0])
    return [
        at_least(f"C6: bits a byte at {last}: without positions in full layers degrades less", 0.2,
                 gain, LENGTH, neutral=0),
        at_least(f"C6: needles at {lengths[-1]} bytes: without positions over {fixed}", 0.2, kept,
                 LENGTH, neutral=0, untested=unfound),
    ]  # fmt: skip


def _keys(results: Mapping, arms: Arms) -> list[Claim]:
    first, *_, last = (str(x) for x in results["config"]["keys"])
    blind, found = blind_pick(int(last)), []
    for arm in (x for x in arms.found if x != LOCAL):
        told = (
            f"{arms.mean(arm, 'needle', last):.2f} of {last}, a pick without the name {blind:.2f}"
        )
        lead = differences(arms, arm, arm, "needle", first, other=("needle", last))
        one = arms.mean(arm, "needle", first)
        unfound = "" if one >= FINDS else f"{arm} finds only {one:.2f} of one needle"
        found.append(at_least(f"C7: one needle is found at least as often as one of {last}, {arm}",
                              -0.02, lead, RULER, note=told, untested=unfound))  # fmt: skip
    return found


def _windows(results: Mapping, arms: Arms) -> list[Claim]:
    width = results["config"]["base"]["model"]["window"]
    lost = differences(arms, "W = 0", f"W = {width}", "bits", "all")
    return [at_least("B6: bits a byte that CSA loses without its window", 0.05, lost, NSA,
                     neutral=0)]  # fmt: skip


_CLAIMS = {
    "B6": _windows, "C1": _ratios, "C2": _sinks, "C3": _streams, "C4": _sparse, "C5": _compressed,
    "C6": _longer, "C7": _keys,
}  # fmt: skip
