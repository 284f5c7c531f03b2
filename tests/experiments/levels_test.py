"""The three levels on tiny models: what is run, counted and shown."""

import json
import pathlib

import pytest

import models
from experiments import counting, levels, levels_report, report
from experiments.levels_config import LevelsConfig
from tests.experiments import prefix_sizes

PROMPTS, ANSWER = (40, 70), 4


def config(workdir: pathlib.Path, **fields) -> LevelsConfig:
    sizes = dict(
        hybrid=prefix_sizes.HYBRID, full=prefix_sizes.FULL, prompts=PROMPTS, overlaps=(0.5, 0.9),
        answer=ANSWER, recomputed=2, repeats=2, workdir=str(workdir),
    )  # fmt: skip
    return LevelsConfig(**(sizes | fields))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[LevelsConfig, dict]:
    made = config(tmp_path_factory.mktemp("levels"))
    return made, levels.run(made)


@pytest.mark.full
def test_every_level_is_run(run) -> None:
    made, results = run
    assert list(results["cells"]) == ["hybrid/40", "hybrid/70", "full/40", "full/70"]
    for cell in results["cells"].values():
        half, most = (int(x * cell["prompt"]) // 16 * 16 for x in (0.5, 0.9))
        assert cell["shared"] == {"across 0.5": half, "across 0.9": most}
        assert list(cell["request_seconds"]) == ["none", "request", "across 0.5", "across 0.9"]
        for samples in (*cell["request_seconds"].values(), *cell["token_seconds"].values()):
            assert len(samples) == 2 and min(samples) > 0
        for name, first in cell["first_token_seconds"].items():
            pairs = zip(first, cell["request_seconds"][name], strict=True)
            assert all(0 < a <= b for a, b in pairs)
    place = pathlib.Path(made.workdir)
    assert json.loads((place / "results.json").read_text()) == json.loads(json.dumps(results))
    shown = report.exhibit_of(made.workdir)
    assert len(shown.tables[0].rows) == 16 and len(shown.tables[1].rows) == 8
    assert (place / "levels.png").stat().st_size > 5_000
    # Per model: none over request, request over both overlaps, two slopes.
    assert len(shown.claims) == 2 * 5


@pytest.mark.full
def test_operations_by_level(run) -> None:
    _, results = run
    cell = results["cells"]["hybrid/70"]
    model = models.build(prefix_sizes.HYBRID)

    def step(n: int) -> float:
        return sum(counting.decode_flops(model, n).values())

    def prefill(start: int, stop: int) -> float:
        head = 2 * 32 * 16  # vocabulary times width, of all tokens but the last
        return sum(step(n) for n in range(start + 1, stop + 1)) - (stop - start - 1) * head

    counted = cell["operations"]
    assert counted["none"]["request"] == sum(prefill(0, n) for n in (70, 71, 72, 73))
    assert counted["none"]["token"] == prefill(0, 71)
    assert counted["request"]["request"] == prefill(0, 70) + step(71) + step(72) + step(73)
    assert counted["across 0.9"]["request"] == prefill(48, 70) + step(71) + step(72) + step(73)
    assert counted["across 0.9"]["token"] == counted["request"]["token"] == step(71)


@pytest.mark.full
def test_finished_cells_are_kept(run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, results = run
    monkeypatch.setattr(levels, "run_cell", lambda *_: pytest.fail("it is finished"))
    assert levels.run(made)["cells"] == json.loads(json.dumps(results["cells"]))


@pytest.mark.full
def test_claims_compare_seconds_with_operations(run) -> None:
    _, results = run
    cells = json.loads(json.dumps(list(results["cells"].values())))
    for cell in cells:  # seconds that follow the operations exactly
        for name, of in cell["operations"].items():
            cell["request_seconds"][name] = [1e-9 * of["request"]]
            if name in cell["token_seconds"]:
                cell["token_seconds"][name] = [1e-9 * of["token"]]
    assert {x.verdict for x in levels_report.claims(cells)} == {"reproduced"}
    for cell in cells:
        cell["request_seconds"]["across 0.9"] = [2 * cell["request_seconds"]["request"][0]]
    wrong = [x for x in levels_report.claims(cells) if x.verdict != "reproduced"]
    assert {x.verdict for x in wrong} == {"not reproduced"} and len(wrong) == 2


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kinds=()), "kinds="),
        (dict(arm="full"), "policy/tier"),
        (dict(prompts=()), "prompts="),
        (dict(overlaps=(1.0,)), "overlaps="),
        (dict(recomputed=9), "recomputed"),
        (dict(full=prefix_sizes.FULL.replace(d_model=0)), "full: d_model=0"),
        (dict(seed=-1), "seed=-1"),
        (dict(workdir=""), "workdir is empty"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**({"workdir": tmp_path} | fields)).check()
