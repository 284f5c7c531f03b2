"""The main job at a small size: what it claims must hold for random weights too."""

import json

import jax
import numpy as np
import pytest

import models
from experiments import checkpoint, config_tools, reuse, reuse_config, reuse_metrics, reuse_report
from experiments.reuse_arms import Served


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> reuse_config.ReuseConfig:
    """Untrained models of the shipped kinds; few and short requests."""
    directory = tmp_path_factory.mktemp("reuse")
    config = reuse_config.ReuseConfig(workdir=str(directory / "run"), capacities=(0.6,))
    for scenario in (config.recall, config.control):
        recipe = config_tools.load(scenario.train_config)
        params = models.build(recipe.model).init(jax.random.key(3))
        scenario.checkpoint = str(directory / scenario.name)
        checkpoint.export(params, recipe, scenario.checkpoint)
        scenario.requests, scenario.documents = 12, 3
    config.scenarios = ("recall", "control")
    return config


@pytest.fixture(scope="module")
def cells(small: reuse_config.ReuseConfig) -> dict[str, dict]:
    return {cell["scenario"]: cell["modes"] for cell in reuse.run(small)}


def test_validated_is_bitwise_the_cold_run(cells):
    for modes in cells.values():
        row = modes["validated"]
        assert row["bitwise_requests"] == row["requests"] and row["wrong_requests"] == 0
        assert row["tokens_reused"] > 0


def test_hash_only_is_wrong_on_the_hybrid_and_right_on_the_control(cells):
    for mode in ("hash_only", "hash_only_zeroed"):
        assert cells["recall"][mode]["tokens_reused"] > 0
        assert cells["recall"][mode]["max_logit_difference"] > 1e-3
        assert cells["control"][mode]["tokens_reused"] > 0
        assert cells["control"][mode]["bitwise_requests"] == 12


def test_files_and_resume(small, cells):
    def read(name: str) -> str:
        with open(f"{small.workdir}/{name}") as file:
            return file.read()

    results = json.loads(read("results.json"))
    assert [cell["scenario"] for cell in results["cells"]] == ["recall", "control"]
    assert "| validated |" in read("report.md")
    assert json.loads(read("run.json"))["versions"]["jax"] == jax.__version__
    again = reuse.run(small)  # finished cells are kept as they are, times included
    assert again == results["cells"]


def test_train_makes_the_checkpoint_anew(small, tmp_path, monkeypatch):
    seen = []

    def trained(recipe):
        seen.append(recipe)
        raise RuntimeError("trained")

    monkeypatch.setattr(reuse.training, "run", trained)
    config = reuse_config.ReuseConfig(workdir=str(tmp_path), train=True)
    with pytest.raises(RuntimeError, match="trained"):
        reuse.run(config)
    assert seen[0].workdir.startswith(str(tmp_path))


def test_wrong_settings_are_named(small, tmp_path):
    for changes, message in (
        ({"modes": ("validated", "hash")}, "unknown modes"),
        ({"scenarios": ("recal",)}, "unknown scenario 'recal'"),
        ({"capacities": (0.9, 0.0)}, "capacities="),
        ({"policy": "often"}, "unknown checkpoint policy"),
        ({"policy": "never"}, "policy='never'"),
        ({"capacities": (0.9, 0.00001)}, "capacities=.* cannot hold"),
        # Of the last scenario: told before the first one runs.
        ({"control.requests": 0}, "control: requests=0"),
        ({"control.kind": "recal"}, "control: kind='recal'"),
        ({"control.document_tokens": 97}, "control: document_tokens=97 is not a multiple"),
        ({"control.kind": "text"}, "was not trained on text"),
        ({"control.checkpoint": "none"}, "no checkpoint 'none'"),
        ({"control.train_config": "none.py", "train": True}, r"none\.py: no such file"),
    ):
        config = reuse_config.ReuseConfig(workdir=str(tmp_path / "run"))
        config_tools.override(config, changes)
        with pytest.raises(ValueError, match=message):
            reuse.run(config)
    assert not (tmp_path / "run").exists()


def test_summaries_count_what_happened():
    def one(answer: list[int], logit: float, reused: int) -> Served:
        return Served(
            10, 8, 8, reused, 0, 10 - reused, 0.5, np.array(answer), np.full(2, logit), ()
        )

    requests = [type("R", (), {"truth": np.array([1, 2])})] * 2
    cold = [one([1, 2], 0.0, 0), one([1, 3], 0.0, 0)]
    warm = [one([1, 2], 0.0, 8), one([4, 3], 0.5, 8)]
    row = reuse_metrics.summarise(warm, cold, requests)
    assert row["wrong_requests"] == 1 and row["bitwise_requests"] == 1
    assert row["right"] == 0.5 and row["token_agreement"] == 0.75
    assert row["max_logit_difference"] == 0.5 and row["tokens_reused"] == 16
    assert reuse_report.claims([]) == []
