"""The fault matrix end to end on a tiny model and few faults."""

import json
import pathlib

import pytest

from experiments import config_tools, faults, faults_report
from experiments.faults_config import ALL_OFF, ALL_ON, GUARD, FaultsConfig
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
    assert on["refused"] == on["right_reason"] == on["trials"] == 8
    assert off["faults"] == off["bites"] == 8 and off["trials"] == off["silent"] == 16
    assert summary[GUARD]["refused"] == 8
    table = faults_report.matrix(results["trials"])
    assert table[kinds.ZERO]["no checksum"][0] == 3 and table[kinds.ZERO]["no evidence"][0] == 0
    assert table[kinds.ZERO]["no audit"][0] == 4
    assert table[kinds.ZERO]["no checksum + audit"][0] == 7
    assert table[kinds.REUSED] == {
        **dict.fromkeys((ALL_ON, "no checksum", "no audit", "no checksum + audit", GUARD), (0, 1)),
        "no evidence": (1, 1),
        ALL_OFF: (2, 2),
    }
    report = (place / "report.md").read_text()
    assert "no evidence: 1 become silently wrong: slot_reuse." in report
    assert "| zero | host | kept |" in report


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
        {"workdir": ""},
        {"model": "recall", "checkpoint": "experiments/checkpoints/text_hybrid"},
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: pathlib.Path, changes: dict) -> None:
    with pytest.raises(ValueError):
        faults.run(config(tmp_path, **changes))
