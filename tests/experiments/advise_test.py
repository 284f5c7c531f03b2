"""Advice: answers that must follow from the model and the machine."""

import json
import pathlib

import pytest

import models
from configs import advise as config_file
from experiments import advise, counting
from experiments.advise_config import AdviseConfig
from tests.models import families


def config_of(name: str, place: pathlib.Path, **fields: object) -> AdviseConfig:
    config = config_file.get_config(name)
    config.trace.limit, config.placements = 120, ("full", "fork", "zero")
    config.trace.generator.follow, config.trace.generator.turns = 0.9, 0.8
    config.workdir = str(place)
    for field, value in fields.items():
        setattr(config, field, value)
    return config


def answers(results: dict) -> dict[str, dict]:
    """By a word for each question, in their order."""
    words = ("suffice", "pay", "policy", "disk", "forfeit")
    return dict(zip(words, results["answers"], strict=True))


def test_a_hybrid(tmp_path: pathlib.Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ({"tokens": [day, *range(200)]} for day in range(5))
    prompts.write_text("".join(json.dumps(x) + "\n" for x in lines))
    results = advise.run(config_of("v4_flash", tmp_path / "run", prompts=str(prompts)))
    found = answers(results)
    assert found["suffice"]["verdict"] == "no" and "windows" in found["suffice"]["why"]
    assert found["pay"]["verdict"] == "yes"
    table = results["policies"]
    assert found["policy"]["verdict"] == max(table, key=lambda x: table[x]["net_s"])
    assert set(table) == {"full", "fork", "zero"}
    assert found["forfeit"]["numbers"]["prefix"] == 0
    # Two whole blocks of every prompt but the first; the third holds the day.
    assert found["forfeit"]["numbers"]["forfeited"] == 4 * 2 * 64 / (5 * 201)
    text = (tmp_path / "run" / "report.md").read_text()
    assert "## Answers" in text and "## Window policies" in text


def test_history_alone(tmp_path: pathlib.Path) -> None:
    found = answers(advise.run(config_of("v3_2", tmp_path)))
    assert found["suffice"]["verdict"] == "yes" and found["policy"]["verdict"] == "never"
    assert found["forfeit"]["verdict"] == "unknown"


def test_recurrent_layers(tmp_path: pathlib.Path) -> None:
    config = config_of("v4_flash", tmp_path, placements=("full", "zero"))
    config.model = families.model("kimi_linear")[0].config
    results = advise.run(config)
    assert "state" in answers(results)["suffice"]["why"]
    table = results["policies"]
    # Nothing short of the whole prompt brings a state back.
    assert table["zero"]["resumed"] == 0 < table["full"]["resumed"]
    assert table["zero"]["hash_hit"] == pytest.approx(table["full"]["hash_hit"])


def test_reading_that_takes_longer_than_computing_does_not_pay(tmp_path: pathlib.Path) -> None:
    slow = config_of("v4_flash", tmp_path, host_bytes_per_s=1e6, disk_bytes_per_s=1e5, host_gb=0.5,
                     placements=("full",))  # fmt: skip
    results = advise.run(slow)
    found = answers(results)
    assert found["pay"]["verdict"] == found["disk"]["verdict"] == "no"
    assert found["disk"]["numbers"]["disk_bytes_read"] > 0


def test_operations_between_two_lengths() -> None:
    model = models.build(config_file.get_config("v4_pro").model)
    flops = advise.flops_of(model)
    for n in (4_096, 16_384, 65_536):
        exact = sum(counting.decode_flops(model, n).values())
        assert flops(n - 1, n) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    "field, value",
    [("flops_per_s", 0.0), ("placements", ()), ("placements", ("full", "often")),
     ("order", "lru+time"), ("prompts", "none.jsonl"), ("workdir", ""),
     ("model", models.DecoderConfig(window=-1))],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    field: str, value: object, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise, "Replays", None)  # before any replay
    config = config_of("v3_2", tmp_path)
    setattr(config, field, value)
    with pytest.raises(ValueError):
        advise.run(config)
    with pytest.raises(ValueError, match="v4_pro"):
        config_file.get_config("v5")
