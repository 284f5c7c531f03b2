"""Joins runs into one report: all claims with verdicts, then the tables and figures of each run.

    python -m experiments.report runs/tables runs/replay runs/ratios --out runs/report

A run is the work directory of a runner that has `<runner>_report.exhibit(results)`, or the
directory of a sweep. Writes report.md, the figures, and claims.json to the output directory.
"""

import collections
import importlib
import pathlib
from collections.abc import Sequence

from absl import app, flags

from experiments import run_record, sweep_report
from experiments.exhibit import Claim, Exhibit, claims_table

_FLAGS = flags.FLAGS


def is_sweep(place: pathlib.Path) -> bool:
    """Whether the directory is that of a sweep."""
    return (place / "sweep.json").is_file()


def exhibit_of(run: str, metrics: Sequence[str] = ()) -> Exhibit:
    """What a run has to show.

    Raises:
        ValueError: the directory holds no run that can be shown; it says what is missing.
    """
    place = pathlib.Path(run)
    if is_sweep(place):
        return sweep_report.exhibit(place, metrics)
    record, results = (run_record.read_json(place / x) for x in ("run.json", "results.json"))
    if record is None or results is None:
        raise ValueError(f"{run} is no finished run: it needs run.json and results.json, or is a "
                         "sweep with sweep.json")  # fmt: skip
    runner = record.get("runner", "")
    try:
        module = importlib.import_module(f"experiments.{runner}_report")
        return module.exhibit(results)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{run}: runner {runner!r} has no exhibit to show ({error})") from error


def join(
    runs: Sequence[str], out: str, title: str = "Report", metrics: Sequence[str] = ()
) -> list[Claim]:
    """Writes the report; returns all claims.

    Raises:
        ValueError: there is no run, one cannot be shown, or no sweep has a metric.
    """
    if not runs:
        raise ValueError("give the directories of one run or more")
    sweep_report.check(metrics, [x for x in map(pathlib.Path, runs) if is_sweep(x)])
    place = pathlib.Path(out)
    place.mkdir(parents=True, exist_ok=True)
    exhibits = [exhibit_of(run, metrics) for run in runs]
    claims = [claim for shown in exhibits for claim in shown.claims]
    parts = [f"# {title}", ""]
    if claims:
        counts = collections.Counter(x.verdict for x in claims)
        parts += [", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + ".", ""]
        parts.append(claims_table(claims).markdown())
    for number, shown in enumerate(exhibits, 1):
        pictures = shown.save(place, f"{number}-")
        shown.claims = ()  # they stand above
        parts.append(shown.markdown(pictures))
    (place / "report.md").write_text("\n".join(parts))
    run_record.write_json(place / "claims.json", {"claims": [x.values() for x in claims]})
    return claims


def main(argv: list[str]) -> None:
    """Writes the report and says where it is."""
    try:
        claims = join(argv[1:], _FLAGS.out, _FLAGS.title, _FLAGS.metrics)
    except ValueError as error:
        raise SystemExit(f"report: {error}") from error
    for claim in claims:
        print(f"{claim.verdict:15} {claim.name}: {claim.found:.4g}, published {claim.published:g}")
    print(f"report.md is in {_FLAGS.out}")


def _define() -> None:
    flags.DEFINE_string("out", "runs/report", "directory of the report")
    flags.DEFINE_string("title", "Report", "its first line")
    flags.DEFINE_multi_string(
        "metrics", [], "of sweeps: a metric that is shown and drawn, and no others; may be repeated"
    )


if __name__ == "__main__":
    _define()
    app.run(main)
