"""Time to the first token on tiny models: what is served, kept and shown; curves by hand."""

import json
import pathlib

import numpy as np
import pytest

from experiments import exhibit, report, timeline, ttft, ttft_fit, ttft_report
from experiments.shared_prefix import OFF, Arm, Bench
from experiments.ttft_config import TtftConfig
from tests.experiments import prefix_sizes


def config(workdir: pathlib.Path, **fields) -> TtftConfig:
    sizes = dict(
        hybrid=prefix_sizes.HYBRID, full=prefix_sizes.FULL, prompts=(40, 70),
        hits=(0.0, 0.3, 0.6, 0.95), arms=("full/host", "zero/host", "full/disk"), repeats=2,
        workdir=str(workdir),
    )  # fmt: skip
    return TtftConfig(**(sizes | fields))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[TtftConfig, dict]:
    made = config(tmp_path_factory.mktemp("ttft"))
    return made, ttft.run(made)


@pytest.mark.full
def test_what_is_served(run) -> None:
    _, results = run
    assert list(results["cells"]) == ["hybrid/40", "hybrid/70", "full/40", "full/70"]
    cell = results["cells"]["hybrid/70"]
    assert list(cell["arms"]) == ["full/host", "zero/host", "full/disk"]
    for arm, rows in cell["arms"].items():
        # 0, 21, 42 and 66 of 70 tokens, down to multiples of 16.
        assert [x["shared"] for x in rows] == [0, 16, 32, 64]
        assert all(len(x["seconds"]) == 2 for x in rows) and len(cell["off_seconds"]) == 2
        for x in rows:
            assert x["resumed"] + x["computed"] == 70
            if arm != "zero/host":
                assert x["resumed"] == x["shared"] and x["replayed"] == 0
            history = 0 if not x["resumed"] else x["bytes"]
            assert (history > 0) == (x["resumed"] > 0)
    # An exact replay of windows and tails runs 16 tokens: one call.
    assert [x["replayed"] for x in cell["arms"]["zero/host"]] == [0, 0, 16, 16]
    assert "disk" in cell["arms"]["full/disk"][1]["routes"].values()
    # Without windows and tails the policy makes no difference: an arm a tier.
    assert list(results["cells"]["full/70"]["arms"]) == ["full/host", "full/disk"]
    counted = [cell["operations"][str(x)] for x in (0.0, 0.3, 0.6, 0.95)]
    assert counted == sorted(counted, reverse=True)


@pytest.mark.full
def test_what_is_written(run) -> None:
    made, results = run
    place = pathlib.Path(made.workdir)
    assert json.loads((place / "results.json").read_text()) == json.loads(json.dumps(results))
    record = json.loads((place / "run.json").read_text())
    assert record["runner"] == "ttft" and record["seed"] == 0 and "jax" in record["versions"]
    shown = report.exhibit_of(made.workdir)
    assert set(shown.figures) == {"ttft_curves", "ttft_surface", "request_timeline"}
    times, pays, parts = shown.tables
    assert len(times.rows) == len(pays.rows) == 2 * 3 + 2 * 2
    assert len(parts.rows) == 2 * (3 + 2)
    text = (place / "report.md").read_text()
    for name in ("ttft_curves", "ttft_surface", "request_timeline"):
        assert f"({name}.png)" in text and (place / f"{name}.png").stat().st_size > 5_000


@pytest.mark.full
def test_a_finished_cell_is_not_run_again(run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, results = run
    asked = []

    def again(config, bench, prompt, on_round):
        asked.append(prompt)
        return results["cells"][f"full/{prompt}"] | {"prompt": prompt}

    monkeypatch.setattr(ttft, "run_cell", again)
    assert ttft.run(made)["cells"] == json.loads(json.dumps(results["cells"]))
    assert not asked
    # As after a kill in the middle: what is missing runs, and only that.
    path = pathlib.Path(made.workdir) / "results.json"
    kept = json.loads(path.read_text())
    del kept["cells"]["full/40"]
    path.write_text(json.dumps(kept))
    assert set(ttft.run(made)["cells"]) == set(results["cells"]) and asked == [40]


@pytest.mark.full
def test_a_timeline_is_the_request(run) -> None:
    _, results = run
    cold, warm = (results["timelines"]["hybrid"]["full/host"][x] for x in ("cold", "warm"))
    assert (cold["resumed"], warm["resumed"]) == (0, 32) and cold["length"] == 70
    for line in (cold, warm):
        ran = [x["tokens"] for x in line["spans"] if x["lane"] == "prefill"]
        tokens = [int(t) for first, last in ran for t in np.arange(first, last)]
        assert tokens == list(range(line["resumed"], 70))
        lanes = [x["lane"] for x in line["spans"]]
        assert lanes[0] == "lookup" and lanes.count("restore") == 1 and "publish" in lanes
        starts = [x["start_seconds"] for x in line["spans"]]
        assert starts == sorted(starts) and starts[0] >= 0
        assert sum(timeline.busy(line).values()) <= line["first_token_seconds"]
    zero = results["timelines"]["hybrid"]["zero/host"]["warm"]
    assert [x["tokens"] for x in zero["spans"] if x["lane"] == "replay"] == [(16, 32)]


def test_a_curve_of_known_parts() -> None:
    n, lengths = 1_000, [0, 250, 500, 750, 900]
    known = ttft_fit.Fit(n, 0.01, 2e-5, 6e-8)
    found = ttft_fit.fit(n, lengths, [known(x) for x in lengths])
    assert found.per_token == pytest.approx(2e-5) and found.per_pair == pytest.approx(6e-8)
    assert found.fixed == pytest.approx(0.01)
    assert found.bend == pytest.approx(6e-8 * n / 2 / (6e-8 * n / 2 + 2e-5))
    line = ttft_fit.fit(n, lengths, [1.0 - x / 2_000 for x in lengths])
    assert line.bend == pytest.approx(0, abs=1e-6)
    # Times that bend the other way are no negative square.
    assert ttft_fit.fit(n, lengths, [1.0, 0.7, 0.45, 0.25, 0.2]).bend == 0
    assert ttft_fit.fit(n, [1, 2], [1.0, 2.0]) is None


@pytest.mark.parametrize(
    "lengths, values, cold, wanted",
    [
        ([100, 200, 300], [12.0, 8.0, 4.0], 10.0, 150.0),
        ([100, 200], [8.0, 6.0], 10.0, 0.0),  # the line meets 10 at 0
        ([100, 200], [9.0, 7.0], 10.0, 50.0),
        ([100, 200], [9.0, 9.5], 10.0, 0.0),
        ([100, 200], [12.0, 11.0], 10.0, None),
        ([100, 200, 300], [9.0, 12.0, 8.0], 10.0, 250.0),
        ([], [], 10.0, None),
    ],
)
def test_break_even(lengths, values, cold, wanted) -> None:
    assert ttft_fit.break_even(lengths, values, cold) == wanted


def test_break_even_below_the_shortest_hit_is_by_the_curve() -> None:
    bent = ttft_fit.Fit(1_000, 0.0, 0.0, 2e-6)  # 1 s cold, saving little at first
    lengths = [400, 800]
    values = [bent(x) + 0.01 for x in lengths]
    found = ttft_fit.break_even(lengths, values, bent(0), lambda x: bent(x) + 0.01)
    assert found == pytest.approx(100)  # 1e-6 x^2 = 0.01
    assert ttft_fit.break_even(lengths, values, bent(0), bent) == 0


def made_up(kind: str, per_pair: float, overhead: float) -> dict:
    """A cell whose times follow a known curve."""
    n, hits = 1_000, (0.0, 0.25, 0.5, 0.75, 0.9)
    curve = ttft_fit.Fit(n, 0.001, 2e-5, per_pair)
    rows = [
        {"hit": h, "shared": int(h * n), "resumed": int(h * n), "replayed": 0, "computed": 1,
         "bytes": int(h * n) * 100, "routes": {},
         "seconds": [curve(h * n) + overhead * (h > 0)] * 3}
        for h in hits
    ]  # fmt: skip
    operations = {str(h): curve(h * n) - 0.001 for h in hits}
    return {"kind": kind, "prompt": n, "off_seconds": [curve(0)] * 3, "arms": {"full/host": rows},
            "operations": operations, "usage": {"other_cores": 0.0}}  # fmt: skip


def test_claims_say_what_the_curves_say() -> None:
    cells = [made_up("hybrid", 2e-9, 0.0), made_up("full", 8e-8, 0.0)]
    claims = ttft_report.claims(cells)
    assert len(claims) == 9 and {x.verdict for x in claims} == {exhibit.REPRODUCED}
    by_name = {x.name: x for x in claims}
    even = by_name["D5: break-even hit, full/host, full attention, 1,000 tokens"]
    assert even.found == pytest.approx(0, abs=0.02)
    # A resume that costs more than half of the prompt does not pay early, and the curve rises.
    slow = ttft_report.claims([made_up("hybrid", 2e-9, 0.012)])
    verdicts = {x.name.partition(":")[2].split(",")[0].strip(): x.verdict for x in slow}
    assert verdicts["break-even hit"] == exhibit.NOT
    assert verdicts["TTFT falls with the hit: largest rise"] == exhibit.NOT
    swapped = ttft_report.claims([made_up("hybrid", 8e-8, 0.0), made_up("full", 2e-9, 0.0)])
    assert swapped[-1].verdict == exhibit.NOT


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kinds=("half",)), "kinds="),
        (dict(arms=()), "arms is empty"),
        (dict(arms=("full/tape",)), "policy/tier"),
        (dict(arms=("fall/host",)), "unknown checkpoint policy"),
        (dict(prompts=(1,)), "prompts="),
        (dict(prompts=(20, 30)), "hybrid resumes multiples of 16 tokens; give one of 32"),
        (dict(full=prefix_sizes.FULL.replace(d_model=0)), "full: d_model=0"),
        (dict(directory="no/where"), "directory='no/where'"),
        (dict(seed=-1), "seed=-1"),
        (dict(seconds="long"), "seconds='long': a finite number"),
        (dict(hits=(0.5,)), "0 among them"),
        (dict(hits=(0.0, 1.0)), "below 1"),
        (dict(repeats=0), "repeats="),
        (dict(workdir=""), "workdir is empty"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**({"workdir": tmp_path} | fields)).check()


def test_arms_and_lengths() -> None:
    assert Arm.of("periodic:4/disk") == Arm("periodic:4", "disk")
    bench = Bench(prefix_sizes.FULL, 80, 0)
    assert bench.arms(("end/host", "zero/host", "end/disk")) == ["end/host", "end/disk"]
    # The last token is always computed.
    assert bench.shared_lengths(64, (0.0, 0.99)) == {0.0: 0, 0.99: 48}
    assert bench.bytes_of(32, "full") == 32 * bench.spec.history_bytes_per_token()
    with bench.served(OFF) as served:
        assert served.store is None and served.ask(20, 16).resumable_length == 0
