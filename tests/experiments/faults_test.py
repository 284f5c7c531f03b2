"""The fault matrix end to end on a tiny model and few faults."""

import json
import pathlib

import numpy as np
import pytest

from experiments import checkpoint, config_tools, faults, faults_benches, faults_report
from experiments.faults_config import ALL_OFF, ALL_ON, GUARD, FaultsConfig
from experiments.report import exhibit_of
from hetero_kv.faults import kinds

ROOT = pathlib.Path(__file__).resolve().parents[2]


def config(directory: pathlib.Path, **changes: object) -> FaultsConfig:
    found = config_tools.load(str(ROOT / "configs" / "faults.py"))
    small = dict(
        model="random",
        kinds=(kinds.ZERO, kinds.REUSED),
        checks=(kinds.CHECKSUM, kinds.EVIDENCE, kinds.AUDIT, "checksum + audit"),
        document_tokens=16,
        chunk=8,
        workdir=str(directory / "run"),
    )
    return config_tools.override(found, small | changes)


@pytest.mark.full
def test_files_and_claims(tmp_path: pathlib.Path) -> None:
    chosen = config(tmp_path)
    results = faults.run(chosen)
    place = pathlib.Path(chosen.workdir)
    assert json.loads((place / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (place / "faults.png").stat().st_size > 0
    summary = results["summary"]
    assert results["columns"] == [
        ALL_ON,
        "no checksum",
        "no evidence",
        "no audit",
        "no checksum + audit",
        GUARD,
        ALL_OFF,
    ]
    on, off = summary[ALL_ON], summary[ALL_OFF]
    assert on["refused"] == on["right_reason"] == on["trials"] == 12
    assert off["faults"] == off["bites"] == 12 and off["trials"] == off["silent"] == 24
    assert summary[GUARD]["refused"] == 12
    table = faults_report.matrix(results["trials"])
    assert table[kinds.ZERO]["no checksum"][0] == 3 and table[kinds.ZERO]["no evidence"][0] == 0
    assert table[kinds.ZERO]["no audit"][0] == 3
    assert table[kinds.ZERO]["no checksum + audit"][0] == 6
    assert table[kinds.REUSED] == {
        **dict.fromkeys((ALL_ON, GUARD), (0, 3)),
        **dict.fromkeys(("no checksum", "no audit", "no checksum + audit"), (0, 1)),
        "no evidence": (0, 3),  # others find it
        ALL_OFF: (6, 6),
    }
    _, resident = faults_report.PLACES
    assert len(faults_report.of_place(results["trials"], resident)) == 4 * 2 + 4 + 4 * 2
    assert "no checksum" not in faults_report._table(results, resident)[0]
    report = (place / "report.md").read_text()
    assert "no evidence: 0 become silently wrong (others find them)." in report
    assert "| zero | host | kept |" in report
    shown = exhibit_of(str(place))  # as a report joins it
    assert list(shown.figures) == ["faults"] and len(shown.tables) == 3
    assert (place / "faults.png").stat().st_size > 5_000


@pytest.mark.full
def test_in_pages_all_checks_are_on_or_off(tmp_path: pathlib.Path) -> None:
    chosen = config(tmp_path, paged=True, kinds=(kinds.ZERO, kinds.ENTRY, kinds.RELEASED))
    results = faults.run(chosen)
    on, off = results["summary"][ALL_ON], results["summary"][ALL_OFF]
    assert results["columns"] == [ALL_ON, ALL_OFF]
    assert on["refused"] == on["right_reason"] == on["trials"] == off["answers"] > 8
    assert off["silent"] == off["trials"] == 2 * on["trials"]
    assert "With all checks on, 0 of" in (pathlib.Path(chosen.workdir) / "report.md").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt"},
        {"sample": "some"},
        {"kinds": ()},
        {"checks": ("luck",)},
        {"checks": ("audit + luck",)},
        {"extents": ("first",)},
        {"requests": 0},
        {"document_tokens": 8},
        {"document_tokens": 20},
        {"model": "recall", "checkpoint": "/nope"},
        {"model": "recall", "chunk": 7, "document_tokens": 14},
        {"workdir": ""},
        {"model": "recall", "checkpoint": "experiments/checkpoints/text_hybrid"},
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: pathlib.Path, changes: dict) -> None:
    with pytest.raises(ValueError):
        faults.run(config(tmp_path, **changes))


@pytest.mark.full
def test_faults_change_tokens_where_no_check_is_on(tmp_path: pathlib.Path) -> None:
    """The injectors bite: 9 of 10 faults change a token of a trained model, all of them logits.

    Within 2 m' + 1 tokens, on one of two requests.
    """
    chosen = config(tmp_path, model="recall", document_tokens=64, chunk=32)
    made = faults_benches.benches(chosen)
    assert len(made) == 2 and made[0].outputs == 2 * 2 + 1
    sample = kinds.covering(made[0].cases())
    token, logit = set(), set()
    for case in sample:
        for number, bench in enumerate(made):
            place = tmp_path / f"{len(token)} {len(logit)} {number} {case}"
            found = bench.run(case, kinds.CHECKS, place)
            token |= {case} if found.token >= 0 else set()
            logit |= {case} if found.logit >= 0 else set()
    assert len(logit) == len(sample) and len(token) >= 0.9 * len(sample)


def test_prompts_of_recall_ask_for_what_they_hold(tmp_path: pathlib.Path) -> None:
    chosen = config(tmp_path, model="recall", document_tokens=64, chunk=32)
    recipe, _ = checkpoint.load(chosen.checkpoint)
    task = faults_benches._recall(recipe, chosen)
    rng = np.random.default_rng(0)
    for split in (False, True) * 5:
        tokens = faults_benches._prompt(task, None, chosen, rng, split)
        assert len(tokens) == chosen.document_tokens + chosen.question_tokens
        start = chosen.document_tokens + split
        places = np.flatnonzero(tokens[:start] < task.vocab // 2)
        assert len(places) == task.pairs and places[-1] == start - 2
        assert (tokens[places + 1] >= task.vocab // 2).all()
        assert (tokens[places + 1] < task.vocab).all()
        asked = tokens[start:]
        assert asked[0] == tokens[places[-1]] and set(asked) <= set(tokens[places])
        assert len(set(asked)) == len(asked)
